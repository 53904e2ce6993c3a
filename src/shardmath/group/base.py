"""Groups of ranks: who they are, and agreement on a few bytes.

A group serves start-up and agreement, never data. The four abstract members are the surface that a
user's own group implements; the rest is built on them and holds for every group. Nothing that a
peer sends is unpickled.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeVar

from shardmath.errors import CollectiveMismatch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[Any]

T = TypeVar("T")

_WORD = 8


class ReductionOp(IntEnum):
    """How `allreduce_buffer` combines the ranks' elements."""

    SUM = 0
    MIN = 1
    MAX = 2


class ProcessGroup(ABC):
    """The ranks of one job or of one part of it, numbered from 0 to `nranks` - 1."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """The process's number in the group."""

    @property
    @abstractmethod
    def nranks(self) -> int:
        """The number of ranks in the group."""

    @property
    def job_ranks(self) -> Sequence[int]:
        """The number of each rank in the job: torch's global ranks, for a group of torch's."""
        return range(self.nranks)

    @property
    def awaited(self) -> Sequence[int]:
        """The ranks that a call in progress still waits for, as far as this group knows."""
        return ()

    @abstractmethod
    def broadcast_buffer(self, array: Array, *, root: int = 0) -> None:
        """Fill `array` with the array of rank `root`. Collective; same shape and dtype on all."""

    @abstractmethod
    def allreduce_buffer(self, array: Array, *, op: ReductionOp) -> None:
        """Combine `array` over the ranks, in place. Collective; same shape and dtype on all."""

    def allreduce_object(self, obj: T, *, op: Callable[[T, T], T]) -> T:
        """`op` folded over the ranks' objects in the order of the ranks. Collective.

        Raises TypeError when `obj` is not plain data (see `shardmath.base.wire`).
        """
        objects: list[T] = self.allgather_values(obj)
        return functools.reduce(op, objects)

    def allgather_values(self, obj: Any) -> list[Any]:
        """The ranks' objects, in the order of the ranks. Collective; they may differ in kind.

        Raises TypeError when `obj` is not plain data (see `shardmath.base.wire`).
        """
        from shardmath.base import wire

        return [wire.decode(data) for data in self.allgather_bytes(wire.encode(obj))]

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        """The `data` of every rank, in the order of the ranks. Collective; sizes may differ."""
        import numpy as np

        sizes = np.zeros(self.nranks, np.int64)
        sizes[self.rank] = len(data)
        self.allreduce_buffer(sizes, op=ReductionOp.SUM)
        # Every rank owns whole words of one buffer that is zero elsewhere: the sum places them all.
        ends = np.cumsum(-(-sizes // _WORD))
        starts = ends - -(-sizes // _WORD)
        words = np.zeros(int(ends[-1]), np.int64)
        raw = words.view(np.uint8)
        offset = int(starts[self.rank]) * _WORD
        raw[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        if words.size:
            self.allreduce_buffer(words, op=ReductionOp.SUM)
        return [
            raw[start * _WORD : start * _WORD + size].tobytes()
            for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)
        ]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, nranks={self.nranks})"


class GatheringGroup(ProcessGroup):
    """A group whose one verb is `allgather_bytes`: arrays that differ are reported to all."""

    def __init__(self, rank: int, nranks: int) -> None:
        self._rank, self._nranks = rank, nranks

    @property
    def rank(self) -> int:
        """The process's number in the group."""
        return self._rank

    @property
    def nranks(self) -> int:
        """The number of ranks in the group."""
        return self._nranks

    @abstractmethod
    def allgather_bytes(self, data: bytes) -> list[bytes]:
        """The `data` of every rank, in the order of the ranks. Collective; sizes may differ."""

    def broadcast_buffer(self, array: Array, *, root: int = 0) -> None:
        """Fill `array` with the array of rank `root`. Collective.

        Raises CollectiveMismatch on every rank when shapes or dtypes differ.
        """
        if not 0 <= root < self.nranks:
            raise ValueError(f"root is {root!r}; the group has ranks 0 to {self.nranks - 1}")
        array[...] = self._gather_arrays(array, contribute=self.rank == root)[root]

    def allreduce_buffer(self, array: Array, *, op: ReductionOp) -> None:
        """Combine `array` over the ranks, in place and in the order of the ranks. Collective.

        Raises CollectiveMismatch on every rank when shapes or dtypes differ.
        """
        op = ReductionOp(op)
        array[...] = _reduced(self._gather_arrays(array, contribute=True), op)

    def _gather_arrays(self, array: Array, *, contribute: bool) -> list[Array]:
        """Every rank's array; None for the ranks that do not contribute theirs."""
        form = (array.dtype.name, array.shape)
        parts = self.allgather_values((form, array if contribute else None))
        for rank, (other, _) in enumerate(parts):
            if other != parts[0][0]:
                raise CollectiveMismatch(
                    f"rank {self.rank}: rank {rank} passed an array of dtype and shape {other}, "
                    f"rank 0 one of {parts[0][0]}"
                )
        return [part for _, part in parts]


class SoloProcessGroup(GatheringGroup):
    """One rank, which agrees with itself: a program that nobody launched. It never waits."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        """`data`, alone in a list."""
        return [bytes(data)]


def rank_names(ranks: Sequence[int]) -> str:
    """The ranks in words, such as `rank 2` or `ranks 2, 5`."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _reduced(arrays: Sequence[Array], op: ReductionOp) -> Array:
    import numpy as np

    combine: dict[ReductionOp, np.ufunc] = {
        ReductionOp.SUM: np.add,
        ReductionOp.MIN: np.minimum,
        ReductionOp.MAX: np.maximum,
    }
    return functools.reduce(combine[op], arrays)
