"""GEMM + AllReduce: owners add up what they are sent, and all read the sums from them.

The result may lie in any memory, and has the same bits on all ranks.
"""

from __future__ import annotations

import struct
from itertools import accumulate, pairwise

from shardmath.context import DistributedContext
from shardmath.operators.matmul.gpu.sending import SendingProduct, Shape
from shardmath.operators.matmul.gpu.sharded import ShardedProduct
from shardmath.operators.matmul.gpu.walk import TILE_ROWS

__all__ = ["GemmAllReduce", "choose_shape", "even_rows"]

_THREADS = 512


class GemmAllReduce:
    """`launch` leaves all rows of the product on every rank. Made by `together`.

    `problem.rows` says which rank sums which rows: see `even_rows`.
    """

    def __init__(self, sending: SendingProduct) -> None:
        self._sending = sending

    @classmethod
    def together(
        cls, context: DistributedContext, problem: ShardedProduct, shape: Shape | None = None
    ) -> GemmAllReduce:
        """A plan. Collective.

        Raises ValueError on all ranks where they do not mean the same product, or where
        `problem.misfit` speaks on one of them; HeapExhausted.
        """
        most = max(problem.rows)
        sending = SendingProduct.together(
            context, problem, shape or choose_shape(problem), extra=most * _pitch(problem)
        )
        return cls(sending)

    def launch(self, a: int, b: int, result: int, stream: int, *, pitch: int | None = None) -> None:
        """Put the product of A and B on `stream`; A, B and all rows of the result lie there.

        `pitch` is how many elements the rows of the result are apart; None is `columns`. Never
        waits on the host, and can be captured in a CUDA graph. Collective, in stream order.
        """
        sending = self._sending
        sending.require_usable()
        to_pitch = 2 * (sending.problem.columns if pitch is None else pitch)
        sums, from_pitch = sending.extra(sending.team.rank), _pitch(sending.problem)
        sending.multiply(a, b, sums, from_pitch, stream, shared=True)
        sending.take_last(sums, from_pitch, stream, shared=True)
        argument = sending.argument(self._of_gather, result, to_pitch)
        sending.team.kernel("gather", "await_sums").launch(stream, 1, _THREADS, argument)
        blocks = 2 * sending.team.device.processors
        sending.team.kernel("gather", "gather").launch(stream, blocks, _THREADS, argument)

    def free(self) -> None:
        """See SendingProduct.free."""
        self._sending.free()

    def _of_gather(self, result: int, pitch: int) -> bytes:
        """The struct `GatherArgument`."""
        sending, problem = self._sending, self._sending.problem
        rank, size = sending.team.rank, sending.team.size
        first = [0, *accumulate(problem.rows)]
        base = sending.bases[rank]
        boxes = b"".join(
            struct.pack(
                "QQII",
                sending.extra(owner),
                result + first[owner] * pitch,
                2 * problem.columns,
                problem.rows[owner],
            )
            for owner in ((rank + step) % size for step in range(1, size + 1))
        )
        return (
            sending.team.packed()
            + struct.pack("QQQ", base, base + sending.places[rank].ready, sending.shape.chunks)
            + struct.pack("QQ", _pitch(problem), pitch)
            + boxes
            + struct.pack(f"{size}Q", *sending.bases)
        )


def _pitch(problem: ShardedProduct) -> int:
    """Bytes from one row of the sums to the next."""
    return -(-2 * problem.columns // 16) * 16


def even_rows(height: int, size: int) -> tuple[int, ...]:
    """Which rank sums how many of `height` rows: whole tiles, as evenly as they go."""
    tiles = -(-height // TILE_ROWS)
    cuts = [min(height, tiles * rank // size * TILE_ROWS) for rank in range(size + 1)]
    return tuple(high - low for low, high in pairwise(cuts))


def choose_shape(problem: ShardedProduct) -> Shape:
    """How to cut the work: what is read after the product is one chunk."""
    most = max(-(-rows // TILE_ROWS) for rows in problem.rows)
    return Shape(chunks=max(1, min(8, most)))
