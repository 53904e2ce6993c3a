"""The group of one rank: a program that nobody launched.

It never waits and needs no library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardmath.group.base import ProcessGroup, ReductionOp

if TYPE_CHECKING:
    from shardmath.group.base import Array

__all__ = ["SoloProcessGroup"]


class SoloProcessGroup(ProcessGroup):
    """One rank, which agrees with itself."""

    @property
    def rank(self) -> int:
        """0."""
        return 0

    @property
    def nranks(self) -> int:
        """1."""
        return 1

    def broadcast_buffer(self, array: Array, *, root: int = 0) -> None:
        """Leave `array` as it is. Raises ValueError unless `root` is 0."""
        if root != 0:
            raise ValueError(f"root is {root!r}; a group of one rank has rank 0 only")

    def allreduce_buffer(self, array: Array, *, op: ReductionOp) -> None:
        """Leave `array` as it is."""
        ReductionOp(op)

    def split(self, color: int | None, *, key: int = 0) -> SoloProcessGroup | None:
        """The group itself, or None if `color` is None."""
        return None if color is None else self

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        """`data`, alone in a list."""
        return [bytes(data)]
