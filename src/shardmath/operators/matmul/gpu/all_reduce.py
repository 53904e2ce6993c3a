"""GEMM + AllReduce: owners add up what they are sent, and write the sums to all ranks.

Tiles and sums travel while the product goes on, chunk after chunk; what is left when it ends is the
last chunk. Sums are written straight into the results of all ranks where all know where they lie.
Else they arrive in symmetric memory, and are copied from there at last: a result may lie anywhere.
It has the same bits on all ranks.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate

from shardmath.context.context import Context
from shardmath.local.gpu import Matrix
from shardmath.local.gpu.epilog import combine, copy
from shardmath.operators.matmul.gpu.reduction_choice import choose_shared_schedule
from shardmath.operators.matmul.gpu.split_k import SplitKProduct
from shardmath.operators.matmul.gpu.tile_sending import TileSchedule, TileSendingGemm

__all__ = ["GemmAllReduce"]


class GemmAllReduce:
    """`launch` leaves all rows of the product on every rank. Made by `create`.

    `problem.rows` says which rank sums which rows: see `even_rows`.
    """

    def __init__(self, sending: TileSendingGemm) -> None:
        self._sending = sending
        self._first = [0, *accumulate(sending.problem.rows)]

    @classmethod
    def create(
        cls,
        context: Context,
        problem: SplitKProduct,
        shape: TileSchedule | None = None,
        *,
        result_addresses: bool = False,
    ) -> GemmAllReduce:
        """A plan. Collective.

        With `result_addresses`, launches will say where all ranks' results lie, and the plan has no
        memory for sums. Raises ValueError on all ranks where they do not mean the same product, or
        where `problem.unsupported` speaks on one of them; HeapExhausted.
        """
        shape = shape or choose_shared_schedule(problem)
        extra = 0 if result_addresses else problem.height * _pitch(problem)
        return cls(TileSendingGemm.create(context, problem, shape, extra=extra))

    def launch(
        self,
        a: int,
        b: int,
        result: int,
        stream: int,
        *,
        pitch: int | None = None,
        result_addresses: Sequence[int] = (),
    ) -> None:
        """Put the product of A and B on `stream`; A, B and all rows of the result lie there.

        `pitch` is how many elements the rows of the result are apart; None is `columns`.
        `result_addresses` is where each rank's result lies for this rank: all at multiples of 16
        bytes, with rows of multiples of 8 elements, as far apart on each rank. Never waits on the
        host, and can be captured in a CUDA graph. Collective, in stream order.
        """
        sending, first = self._sending, self._first
        sending.require_usable()
        rank, columns = sending.team.rank, sending.problem.columns
        nbytes = 2 * (columns if pitch is None else pitch)
        own = result + first[rank] * nbytes
        if result_addresses:
            sending.multiply(
                "gemm_all_reduce", a, b, own, nbytes, stream, self._copies(result_addresses, nbytes)
            )
            return
        between = _pitch(sending.problem)
        addresses = [sending.extra(each) for each in range(sending.team.size)]
        sending.multiply(
            "gemm_all_reduce", a, b, own, nbytes, stream, self._copies(addresses, between)
        )
        for low, high in ((0, first[rank]), (first[rank + 1], first[-1])):
            shape = high - low, columns
            here = Matrix(result + low * nbytes, *shape, nbytes // 2, 1, sending.problem.dtype)
            come = here._replace(address=addresses[rank] + low * between, row_stride=between // 2)
            if nbytes > 2 * columns:  # what lies between rows of the result stays
                combine(sending.team.device, stream, here, [come])
            else:
                copy(sending.team.device, stream, here, come)

    def free(self) -> None:
        """See TileSendingGemm.free."""
        self._sending.free()

    def _copies(self, addresses: Sequence[int], pitch: int) -> bytes:
        """Where this rank's sums go: their pitch, and where they begin on the next rank, ..."""
        team = self._sending.team
        skipped = self._first[team.rank] * pitch
        begin = [addresses[other] + skipped for other in team.ring_order]
        return struct.pack(f"{1 + team.size}Q", pitch, *begin)


def _pitch(problem: SplitKProduct) -> int:
    """Bytes from one row of the sums to the next."""
    return -(-2 * problem.columns // 16) * 16
