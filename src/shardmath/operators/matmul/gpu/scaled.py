"""Products of float8 operands with their scales: what comes is multiplied as it is.

cuBLASLt wants both operands along k, and all at multiples of 16 bytes. What lies so is used in
place; the rest comes, or is copied, into memory that is padded along k with zeros. A result that
does not suit is computed in padded memory too, whose last lines nobody reads. Scales travel as the
elements do, and are laid out for each interval of k as its product wants them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

from shardmath.arrays.dtypes import FLOAT8
from shardmath.geometry import Move
from shardmath.geometry.integers import up
from shardmath.local.epilog import MatmulEpilog
from shardmath.local.gpu import Matrix, scaled
from shardmath.local.gpu.blaslt import WORKSPACE
from shardmath.local.gpu.epilog import finish
from shardmath.local.gpu.scaled import GRAIN, Scale
from shardmath.operators.lanes import Lane
from shardmath.operators.matmul.gpu.finish import FinishPhase
from shardmath.operators.matmul.gpu.gather import Gather
from shardmath.operators.matmul.gpu.line_exchange import LineExchange, fill_behind
from shardmath.operators.matmul.gpu.panels import Interval
from shardmath.operators.matmul.gpu.rank_plan import Operands, RankPlan
from shardmath.operators.matmul.gpu.rounds import Stage
from shardmath.operators.matmul.gpu.scale_layouts import ScaleLayouts
from shardmath.operators.matmul.scaling import Scaling
from shardmath.operators.published import Places, PublishedMatrices, matrix_of

__all__ = ["ScaledProducts"]

# Where each rank's part of operand 0 or 1 lies, for moves by their name, put on a stream.
Source = Callable[[int, str, Sequence[Move], Any], Places]

_SPARE_PROCESSORS = 4  # multiprocessors, for what runs beside products: the barriers of the rounds


class ScaledProducts:
    """The products of one execution on one rank."""

    def __init__(
        self,
        rank_plan: RankPlan,
        operands: Operands,
        lane: Lane,
        published: PublishedMatrices,
        finish_phase: FinishPhase,
    ) -> None:
        self._rank_plan = rank_plan
        self._problem = rank_plan.strategy.problem
        self._operands = operands
        self._lane = lane
        self._device = lane.team.device
        self._stream = operands.stream
        self._published = published
        self._finish_phase = finish_phase
        self._out = matrix_of(operands.out)
        self._blocks = bool({"vectors", "squares"} & set(rank_plan.modes))
        self._gather = Gather(lane, self._stream, rank_plan.cache)
        self._scales = ScaleLayouts(rank_plan, operands, lane, published, self._gather)
        self._exchange: LineExchange | None = None
        if rank_plan.rounds is not None:
            gather = self._gather
            self._exchange = LineExchange(
                rank_plan, rank_plan.rounds, operands, lane, published, gather
            )

    # -- prepare -----------------------------------------------------------------------------------

    def prepare_published(self) -> None:
        """Memory for what peers read and write. Raises HeapExhausted."""
        self._scales.prepare_published()
        rounds = self._rank_plan.rounds
        if self._exchange is None or rounds is None:
            return
        multiplies = self._rank_plan.multiplies
        every = self._lines(rounds.index) if multiplies else rounds.starts[-1]
        self._exchange.prepare(every)

    def prepare(self) -> None:
        """Memory for operands, for scales as products want them, and for the product."""
        self._lane.private("blas", WORKSPACE)
        if not self._is_direct:
            self._lane.private("product", 4 * self._padded.size)
        for index, operand_plan in enumerate(self._rank_plan.operand_plans):
            name, lines = "ab"[index], self._lines(index)
            if self._comes_in_rounds(index):
                lines = self._rank_plan.own_lines
            elif operand_plan.gathers:
                room = up(self._rank_plan.schedule[1], GRAIN) + GRAIN
                self._lane.private(f"panel {name}", room * lines)
                self._published.make_room(name, partial(self._rank_plan.parts, index), 1)
            elif not self._in_place(index):
                self._lane.private(f"packed {name}", self._padded_k(index) * lines)
            self._scales.prepare(index, lines, self._intervals)

    # -- where things lie --------------------------------------------------------------------------

    @property
    def _intervals(self) -> list[Interval]:
        return self._rank_plan.schedule[0]

    @cached_property
    def _target(self) -> Matrix:
        """What the products are to give: sums for peers, D itself, or nothing yet."""
        return self._out if self._finish_phase.sums is None else self._finish_phase.sums

    @cached_property
    def _gives_result(self) -> bool:
        """Whether products give D itself: nothing follows that cuBLASLt could not do."""
        operands, problem, c = self._operands, self._problem, self._operands.c
        several = len(self._intervals) > 1
        dtype = self._out.dtype
        if self._target is not self._out or operands.alpha == 0 or problem.sums_c:
            return False
        if problem.epilog is not MatmulEpilog.DEFAULT or (several and dtype != "float32"):
            return False
        adds = c is not None and operands.beta != 0
        if dtype in FLOAT8:
            known = dtype == "float8_e4m3fn" or dtype in self._scaling.given
            return known and not adds and set(self._rank_plan.modes) == {"tensor"}
        if not adds or c is None:
            return True
        addend = matrix_of(c)
        addend = addend if self._out.leading is not None else addend.transposed()
        leading = addend.leading
        aligned = leading is not None and not (leading * addend.itemsize | addend.address) % GRAIN
        return aligned and addend.dtype == dtype

    @cached_property
    def _addend(self) -> Matrix | None:
        """C where products of D itself add it."""
        c = self._operands.c
        adds = self._gives_result and self._is_direct and self._operands.beta != 0
        return matrix_of(c) if adds and c is not None else None

    @property
    def _scaling(self) -> Scaling:
        assert self._problem.scaling is not None
        return self._problem.scaling

    @cached_property
    def _is_direct(self) -> bool:
        """Whether products are written to the target where it lies."""
        if self._target is self._out and not self._gives_result:
            return False
        return scaled.takes_result(self._target, blocks=self._blocks)

    @cached_property
    def _padded(self) -> Matrix:
        """Memory for a product that the target cannot take: float32, in the order of D."""
        rows, columns = up(self._target.rows, GRAIN), up(self._target.columns, GRAIN)
        order = "F" if self._out.by_columns else "C"
        return Matrix.packed(0, (rows, columns), "float32", order)

    def _lines(self, index: int) -> int:
        """Rows of op(A), columns of op(B), in the memory of an operand."""
        product = self._target if self._is_direct else self._padded
        return (product.rows, product.columns)[index]

    def _own(self, index: int) -> Matrix:
        """This rank's own part of an operand that needs no gathering; lines are its columns."""
        operand_plan, array = (
            self._rank_plan.operand_plans[index],
            matrix_of(self._operands.ab[index]),
        )
        assert operand_plan.place is not None, operand_plan
        (row, column), (rows, columns) = (
            operand_plan.place,
            operand_plan.shape(0, operand_plan.extent),
        )
        part = array.part((row, row + rows), (column, column + columns))
        return part.transposed() if index == 0 else part

    def _padded_k(self, index: int) -> int:
        """Elements of a line of an operand in memory that is padded along k."""
        return up(self._rank_plan.operand_plans[index].extent, GRAIN)

    def _comes_in_rounds(self, index: int) -> bool:
        return self._rank_plan.rounds is not None and self._rank_plan.rounds.index == index

    def _in_place(self, index: int) -> bool:
        """Whether an operand is multiplied in place."""
        operand_plan = self._rank_plan.operand_plans[index]
        return (
            not operand_plan.gathers
            and self._lines(index) == operand_plan.width
            and scaled.fits(self._own(index))
        )

    # -- run ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Put on the stream what comes before the barrier that lets peers read this rank's scales;
        or send lines to those who multiply them.
        """
        self._scales.show()
        if self._exchange is None:
            return
        self._exchange.send(self._scales)
        if not self._rank_plan.multiplies:
            self._exchange.end()

    def run(self, source: Source) -> list[Matrix] | None:
        """Put the products on the stream; what is to be finished, None if that is D."""
        target, quantized = self._target, None
        if not self._is_direct:
            target = self._padded._replace(address=self._lane.address("product"))
        elif self._gives_result and self._finish_phase.quantized_result is not None:
            quantized = self._finish_phase.quantized_result.as_part_of_product()
        if self._exchange is None:
            self._multiply_panels(source, target, quantized)
        else:
            self._multiply_lines(self._exchange, target, quantized)
        if self._gives_result and self._is_direct:
            return None
        wanted = target.part((0, self._target.rows), (0, self._target.columns))
        if self._target is self._out:
            return [wanted]
        if not self._is_direct:
            finish(self._device, self._stream, self._target, [wanted])
        return [self._target]

    def _multiply_panels(
        self, source: Source, target: Matrix, quantized: scaled.Quantized | None
    ) -> None:
        """A product of each interval of k, added to those before it."""
        scales = [self._lay_out(index) for index in (0, 1)]
        packed = [self._packed(index) for index in (0, 1)]
        with self._gather.prefetching(len(self._intervals) > 1):
            for number, interval in enumerate(self._intervals):
                a, b = (
                    self._factor(index, number, interval, packed[index], source) for index in (0, 1)
                )
                self._gather.await_panels(number)
                pair = scales[0][number], scales[1][number]
                c = None if number else self._addend
                self._product(a.transposed(), b, target, pair, c, quantized, adds=number > 0)
                self._gather.release(number)

    def _multiply_lines(
        self, exchange: LineExchange, target: Matrix, quantized: scaled.Quantized | None
    ) -> None:
        """Products of the lines that have come, beside the rounds that bring others."""
        rounds = self._rank_plan.rounds
        assert rounds is not None
        index = rounds.index
        other, scale = self._packed(1 - index), self._lay_out(1 - index)[0]
        assert other is not None, "one operand is exchanged, the other is here"
        stages = rounds.stages(self._rank_plan.rank)
        if not rounds.cuts:
            stages = [Stage(0, 0, self._lines(index))]  # with lines that pad it
        for number, stage in enumerate(stages):
            exchange.await_round(stage.round)
            is_own = bool(rounds.cuts) and not stage.round
            lines = exchange.own if is_own else exchange.lines(stage)
            is_known = is_own or self._rank_plan.modes[index] == "tensor"
            laid = self._lay_out(index)[0] if is_known else exchange.scale(stage)
            a, b = (lines, other) if index == 0 else (other, lines)
            c = self._addend
            self._product(
                a.transposed(),
                b,
                _of_lines(target, index, stage),
                (laid, scale) if index == 0 else (scale, laid),
                None if c is None else _of_lines(c, index, stage),
                None if quantized is None else quantized.part(number),
                processors=self._device.processors - _SPARE_PROCESSORS
                if stage.round < rounds.count
                else 0,
            )
        exchange.end()

    def _product(
        self,
        a: Matrix,
        b: Matrix,
        target: Matrix,
        scales: tuple[Scale, Scale],
        c: Matrix | None,
        quantized: scaled.Quantized | None,
        *,
        adds: bool = False,
        processors: int = 0,
    ) -> None:
        """One product, added to `target` or to beta c; c is what the product can add."""
        operands = self._operands
        assert operands.scales is not None
        alpha, beta = 1.0, float(adds)
        if self._gives_result and self._is_direct:
            alpha = operands.alpha.real
            beta = beta if c is None else operands.beta.real
        if set(self._rank_plan.modes) == {"tensor"}:
            alpha *= operands.scales.numbers[0] * operands.scales.numbers[1]
        scaled.multiply(
            self._device,
            a,
            b,
            target,
            scale_a=scales[0],
            scale_b=scales[1],
            stream=self._stream,
            workspace=self._lane.address("blas"),
            alpha=alpha,
            beta=beta,
            c=c,
            quantized=quantized,
            processors=processors,
            algorithms=operands.algorithms,
        )

    # -- operands
    # -----------------------------------------------------------------------------------

    def _factor(
        self, index: int, number: int, interval: Interval, packed: Matrix | None, source: Source
    ) -> Matrix:
        """An operand's indices of one interval, its lines as columns."""
        lo, hi = interval.lo, interval.hi
        if packed is not None:
            last = up(hi, GRAIN) if hi == self._rank_plan.operand_plans[index].extent else hi
            return packed.part((lo, min(last, packed.rows)), (0, packed.columns))
        operand_plan, name, lines = (
            self._rank_plan.operand_plans[index],
            "ab"[index],
            self._lines(index),
        )
        if interval.after is not None:
            self._gather.await_release(interval.after)
        address = self._lane.address(f"panel {name}") + up(interval.offset, GRAIN) * lines
        part, moves = f"{name} {number}", operand_plan.gather_moves(lo, hi)
        places = source(index, part, moves, self._gather.stream)
        return self._filled(part, moves, index, places, address, hi - lo)

    def _packed(self, index: int) -> Matrix | None:
        """An operand that needs no gathering, in place or copied; None for one that comes."""
        operand_plan, name = self._rank_plan.operand_plans[index], "ab"[index]
        if operand_plan.gathers:
            return None
        if self._in_place(index):
            return self._own(index)
        address, array = self._lane.address(f"packed {name}"), self._operands.ab[index]
        own = array.address, array.strides
        return self._filled(
            f"{name} own", operand_plan.moves, index, lambda _: own, address, operand_plan.extent
        )

    def _filled(
        self, name: str, moves: Sequence[Move], index: int, places: Places, address: int, k: int
    ) -> Matrix:
        """Memory that `moves` fill with `k` indices of an operand, and zeros behind them."""
        lines, width, padded_k = (
            self._lines(index),
            self._rank_plan.operand_plans[index].width,
            up(k, GRAIN),
        )
        made = Matrix(address, padded_k, lines, 1, padded_k, self._scaling.given[index])
        part = made.part((0, k), (0, width))
        fill_behind(made, part, self._stream)
        self._gather.copy(name, moves, places, part.transposed() if index == 0 else part)
        return made

    def _lay_out(self, index: int) -> list[Scale]:
        """The scales of each interval, where its product reads them; of lines that are exchanged,
        those of this rank's own.
        """
        lines, known = self._lines(index), self._rank_plan.operand_plans[index].width
        if self._comes_in_rounds(index):
            lines = known = self._rank_plan.own_lines
        return self._scales.lay_out(index, lines, known, self._intervals)


def _of_lines(x: Matrix, index: int, stage: Stage) -> Matrix:
    """What lines of an operand make of a product."""
    if index == 0:
        return x.part((stage.lo, stage.hi), (0, x.columns))
    return x.part((0, x.rows), (stage.lo, stage.hi))
