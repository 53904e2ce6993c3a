"""GEMM + AllReduce: owners add up what they are sent, and all read the sums from them.

Tiles travel while the product goes on. Sums are made and read after it, unless a Shape says that
blocks beside the product do so chunk after chunk.
The result may lie in any memory, and has the same bits on all ranks.
"""

from __future__ import annotations

import struct
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from shardmath.context import DistributedContext
from shardmath.operators.matmul.gpu.sending import SendingProduct, Shape, write
from shardmath.operators.matmul.gpu.sharded import ShardedProduct
from shardmath.operators.matmul.gpu.walk import TILE_COLUMNS, TILE_ROWS

__all__ = ["GemmAllReduce", "even_rows"]

_THREADS = 512


class GemmAllReduce:
    """`launch` leaves all rows of the product on every rank. Made by `together`.

    `problem.rows` says which rank sums which rows: see `even_rows`.
    """

    def __init__(self, sending: SendingProduct) -> None:
        self._sending = sending
        self._pitch = _pitch(sending.problem)
        self._table = sending.extra(sending.team.rank)
        write(self._table, self._parts())

    @classmethod
    def together(
        cls, context: DistributedContext, problem: ShardedProduct, shape: Shape | None = None
    ) -> GemmAllReduce:
        """A plan. Collective.

        Raises ValueError on all ranks where they do not mean the same product, or where
        `problem.misfit` speaks on one of them; HeapExhausted.
        """
        shape = shape or Shape(chunks=1, takers=2)  # more hid less than they cost
        extra = _sums(problem, shape) + max(problem.rows) * _pitch(problem)
        return cls(SendingProduct.together(context, problem, shape, extra=extra))

    def launch(self, a: int, b: int, result: int, stream: int, *, pitch: int | None = None) -> None:
        """Put the product of A and B on `stream`; A, B and all rows of the result lie there.

        `pitch` is how many elements the rows of the result are apart; None is `columns`. Never
        waits on the host, and can be captured in a CUDA graph. Collective, in stream order.
        """
        sending = self._sending
        sending.require_usable()
        sums = self._sums_of(sending.team.rank)
        gather = self._of_gather(result, 2 * (sending.problem.columns if pitch is None else pitch))
        sending.multiply(a, b, sums, self._pitch, stream, gather=gather)
        sending.take_last(sums, self._pitch, stream, shared=True)
        rest = sending.argument(self._of_rest, gather)
        sending.team.kernel("gather", "await_sums").launch(stream, 1, _THREADS, rest)
        blocks = 2 * sending.team.device.processors
        sending.team.kernel("gather", "gather").launch(stream, blocks, _THREADS, rest)

    def free(self) -> None:
        """See SendingProduct.free."""
        self._sending.free()

    def _sums_of(self, owner: int) -> int:
        return self._sending.extra(owner) + _sums(self._sending.problem, self._sending.shape)

    def _of_gather(self, result: int, pitch: int) -> bytes:
        """The struct `GatherArgument`. Bulk copies read early what is aligned for them."""
        sending = self._sending
        rank, shape = sending.team.rank, sending.shape
        whole = result % 16 == 0 and pitch % 16 == 0 and sending.problem.columns % 8 == 0
        early = min(shape.early, shape.chunks - sending.late) if whole else 0
        first = [0, *accumulate(sending.problem.rows[:-1])]
        sums = [self._sums_of(owner) for owner in range(sending.team.size)]
        rows = [result + row * pitch for row in first]
        ready = sending.bases[rank] + sending.places[rank].ready
        return (
            struct.pack("QQII", ready, self._table, shape.chunks, early)
            + struct.pack("QQ", self._pitch, pitch)
            + struct.pack(f"{2 * len(sums)}Q", *sums, *rows)
        )

    def _of_rest(self, gather: bytes) -> bytes:
        """The struct `RestArgument`."""
        bases = self._sending.bases
        return self._sending.team.packed() + gather + struct.pack(f"{len(bases)}Q", *bases)

    def _parts(self) -> npt.NDArray[np.uint32]:
        """`Part`s of gathering.cuh, by chunk: the next rank's first, and this one's last."""
        walk, size = self._sending.walk, self._sending.team.size
        table = np.zeros((walk.chunks, size, 8), np.uint32)
        for step in range(size):
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
