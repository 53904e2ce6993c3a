"""The lower triangle of a matrix on its way to the columns that ranks compute with, and back.

    whole matrix, by rows         columns of rank 0, and of rank 1
    rank 0    0 . . .             0 .         .
              0 1 . .     ->      0 .         1
    rank 1    0 1 2 .             0 2         1 .
              0 1 2 3             0 2         1 3

Of each block of columns the rows from its diagonal on move: half of the matrix. What is above is
neither read nor written.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from math import prod

from shardmath.base.immutable import Immutable
from shardmath.factorisations.blocks import Blocks
from shardmath.geometry import Layout, Move, Spans, Traffic, counted, moves, shared_part
from shardmath.redistribution import Transfer


class LowerTriangle(Immutable, Transfer):
    """The lower triangle of a matrix that is split as `outside`, into the ranks' columns; if it
    `returns`, out of these.
    """

    blocks: Blocks
    outside: Layout
    itemsize: int
    returns: bool = False

    @property
    def kind(self) -> str:
        return "lower triangle"

    @property
    def crosses(self) -> bool:
        return any(self.traffic.received)

    @property
    def stays(self) -> bool:
        return False

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
        size = self.blocks.size
        numbers = self.blocks.owned(rank) if self.returns else range(self.blocks.count)
        return self._once(
            ("out of", rank),
            lambda: tuple(
                sorted(
                    (x for k in numbers for x in self._of(k, src=rank)),
                    key=lambda move: (move.dst - rank - 1) % size,
                )
            ),
        )

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
