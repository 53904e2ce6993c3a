"""Executing a matrix product on GPUs: gather from peers, multiply, add, move, finish.

The phases are those of the host, on the user's stream: this process waits for nobody after
`prepare` has been agreed on. Each barrier on the stream is one of three patterns: before reading
what a peer wrote, after writing what a peer will read, before reusing what a peer may still read.
Products never read a peer's memory themselves: what lies there is gathered first, on a second
stream while the last panel is multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any

from shardmath.arrays import dtypes
from shardmath.context.context import Context
from shardmath.geometry import Move
from shardmath.local.epilog import MatmulEpilog
from shardmath.local.gpu import Matrix
from shardmath.local.gpu.blaslt import WORKSPACE, EpilogAttributes
from shardmath.local.gpu.epilog import copy, finish
from shardmath.local.gpu.fused_epilog import FusedEpilog, fused_epilog, split
from shardmath.local.gpu.gemm import fits, has_algorithm, multiply, takes_result
from shardmath.operators.lanes import Lane
from shardmath.operators.matmul.gpu.far_published import FarPublishedMatrices
from shardmath.operators.matmul.gpu.finish import PUBLISHED, FinishPhase
from shardmath.operators.matmul.gpu.float8_conversion import DequantizedOperands
from shardmath.operators.matmul.gpu.gather import Gather
from shardmath.operators.matmul.gpu.panel_gemm import PanelGemm
from shardmath.operators.matmul.gpu.panels import Interval, OperandPlan
from shardmath.operators.matmul.gpu.rank_plan import AFTERWARDS, Operands, RankPlan
from shardmath.operators.matmul.gpu.scaled import ScaledProducts
from shardmath.operators.matmul.gpu.separate_reduction import SeparateReduction
from shardmath.operators.published import Places, PublishedMatrices, matrix_of

__all__ = ["Execution"]

_NOTHING = FusedEpilog(EpilogAttributes())

_PLAIN = (MatmulEpilog.DEFAULT, *AFTERWARDS)


class Execution:
    """One execution on one rank: `prepare`, tell the peers, `run`.

    `addition_order` is the order of products that one collective adds up, "" where peers read them.
    """

    def __init__(
        self,
        context: Context,
        rank_plan: RankPlan,
        operands: Operands,
        lane: Lane,
        *,
        addition_order: str = "",
    ) -> None:
        self.context = context
        self.rank_plan = rank_plan
        self.strategy = rank_plan.strategy
        self.problem = rank_plan.strategy.problem
        self._dequantized = DequantizedOperands(rank_plan, operands, lane)
        self.operands = operands = self._dequantized.operands
        self.rank = context.rank
        self.lane = lane
        self.device = lane.team.device
        self.stream = operands.stream
        self.wide = dtypes.accumulator(self.problem.dtype).name
        self.out = matrix_of(operands.out)
        self.order = "F" if self.out.by_columns else "C"
        self.published = PublishedMatrices(context, lane, PUBLISHED)
        if rank_plan.multi_host:
            self.published = FarPublishedMatrices(
                context, lane, PUBLISHED, rank_plan.routes, rank_plan.cache
            )
        self.reduction: SeparateReduction | None = None
        if addition_order:
            self.reduction = SeparateReduction(rank_plan, operands, lane, addition_order)
        self.finish_phase = FinishPhase(
            context, rank_plan, operands, lane, self.published, self.reduction
        )
        self._panel_gemm = self._find_panel_gemm()
        self._fused_epilog: FusedEpilog | None = None
        self._first, self._rest = split(self.problem.epilog, self.out.dtype)
        self._scaled: ScaledProducts | None = None
        if rank_plan.multiplies_elements:
            self._scaled = ScaledProducts(
                rank_plan, operands, lane, self.published, self.finish_phase
            )
        self._copies: list[tuple[Matrix, Matrix]] = []  # (to, from): operands that peers read

    def _find_panel_gemm(self) -> PanelGemm | None:
        """How to multiply while operands come, None where the kernel for that does not suit."""
        if not self.rank_plan.multiplies or self.rank_plan.multi_host:
            return None
        made = PanelGemm(self.rank_plan, self.operands, self.lane, self.out)
        return None if made.unsupported else made

    # -- prepare -----------------------------------------------------------------------------------

    def prepare(self) -> bytes:
        """Take all heap memory. Local.

        Returns what to tell the peers. Raises HeapExhausted; nothing has been written then.
        """
        strategy, rank = self.strategy, self.rank
        for name, array, transfer in zip("ab", self.operands.ab, strategy.transfers, strict=True):
            ranges = transfer.read_by_peers(rank)
            if ranges is not None and self.rank_plan.rounds is None:
                room = self.published.operand(name, array, (ranges[0], ranges[1]))
                if room is not None:
                    self._copies.append((room, matrix_of(array).part(ranges[0], ranges[1])))
        self.finish_phase.prepare()
        if self._scaled is not None:
            self._scaled.prepare_published()
        if self.rank_plan.multiplies:
            self._prepare_product()
        return self.published.pack()

    def _prepare_product(self) -> None:
        """Memory for panels, for packed copies of operands, and for the product."""
        if self._scaled is not None:
            self._scaled.prepare()
            return
        if self._panel_gemm is not None:
            self._panel_gemm.prepare()
        self.lane.private("blas", WORKSPACE)
        if self._can_write_d and self.problem.epilog not in _PLAIN:
            self._fused_epilog = self._find_fused_epilog()
        self._prepare_factors(self._target())

    def _prepare_factors(self, target: Matrix) -> None:
        """Memory for what is gathered, and for what does not fit a product into `target`."""
        _, room = self.rank_plan.schedule
        itemsize = dtypes.of(self.problem.dtype).itemsize
        for index, operand_plan in enumerate(self.rank_plan.operand_plans):
            if operand_plan.gathers:
                whole = 0 if self._panel_gemm is None else self._panel_gemm.panel_bytes(index)
                nbytes = max(whole, room * operand_plan.width * itemsize)
                self.lane.private(f"panel {'ab'[index]}", nbytes)
                parts = partial(self.rank_plan.parts, index)
                self.published.make_room("ab"[index], parts, itemsize)
            elif not self._fits(index, self._own(index), target):
                self.lane.private(
                    f"packed {'ab'[index]}", operand_plan.extent * operand_plan.width * itemsize
                )

    # -- run ---------------------------------------------------------------------------------------

    def meet(self) -> None:
        """What all ranks do together before. Collective; raises HeapExhausted on all ranks."""
        if self.reduction is not None:
            self.reduction.meet(self.context)

    def run(self, messages: Sequence[bytes]) -> None:
        """Put everything on the stream: D and the epilog's outputs are there after it. Collective.

        `messages` is what all ranks have told.
        """
        self.published.learn(messages)
        with self.lane.section(self.stream):
            self._dequantized.launch(self.device, self.stream)
            for published, original in self._copies:
                copy(self.device, self.stream, published, original)
            for name in "ab":
                self.published.publish(name, self.stream)
            if self._scaled is not None:
                self._scaled.begin()
            if self.finish_phase.quantized_result is not None:
                self.finish_phase.quantized_result.begin()
            together = self.finish_phase.show_c() or self.rank_plan.reads_peers
            if together:
                self._barrier()  # after writing what a peer will read, before reading what it wrote
            if self.finish_phase.run(self._multiply()) or together:
                self._barrier()  # before reusing what a peer may still read

    def _barrier(self) -> None:
        self.lane.barrier(self.stream)

    # -- the product -------------------------------------------------------------------------------

    @property
    def _writes_d(self) -> bool:
        """Whether products give D itself: nothing follows that is not done in place."""
        plain = self.problem.epilog in _PLAIN
        return self._can_write_d and (plain or self._fused_epilog is not None)

    def _find_fused_epilog(self) -> FusedEpilog | None:
        """How the product does the epilog's first part too; None where it cannot. Takes memory for
        operands.
        """
        operands, epilog, out = self.operands, self._first, self.out
        aux = operands.aux(epilog)
        found = fused_epilog(
            epilog, out, bias=operands.bias, aux=None if aux is None else matrix_of(aux)
        )
        wider = self.problem.result != self.problem.dtype  # not seen with a bias
        if found is None or wider or len(self.rank_plan.schedule[0]) > 1:
            return None
        self._prepare_factors(out)
        conj_a, conj_b = self.problem.conjugate
        there = has_algorithm(
            self.device,
            self._placed(0, out),
            self._placed(1, out),
            out,
            c=matrix_of(operands.c) if operands.c is not None and operands.beta != 0 else None,
            conj_a=conj_a,
            conj_b=conj_b,
            compute=operands.compute,
            extras=found.extras,
        )
        return found if there else None

    @cached_property
    def _can_write_d(self) -> bool:
        """Whether a product can be written to D, if the epilog can be done within it."""
        operands, c = self.operands, self.operands.c
        several = len(self.rank_plan.schedule[0]) > 1
        return not (
            self.finish_phase.sums is not None
            or self.problem.sums_c
            or operands.alpha == 0  # NaN times 0 is NaN, which BLAS does not look for
            or not takes_result(self.out)
            or (several and self.out.dtype != self.wide)
            or (self.problem.scaling is not None and self.out.dtype != self.wide)
            or (c is not None and operands.beta != 0 and not self._takes_c(matrix_of(c)))
        )

    def _takes_c(self, c: Matrix) -> bool:
        if c.dtype != self.out.dtype:
            return False
        if self.out.leading is None:
            c = c.transposed()
        return c.leading is not None

    def _target(self) -> Matrix:
        """Where the product goes."""
        if self.finish_phase.sums is not None:
            return self.finish_phase.sums
        if self._writes_d:
            return self.out
        shape = self.out.rows, self.out.columns
        address = self.lane.private("product", self.out.size * dtypes.of(self.wide).itemsize)
        return Matrix.packed(address, shape, self.wide, self.order)

    def _multiply(self) -> list[Matrix] | None:
        """The product of the work's rows and columns as what is to be finished; None if it is."""
        if not self.rank_plan.multiplies:
            if self.finish_phase.sums is not None:
                finish(self.device, self.stream, self.finish_phase.sums, [])  # zeros
            return []
        if self._scaled is not None:
            return self._scaled.run(self._source)
        if self._panel_gemm is not None and self._panel_gemm.run(self._source):
            return None
        target = self._target()
        for number, (a, b) in enumerate(self._factors(target)):
            self._product(a, b, target, number)
        if not self._writes_d:
            return [target]
        self._finish_in_place()
        return None

    def _finish_in_place(self) -> None:
        """What the product has left of the epilog."""
        if self._fused_epilog is not None and self._rest is not MatmulEpilog.DEFAULT:
            aux = self.operands.aux(self._rest)
            given = None if aux is None else matrix_of(aux)
            finish(self.device, self.stream, self.out, [self.out], epilog=self._rest, aux=given)

    def _product(self, a: Matrix, b: Matrix, target: Matrix, number: int) -> None:
        """One interval's product, added to those before it."""
        operands = self.operands
        alpha, beta, c = 1.0 + 0.0j, float(number > 0) + 0.0j, None
        if self._writes_d:
            alpha = complex(operands.alpha)
            if number == 0 and operands.c is not None and operands.beta != 0:
                beta, c = complex(operands.beta), matrix_of(operands.c)
        conj_a, conj_b = self.problem.conjugate
        inside = self._fused_epilog or _NOTHING
        multiply(
            self.device,
            a,
            b,
            target,
            stream=self.stream,
            workspace=self.lane.address("blas"),
            c=c,
            alpha=alpha,
            beta=beta,
            conj_a=conj_a,
            conj_b=conj_b,
            compute=operands.compute,
            extras=inside.extras,
            bias=inside.bias,
            aux=inside.aux,
            algorithms=operands.algorithms,
        )

    def _factors(self, target: Matrix) -> Iterator[tuple[Matrix, Matrix]]:
        """The dense operands of each interval, in order; those that are gathered will have come."""
        plan, _ = self.rank_plan.schedule
        own = [
            None if operand_plan.gathers else self._dense(index, target)
            for index, operand_plan in enumerate(self.rank_plan.operand_plans)
        ]
        gather = Gather(self.lane, self.stream, self.rank_plan.cache)
        with gather.prefetching(len(plan) > 1):
            for number, interval in enumerate(plan):
                pair = []
                for index, operand_plan in enumerate(self.rank_plan.operand_plans):
                    dense = own[index]
                    if dense is not None:
                        pair.append(_along(dense, operand_plan.axis, interval.lo, interval.hi))
                    else:
                        panel = self._panel(index, operand_plan, interval, target)
                        moves = operand_plan.gather_moves(interval.lo, interval.hi)
                        if interval.after is not None:
                            gather.await_release(interval.after)
                        name = f"{'ab'[index]} {number}"
                        places = self._source(index, name, moves, gather.stream)
                        gather.copy(name, moves, places, panel)
                        pair.append(panel)
                gather.await_panels(number)
                yield pair[0], pair[1]
                gather.release(number)

    def _own(self, index: int) -> Matrix:
        """This rank's own part of an operand that needs no gathering."""
        operand_plan, array = (
            self.rank_plan.operand_plans[index],
            matrix_of(self.operands.ab[index]),
        )
        assert operand_plan.place is not None, operand_plan
        (row, column), (rows, columns) = (
            operand_plan.place,
            operand_plan.shape(0, operand_plan.extent),
        )
        return array.part((row, row + rows), (column, column + columns))

    def _fits(self, index: int, x: Matrix, target: Matrix) -> bool:
        return fits(x, target, conjugate=self.problem.conjugate[index])

    def _dense(self, index: int, target: Matrix) -> Matrix:
        """The same in a form that BLAS takes."""
        own, placed = self._own(index), self._placed(index, target)
        if placed != own:
            finish(self.device, self.stream, placed, [own])
        return placed

    def _placed(self, index: int, target: Matrix) -> Matrix:
        """An operand of a product in one interval: where it lies, or the memory it will be in."""
        operand_plan = self.rank_plan.operand_plans[index]
        if operand_plan.gathers:
            return self._panel(index, operand_plan, self.rank_plan.schedule[0][0], target)
        own = self._own(index)
        if self._fits(index, own, target):
            return own
        return self._oriented(index, f"packed {'ab'[index]}", own, target)

    def _panel(
        self, index: int, operand_plan: OperandPlan, interval: Interval, target: Matrix
    ) -> Matrix:
        """Memory for an interval of an operand, in its order where BLAS takes that."""
        like = matrix_of(self.operands.ab[index])
        rows, columns = operand_plan.shape(interval.lo, interval.hi)
        like = like._replace(rows=rows, columns=columns)
        panel = self._oriented(index, f"panel {'ab'[index]}", like, target)
        return panel._replace(
            address=panel.address + interval.offset * operand_plan.width * panel.itemsize
        )

    def _oriented(self, index: int, name: str, like: Matrix, target: Matrix) -> Matrix:
        orders = ("F", "C") if like.by_columns else ("C", "F")
        address, shape = self.lane.address(name), (like.rows, like.columns)
        packed = [Matrix.packed(address, shape, like.dtype, order) for order in orders]
        return next(x for x in packed if self._fits(index, x, target))

    def _source(
        self, index: int, part: str = "", moves: Sequence[Move] = (), stream: Any = None
    ) -> Places:
        """Where each rank's local part of an operand lies, for moves that are put on `stream`."""
        array = self.operands.ab[index]
        published = self.published.reach("ab"[index], part, moves, stream)

        def place(rank: int) -> tuple[int, tuple[int, ...]]:
            if rank == self.rank:
                return array.address, array.strides
            return published(rank)

        return place


def _along(x: Matrix, axis: int, lo: int, hi: int) -> Matrix:
    """Indices lo to hi of an axis."""
    if axis == 0:
        return x.part((lo, hi), (0, x.columns))
    return x.part((0, x.rows), (lo, hi))
