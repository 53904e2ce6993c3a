"""GEMM + AllReduce: owners add up what they are sent, and write the sums to all ranks.

Tiles and sums travel while the product goes on, chunk after chunk; what is left when it ends is the
last chunk. Sums arrive in symmetric memory, and are copied from there: the result may lie in any
memory. It has the same bits on all ranks.
"""

from __future__ import annotations

import struct
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from shardmath.context import Context
from shardmath.operators.matmul.gpu.choice import choose_shared_shape
from shardmath.operators.matmul.gpu.sending import SendingProduct, Shape, write
from shardmath.operators.matmul.gpu.sharded import ShardedProduct
from shardmath.operators.matmul.gpu.walk import TILE_COLUMNS, TILE_ROWS

__all__ = ["GemmAllReduce", "even_rows"]


class GemmAllReduce:
    """`launch` leaves all rows of the product on every rank. Made by `together`.

    `problem.rows` says which rank sums which rows: see `even_rows`.
    """

    def __init__(self, sending: SendingProduct) -> None:
        self._sending = sending
        self._pitch = _pitch(sending.problem)
        self._first = [0, *accumulate(sending.problem.rows[:-1])]
        self._table = sending.extra(sending.team.rank)
        write(self._table, self._parts())

    @classmethod
    def together(
        cls, context: Context, problem: ShardedProduct, shape: Shape | None = None
    ) -> GemmAllReduce:
        """A plan. Collective.

        Raises ValueError on all ranks where they do not mean the same product, or where
        `problem.misfit` speaks on one of them; HeapExhausted.
        """
        shape = shape or choose_shared_shape(problem)
        extra = _sums(problem, shape) + sum(problem.rows) * _pitch(problem)
        return cls(SendingProduct.together(context, problem, shape, extra=extra))

    def launch(self, a: int, b: int, result: int, stream: int, *, pitch: int | None = None) -> None:
        """Put the product of A and B on `stream`; A, B and all rows of the result lie there.

        `pitch` is how many elements the rows of the result are apart; None is `columns`. Never
        waits on the host, and can be captured in a CUDA graph. Collective, in stream order.
        """
        sending = self._sending
        sending.require_usable()
        nbytes = 2 * (sending.problem.columns if pitch is None else pitch)
        own = result + self._first[sending.team.rank] * nbytes
        gather = self._of_gather(result, nbytes)
        sending.multiply(
            "everywhere", a, b, own, nbytes, stream, copies=self._copies, behind=gather
        )

    def free(self) -> None:
        """See SendingProduct.free."""
        self._sending.free()

    def _copies_on(self, rank: int) -> int:
        """Where a rank has the sums of all owners."""
        return self._sending.extra(rank) + _sums(self._sending.problem, self._sending.shape)

    @cached_property
    def _copies(self) -> bytes:
        """Where this rank's sums go: their pitch, and where they begin on the next rank, ..."""
        rank, size = self._sending.team.rank, self._sending.team.size
        others = [(rank + 1 + step) % size for step in range(size)]
        own = self._first[rank] * self._pitch
        places = [self._copies_on(other) + own for other in others]
        return struct.pack(f"Q{size}Q", self._pitch, *places)

    def _of_gather(self, result: int, pitch: int) -> bytes:
        """The struct `GatherArgument`."""
        sending, first = self._sending, self._first
        rank, shape = sending.team.rank, sending.shape
        early = min(shape.early, shape.chunks - sending.late)
        sums = [self._copies_on(rank) + row * self._pitch for row in first]
        rows = [result + row * pitch for row in first]
        ready = sending.bases[rank] + sending.places[rank].ready
        return (
            struct.pack("QQII", ready, self._table, shape.chunks, early)
            + struct.pack("QQ", self._pitch, pitch)
            + struct.pack(f"{2 * len(sums)}Q", *sums, *rows)
        )

    def _parts(self) -> npt.NDArray[np.uint32]:
        """`Part`s of gathering.cuh, by chunk: the next rank's first, and none of this one's."""
        walk, size = self._sending.walk, self._sending.team.size
        table = np.zeros((walk.chunks, size, 8), np.uint32)
        for step in range(size - 1):
            owner = (self._sending.team.rank + 1 + step) % size
            for number, part in enumerate(walk.parts(owner)):
                row, column = part.rows.start * TILE_ROWS, part.columns.start * TILE_COLUMNS
                rows = min(part.rows.stop * TILE_ROWS, walk.rows[owner]) - row
                columns = min(part.columns.stop * TILE_COLUMNS, walk.columns) - column
                if part.tiles:
                    table[number, step, :5] = owner, row, rows, 2 * column, 2 * columns
        return table


def _pitch(problem: ShardedProduct) -> int:
    """Bytes from one row of the sums to the next."""
    return -(-2 * problem.columns // 16) * 16


def _sums(problem: ShardedProduct, shape: Shape) -> int:
    """Where the sums lie in a rank's memory: behind the table of parts."""
    return -(-32 * len(problem.rows) * shape.chunks // 1024) * 1024


def even_rows(height: int, size: int) -> tuple[int, ...]:
    """Which rank sums how many of `height` rows: whole tiles, as evenly as they go."""
    tiles = -(-height // TILE_ROWS)
    cuts = [min(height, tiles * rank // size * TILE_ROWS) for rank in range(size + 1)]
    return tuple(high - low for low, high in pairwise(cuts))
