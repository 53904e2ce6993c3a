"""GEMM + ReduceScatter: tiles go to their owners while the product goes on.

The parts of a result are rounded to its type before they are added, in the order of the ranks and
as float32: the sum has the same bits every time.
"""

from __future__ import annotations

from shardmath.context.context import Context
from shardmath.operators.matmul.gpu.reduction_choice import choose_schedule
from shardmath.operators.matmul.gpu.split_k import SplitKProduct
from shardmath.operators.matmul.gpu.tile_sending import TileSchedule, TileSendingGemm

__all__ = ["GemmReduceScatter"]


class GemmReduceScatter:
    """`launch` leaves rank r's `rows[r]` rows of the product on rank r. Made by `create`."""

    def __init__(self, sending: TileSendingGemm) -> None:
        self._sending = sending

    @classmethod
    def create(
        cls, context: Context, problem: SplitKProduct, shape: TileSchedule | None = None
    ) -> GemmReduceScatter:
        """A plan. Collective.

        Raises ValueError on all ranks where they do not mean the same product, or where
        `problem.unsupported` speaks on one of them; HeapExhausted.
        """
        return cls(TileSendingGemm.create(context, problem, shape or choose_schedule(problem)))

    def launch(self, a: int, b: int, result: int, stream: int, *, pitch: int | None = None) -> None:
        """Put the product of A and B on `stream`; A, B and this rank's rows lie at these addresses.

        `pitch` is how many elements the rows of the result are apart; None is `columns`. Never
        waits on the host, and can be captured in a CUDA graph. Collective, in stream order.
        """
        sending = self._sending
        sending.require_usable()
        nbytes = 2 * (sending.problem.columns if pitch is None else pitch)
        sending.multiply("gemm_reduce_scatter", a, b, result, nbytes, stream)

    def free(self) -> None:
        """See TileSendingGemm.free."""
        self._sending.free()
