"""The ranks' products added up by one collective, where each rank wants whole lines of the result.

    k of rank 0   1       products                    all-reduce        reduce-scatter
    A [    |    ]         [ of 0 ]  +  [ of 1 ]       [ sum ] on all    [ rows of rank 0 ]
    B [ 0 ][ 1 ]                                                        [ rows of rank 1 ]

The products are added in the order of the ranks, so the bits are the same every time. Each lane has
a collective of its own, as it has barriers: operations in other lanes never wait for it. Large ones
take up to half of each multiprocessor, so those of two lanes find room at once; of three lanes and
more they are to begin in the same order on all ranks (see `DeviceCollectives`).
"""

from __future__ import annotations

from shardmath.arrays import dtypes
from shardmath.collectives.device import DeviceCollectives
from shardmath.context.context import Context
from shardmath.local.epilog import MatmulEpilog
from shardmath.local.gpu import Matrix
from shardmath.operators.lanes import Lane
from shardmath.operators.matmul.gpu.rank_plan import AFTERWARDS, Operands, RankPlan
from shardmath.operators.published import matrix_of

__all__ = ["SeparateReduction"]


class SeparateReduction:
    """One execution's on one rank. `order`, that of the products, is the same on all ranks."""

    def __init__(self, rank_plan: RankPlan, operands: Operands, lane: Lane, order: str) -> None:
        assert rank_plan.pattern is not None
        self._pattern = rank_plan.pattern
        self._problem = rank_plan.strategy.problem
        self._operands = operands
        self._lane = lane
        self._order = order
        self._out = matrix_of(operands.out)
        self._dtype = rank_plan.parts_dtype
        self._shape = rank_plan.strategy.sums.local_shape(rank_plan.rank)
        self._collectives: DeviceCollectives | None = None

    def prepare(self) -> Matrix:
        """Take memory: that of this rank's product. Raises HeapExhausted."""
        if not self._is_last and self._pattern.kind != "all-reduce":
            self._held("total", (self._out.rows, self._out.columns))
        return self._sums()

    def meet(self, context: Context) -> None:
        """Find the lane's collective. Collective itself; raises HeapExhausted on all ranks."""
        name = f"sums of lane {self._lane.number}"
        self._collectives = context.cache(name, lambda: DeviceCollectives.separate(context))

    def run(self) -> list[Matrix] | None:
        """Put it on the stream: the sum, for what follows; None where it is D."""
        assert self._collectives is not None, "all have met"
        stream, dtype, sums = self._operands.stream, dtypes.of(self._dtype), self._sums()
        if self._pattern.kind == "all-reduce":
            total = self._out if self._is_last else sums
            self._collectives.all_reduce(
                sums.address, total.address, sums.size, dtype, "sum", stream
            )
        else:
            shape = self._out.rows, self._out.columns
            total = self._out if self._is_last else self._held("total", shape)
            width = self._shape[0] if self._pattern.transposed else self._shape[1]
            counts = [width * lines for lines in self._pattern.rows]
            self._collectives.reduce_scatter(
                sums.address, total.address, counts, dtype, "sum", stream
            )
        return None if self._is_last else [total]

    def _sums(self) -> Matrix:
        return self._held("sums", self._shape)

    def _held(self, name: str, shape: tuple[int, ...]) -> Matrix:
        """A matrix in memory of the lane."""
        rows, columns = shape
        nbytes = rows * columns * dtypes.of(self._dtype).itemsize
        address = self._lane.buffer(name, nbytes).block.address
        return Matrix.packed(address, (rows, columns), self._dtype, self._order)

    @property
    def _is_last(self) -> bool:
        """Whether the sum is D: nothing follows, and D lies as the collective writes."""
        operands, out = self._operands, self._out
        plain = operands.alpha == 1 and (operands.c is None or operands.beta == 0)
        packed = Matrix.packed(out.address, (out.rows, out.columns), self._dtype, self._order)
        kept = self._problem.epilog in (MatmulEpilog.DEFAULT, *AFTERWARDS)
        return plain and kept and (packed == out or (not out.size and out.dtype == self._dtype))
