"""Transfers of whole ranges of one axis: what collectives move.

    all_gather   every rank takes all of every rank's array
    broadcast    every rank takes all of the root's, and nothing else
    all_to_all   rank d takes the d-th range of every rank's array

A rank puts what it takes one after the other along the axis, in rank order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod

from shardmath.base.immutable import Immutable
from shardmath.geometry import Move, Run
from shardmath.redistribution.plan import Transfer

Shape = tuple[int, ...]


class Sections(Immutable, Transfer):
    """Ranges of `axis` of the ranks' arrays, which are of `shapes`.

    `counts[s][d]` indices of rank s go to rank d; they begin at `starts[s][d]`. Arrays of no axes
    move whole, where the count is not 0.
    """

    shapes: tuple[Shape, ...]
    axis: int
    counts: tuple[Shape, ...]
    starts: tuple[Shape, ...]
    itemsize: int

    @classmethod
    def gathered(cls, shapes: Sequence[Shape], axis: int, itemsize: int) -> Sections:
        """All of every rank's array, to every rank."""
        size = len(shapes)
        counts = tuple((shape[axis],) * size for shape in shapes)
        return cls(tuple(shapes), axis, counts, ((0,) * size,) * size, itemsize)

    @classmethod
    def of_one(cls, shape: Shape, root: int, size: int, itemsize: int) -> Sections:
        """All of the array of `root`, to every rank."""
        whole = shape[0] if shape else 1
        counts = tuple((whole * (rank == root),) * size for rank in range(size))
        return cls((shape,) * size, 0, counts, ((0,) * size,) * size, itemsize)

    @classmethod
    def divided(
        cls, shapes: Sequence[Shape], axis: int, counts: Sequence[Shape], itemsize: int
    ) -> Sections:
        """Rank s's array in parts of `counts[s]` indices, one for each rank."""
        starts = tuple((0, *accumulate(sent[:-1])) for sent in counts)
        return cls(tuple(shapes), axis, tuple(counts), starts, itemsize)

    @property
    def kind(self) -> str:
        return f"sections along axis {self.axis}"

    @property
    def crosses(self) -> bool:
        return any(
            self._moves(src, dst)
            for src in range(len(self.shapes))
            for dst in range(len(self.shapes))
            if src != dst
        )

    @property
    def stays(self) -> bool:
        return len(self.shapes) == 1

    def source_shape(self, rank: int) -> Shape:
        return self.shapes[rank]

    def result_shape(self, rank: int) -> Shape:
        shape = self.shapes[0]
        total = sum(sent[rank] for sent in self.counts)
        return (*shape[: self.axis], total, *shape[self.axis + 1 :]) if shape else shape

    def into(self, rank: int) -> tuple[Move, ...]:
        starts = accumulate((sent[rank] for sent in self.counts), initial=0)
        return tuple(
            self._move(src, rank, start)
            for src, start in zip(range(len(self.shapes)), starts, strict=False)
            if self._moves(src, rank)
        )

    def out_of(self, rank: int) -> tuple[Move, ...]:
        size = len(self.shapes)
        return tuple(
            self._move(rank, dst, sum(sent[dst] for sent in self.counts[:rank]))
            for dst in ((rank + 1 + step) % size for step in range(size))
            if self._moves(rank, dst)
        )

    def __str__(self) -> str:
        total = sum(prod(self.result_shape(rank)) for rank in range(len(self.shapes)))
        return f"{total:,} elements of {self.itemsize} bytes arrive along axis {self.axis}"

    def _moves(self, src: int, dst: int) -> bool:
        return bool(self.counts[src][dst]) and prod(self._others(src)) > 0

    def _others(self, src: int) -> Shape:
        shape = self.shapes[src]
        return (*shape[: self.axis], *shape[self.axis + 1 :])

    def _move(self, src: int, dst: int, start: int) -> Move:
        runs = [Run(1, extent, 0, 0, 0, 0) for extent in self.shapes[src]]
        if runs:
            runs[self.axis] = Run(1, self.counts[src][dst], self.starts[src][dst], 0, start, 0)
        return Move(src, dst, tuple(runs))
