"""The columns of a square matrix, dealt to the ranks in blocks: who has which, and where; and how
its lower triangle gets there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import prod

from shardmath.base.immutable import Immutable
from shardmath.geometry import Layout, Move, Spans, Traffic, counted, moves, shared_part
from shardmath.redistribution import Transfer
from shardmath.redistribution.plan import in_ring_order

_NOTHING = Spans(0, 0, 0, 0)

Rows = tuple[int, int]  # from, to


class Blocks(Immutable):
    """Blocks of `width` of the n columns of an n x n matrix, dealt to `size` ranks in turn."""

    n: int
    width: int
    size: int

    @property
    def count(self) -> int:
        """The number of blocks; the last may be narrower."""
        return -(-self.n // self.width)

    def bounds(self, k: int) -> tuple[int, int]:
        """The first column of block `k`, and the one behind it; also the rows of its diagonal."""
        return k * self.width, min((k + 1) * self.width, self.n)

    def owner(self, k: int) -> int:
        """The rank that has block `k`."""
        return k % self.size

    def before(self, k: int, rank: int) -> int:
        """How many columns `rank` has of blocks before `k`."""
        owned = len(range(rank, min(k, self.count), self.size))
        return min(owned * self.width, self.spans[rank].length)

    def place(self, k: int) -> tuple[int, int]:
        """The columns of block `k` among those of its owner."""
        first = self.before(k, self.owner(k))
        lo, hi = self.bounds(k)
        return first, first + hi - lo

    def owned(self, rank: int) -> range:
        """The blocks of `rank`."""
        return range(rank, self.count, self.size)

    @property
    def spans(self) -> list[Spans]:
        """The columns of each rank."""
        return [Spans.cyclic(self.n, self.width, self.size, rank) for rank in range(self.size)]

    @property
    def layout(self) -> Layout:
        """The layout of the matrix: every rank has all rows of its columns."""
        return Layout.product((self.n, self.n), [None, self.spans], size=self.size)

    @property
    def vector(self) -> Layout:
        """The layout of a vector with an element for each column, on the rank of the column."""
        return Layout.product((self.n,), [self.spans], size=self.size)

    def read(self, k: int, rows: Sequence[Rows | None]) -> Layout:
        """The layout of the rows of block `k` that each rank reads, None if it reads nothing."""
        columns, nothing = Spans.interval(*self.bounds(k)), (_NOTHING, _NOTHING)
        parts = tuple(nothing if own is None else (Spans.interval(*own), columns) for own in rows)
        return Layout((self.n, self.n), parts)


class LowerTriangle(Immutable, Transfer):
    """The lower triangle of a matrix that is split as `outside`, on its way to the ranks' columns;
    if it `returns`, on the way back.

        whole matrix, by rows         columns of rank 0, and of rank 1
        rank 0    0 . . .             0 .         .
                  0 1 . .     ->      0 .         1
        rank 1    0 1 2 .             0 2         1 .
                  0 1 2 3             0 2         1 3

    Of each block of columns the rows from its diagonal on move: half of the matrix. What is above
    is neither read nor written.
    """

    blocks: Blocks
    outside: Layout
    itemsize: int
    returns: bool = False

    @property
    def kind(self) -> str:
        return "lower triangle"

    @cached_property
    def traffic(self) -> Traffic:
        sent, received = ([0] * self.blocks.size for _ in range(2))
        for k in range(self.blocks.count):
            inside, owner = self._inside(k), self.blocks.owner(k)
            here = inside.spans(owner)
            leaving = (
                (owner, rank, prod(map(Spans.shared, here, part)))
                for rank, part in enumerate(self.outside.parts)
            )
            for src, dst, elements in leaving if self.returns else counted(self.outside, inside):
                if src != dst:
                    sent[src] += elements * self.itemsize
                    received[dst] += elements * self.itemsize
        return Traffic(tuple(sent), tuple(received))

    def source_shape(self, rank: int) -> tuple[int, ...]:
        return (self.blocks.layout if self.returns else self.outside).local_shape(rank)

    def result_shape(self, rank: int) -> tuple[int, ...]:
        return (self.outside if self.returns else self.blocks.layout).local_shape(rank)

    def into(self, rank: int) -> tuple[Move, ...]:
        numbers = range(self.blocks.count) if self.returns else self.blocks.owned(rank)
        return self._once(
            ("into", rank), lambda: tuple(x for k in numbers for x in self._of(k, dst=rank))
        )

    def out_of(self, rank: int) -> tuple[Move, ...]:
        numbers = self.blocks.owned(rank) if self.returns else range(self.blocks.count)
        found = (x for k in numbers for x in self._of(k, src=rank))
        return self._once(("out of", rank), lambda: in_ring_order(found, rank, self.blocks.size))

    def _inside(self, k: int) -> Layout:
        """The layout of the rows of block `k` from its diagonal on, which its owner has."""
        rows, owner = (self.blocks.bounds(k)[0], self.blocks.n), self.blocks.owner(k)
        return self.blocks.read(
            k, [rows if rank == owner else None for rank in range(self.blocks.size)]
        )

    def _of(self, k: int, *, src: int | None = None, dst: int | None = None) -> list[Move]:
        """The moves of block `k` from rank `src`, or to rank `dst`."""
        inside, owner = self._inside(k), self.blocks.owner(k)
        if self.returns:
            ranks = range(self.blocks.size) if dst is None else (dst,)
            found = [
                x for rank in ranks for x in shared_part(inside, self.outside, src=owner, dst=rank)
            ]
        else:
            found = list(moves(self.outside, inside, src_rank=src, dst_rank=dst))
        starts = self.blocks.bounds(k)[0], self.blocks.place(k)[0]
        side = "src_start" if self.returns else "dst_start"
        return [_shifted(move, side, starts) for move in found]


def _shifted(move: Move, side: str, starts: tuple[int, int]) -> Move:
    """The move, where the array of that side begins at other indices."""
    for axis, start in enumerate(starts):
        run = move.runs[axis]
        move = move.with_run(axis, replace(run, **{side: getattr(run, side) + start}))
    return move
