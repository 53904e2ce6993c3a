"""What one redistribution moves: a plan that is data, prints in a few lines, and needs no ranks.

All ranks derive the same plan from the same two layouts. Each rank pulls: it executes the moves
into itself, and reads the others' local arrays in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardmath.geometry import Layout, Move, Pattern, Traffic, bytes_moved, classify, moves

__all__ = ["TransferPlan"]

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class TransferPlan:
    """The redistribution of an array of `itemsize`-byte elements from layout `src` to layout `dst`.

    Raises ValueError when the global shapes or the numbers of ranks differ.
    """

    src: Layout
    dst: Layout
    itemsize: int

    def __post_init__(self) -> None:
        if self.src.global_shape != self.dst.global_shape or self.src.size != self.dst.size:
            raise ValueError(
                f"a redistribution changes neither the global shape nor the ranks: "
                f"{self.src.describe()}; {self.dst.describe()}"
            )

    @cached_property
    def pattern(self) -> Pattern:
        """What the redistribution is, seen over all ranks."""
        return classify(self.src, self.dst)

    @cached_property
    def traffic(self) -> Traffic:
        """The bytes that each rank sends and receives; what stays on a rank is not counted."""
        return bytes_moved(self.src, self.dst, self.itemsize)

    @property
    def crosses(self) -> bool:
        """True when any byte changes its rank; otherwise ranks need not wait for each other."""
        return any(self.traffic.received)

    def into(self, rank: int) -> tuple[Move, ...]:
        """The moves that `rank` executes: all that end in its part."""
        if rank not in self._into:
            self._into[rank] = moves(self.src, self.dst, dst_rank=rank)
        return self._into[rank]

    def read_by_peers(self, rank: int) -> Ranges | None:
        """For each axis of `rank`'s local array the range (lo, hi) in which peers read.

        None when they read nothing.
        """
        if rank not in self._read:
            self._read[rank] = self._bounds(rank)
        return self._read[rank]

    def explain(self) -> str:
        """A few lines: from, to, the pattern and the bytes."""
        sent, received = self.traffic
        return (
            f"redistribute {self.src.describe()}\n"
            f"          to {self.dst.describe()}\n"
            f"{self.pattern.value}; {self.itemsize} bytes per element; at most "
            f"{max(sent, default=0):,} bytes sent and {max(received, default=0):,} received by a rank"
        )

    def __str__(self) -> str:
        return self.explain()

    def _bounds(self, rank: int) -> Ranges | None:
        out = [m for m in moves(self.src, self.dst, src_rank=rank) if m.dst != rank]
        if not out:
            return None
        axes = zip(*(move.runs for move in out), strict=True)
        return tuple(
            (
                min(run.src_start for run in runs),
                max(run.src_start + (run.count - 1) * run.src_step + run.length for run in runs),
            )
            for runs in axes
        )

    # What has been worked out so far; a plan is compared and printed by its fields alone.

    @cached_property
    def _into(self) -> dict[int, tuple[Move, ...]]:
        return {}

    @cached_property
    def _read(self) -> dict[int, Ranges | None]:
        return {}
