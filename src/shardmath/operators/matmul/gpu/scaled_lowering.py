"""Products of float8 operands with their scales, as steps: what comes is multiplied as it is.

cuBLASLt wants both operands along k, and all at multiples of 16 bytes. What lies so is used in
place; the rest comes, or is copied, into memory that is padded along k with zeros. A result that
does not suit is computed in padded memory too, whose last lines nobody reads. Scales travel as the
elements do, and are laid out for each interval of k as its product wants them.

Lines of an operand that all ranks need are sent to all, beside the products of those that are here:
see `rounds`. Every rank has room for them and their scales, where peers write. A barrier before
says that nobody reads what was there, one behind a round that its lines have come. Copies are one
behind the other on a stream of their own, and the barriers on yet another: neither waits for a
product, nor a copy for a barrier. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from shardmath.arrays.dtypes import FLOAT8
from shardmath.geometry import Move, shared_part
from shardmath.geometry.integers import up
from shardmath.local.epilog import MatmulEpilog
from shardmath.local.float8 import BLOCK, Blocks
from shardmath.local.gpu import Matrix
from shardmath.local.gpu.scaled import GRAIN, fits, takes_result
from shardmath.operators.matmul.gpu.panels import Interval
from shardmath.operators.matmul.gpu.program_builder import READ, REUSE, ProgramBuilder
from shardmath.operators.matmul.gpu.rounds import Rounds, Stage
from shardmath.operators.matmul.gpu.scale_moves import ScaleMoves
from shardmath.operators.matmul.gpu.steps import (
    AddUp,
    Clear,
    Gather,
    Gemm,
    LayOut,
    Name,
    Peer,
    Push,
    ScaleOf,
    View,
)
from shardmath.operators.matmul.program import SCALES
from shardmath.operators.matmul.scaling import Scaling
from shardmath.program.steps import (
    Await,
    Convert,
    Record,
)

__all__ = ["ScaledProducts"]

_SPARE_PROCESSORS = 4  # multiprocessors, for what runs beside products: the barriers of the rounds
_LINES, _LINE_SCALES = "lines", "line scales"  # what peers write, by name


class _Source(NamedTuple):
    """What an operand's scales are made from: a matrix, lines first, of which `blocks` is what one
    number is for, and the name of what they are multiplied by.
    """

    view: View | None
    blocks: Blocks
    number: str


class ScaledProducts:
    """Adds the products of one rank to its steps."""

    def __init__(self, steps: ProgramBuilder) -> None:
        self._steps = steps
        self._plan = steps.rank_plan
        self._problem = steps.problem
        self._rank = steps.rank
        self._rounds = steps.rank_plan.rounds
        self._blocks = bool({"vectors", "squares"} & set(self._plan.modes))
        self._target = steps.sums or "d"

    # -- where things lie --------------------------------------------------------------------------

    @property
    def _scaling(self) -> Scaling:
        assert self._problem.scaling is not None
        return self._problem.scaling

    @property
    def _intervals(self) -> list[Interval]:
        return self._plan.schedule[0]

    @cached_property
    def _gives_result(self) -> bool:
        """Whether products give D itself: nothing follows that cuBLASLt could not do."""
        out, adds = self._steps.out, self._steps.addend
        if self._target != "d" or "alpha" in self._steps.lying.zeros or self._problem.sums_c:
            return False
        several = len(self._intervals) > 1
        if self._problem.epilog is not MatmulEpilog.DEFAULT or (several and out.dtype != "float32"):
            return False
        if out.dtype in FLOAT8:
            known = out.dtype == "float8_e4m3fn" or out.dtype in self._scaling.given
            return known and not adds and set(self._plan.modes) == {"tensor"}
        if not adds:
            return True
        addend = self._steps.matrix(adds)
        addend = addend if out.leading is not None else addend.transposed()
        leading = addend.leading
        aligned = leading is not None and not (leading * addend.itemsize | addend.address) % GRAIN
        return aligned and addend.dtype == out.dtype

    @cached_property
    def _is_direct(self) -> bool:
        """Whether products are written to the target where it lies."""
        if self._target == "d" and not self._gives_result:
            return False
        return takes_result(self._steps.matrix(self._target), blocks=self._blocks)

    @cached_property
    def _product(self) -> Matrix:
        """The target of the products, or memory that is padded for one that cannot take them:
        float32, in the order of D.
        """
        target = self._steps.matrix(self._target)
        if self._is_direct:
            return target
        rows, columns = up(target.rows, GRAIN), up(target.columns, GRAIN)
        return Matrix.packed(0, (rows, columns), "float32", self._steps.order)

    def _lines(self, index: int) -> int:
        """Rows of op(A), columns of op(B), in the memory of an operand."""
        return (self._product.rows, self._product.columns)[index]

    # -- begin -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """What comes before the barrier that lets peers read this rank's scales; or lines for those
        who multiply them.
        """
        self._publish_scales()
        if self._rounds is None:
            return
        self._prepare_lines(self._rounds)
        self._send_lines(self._rounds)
        if not self._plan.multiplies:
            self._await_round(self._rounds.count)

    def multiply(self) -> tuple[Name, ...] | None:
        """The products; what is to be finished, None if that is D."""
        steps, target = self._steps, self._target
        if not self._is_direct:
            steps.take("product", 4 * self._product.size)
            target = steps.lay("product", "product", self._product)
        quantized = None
        if self._is_direct and self._gives_result and steps.quantizes:
            quantized = self._scale_of_result(), "amax" if self._scaling.amax else ""
        if self._rounds is None:
            self._multiply_panels(target, quantized)
        else:
            self._multiply_lines(self._rounds, target, quantized)
        if self._is_direct:
            return None if self._gives_result else (target,)
        wanted = steps.matrix(self._target)
        part = steps.part("wanted product", target, (0, wanted.rows), (0, wanted.columns))
        if self._target == "d":
            return (part,)
        steps.emit(AddUp((part,), self._target))
        return (self._target,)

    def _scale_of_result(self) -> Name:
        """Where the scale of an eight-bit D can be read; "" where it is 1."""
        steps, name = self._steps, SCALES[3]
        if name not in steps.buffers and name in steps.lying.ones:
            return ""
        given = steps.scales_as(3, (1, 1)) if name in steps.buffers else ""
        scale = steps.new("scale d", (1, 1), "float32", "C")
        steps.emit(LayOut(given, name, Blocks(None, None), (scale,), 1))
        return scale

    # -- products ----------------------------------------------------------------------------------

    def _multiply_panels(self, target: Name, quantized: tuple[Name, Name] | None) -> None:
        """A product of each interval of k, added to those before it."""
        steps, overlaps = self._steps, len(self._intervals) > 1
        scales = [self._lay_out(index) for index in (0, 1)]
        here = [self._packed(index) for index in (0, 1)]
        if overlaps:
            steps.fork()
        for number, interval in enumerate(self._intervals):
            pair = [
                self._factor(index, number, interval, here[index], overlaps=overlaps)
                for index in (0, 1)
            ]
            steps.await_panels(number, overlaps=overlaps)
            self._multiply(
                (pair[0], pair[1]),
                target,
                (scales[0][number], scales[1][number]),
                "" if number else self._addend,
                quantized,
                adds=number > 0,
            )
            steps.release(number, overlaps=overlaps)

    def _multiply_lines(
        self, rounds: Rounds, target: Name, quantized: tuple[Name, Name] | None
    ) -> None:
        """Products of the lines that have come, beside the rounds that bring others."""
        index, steps = rounds.index, self._steps
        other, scale = self._packed(1 - index), self._lay_out(1 - index)[0]
        assert other, "one operand is exchanged, the other is here"
        stages = rounds.stages(self._rank)
        if not rounds.cuts:
            stages = [Stage(0, 0, self._lines(index))]  # with lines that pad it
        for number, stage in enumerate(stages):
            self._await_round(stage.round)
            is_own = bool(rounds.cuts) and not stage.round
            lines = self._sent if is_own else self._come_lines(index, stage)
            is_known = is_own or self._plan.modes[index] == "tensor"
            laid = self._lay_out(index)[0] if is_known else self._come_scale(index, stage)
            words = quantized
            if quantized is not None and quantized[1]:
                word = steps.part(f"amax {number}", "amax", (0, 1), (number, number + 1))
                words = quantized[0], word
            addend = self._addend
            self._multiply(
                (lines, other) if index == 0 else (other, lines),
                self._of_lines(target, index, stage),
                (laid, scale) if index == 0 else (scale, laid),
                self._of_lines(addend, index, stage) if addend else "",
                words,
                spare=_SPARE_PROCESSORS if stage.round < rounds.count else 0,
            )
        self._await_round(rounds.count)

    @property
    def _addend(self) -> Name:
        """C where products of D itself add it."""
        return self._steps.addend if self._gives_result and self._is_direct else ""

    def _of_lines(self, name: Name, index: int, stage: Stage) -> Name:
        """What lines of an operand make of a product."""
        x, part = self._steps.matrix(name), f"{name}, lines from {stage.lo}"
        if index == 0:
            return self._steps.part(part, name, (stage.lo, stage.hi), (0, x.columns))
        return self._steps.part(part, name, (0, x.rows), (stage.lo, stage.hi))

    def _multiply(
        self,
        factors: tuple[Name, Name],
        target: Name,
        scales: tuple[ScaleOf, ScaleOf],
        addend: Name,
        quantized: tuple[Name, Name] | None,
        *,
        adds: bool = False,
        spare: int = 0,
    ) -> None:
        """One product, added to `target` or to beta times the addend."""
        ends = ("alpha",) if self._gives_result and self._is_direct else ()
        numbers = SCALES[:2] if set(self._plan.modes) == {"tensor"} else ()
        step = Gemm(
            *factors,
            target,
            alpha=(*ends, *numbers),
            addend=target if adds else addend,
            beta="beta" if addend else "",
            scales=scales,
            quantized=quantized,
            spare=spare,
        )
        self._steps.emit(step)

    # -- operands ----------------------------------------------------------------------------------

    def _columns(self, index: int, x: Matrix) -> Matrix:
        """An operand with its lines as columns; or, of that, the operand."""
        return x.transposed() if index == 0 else x

    def _factor(
        self, index: int, number: int, interval: Interval, here: Name, *, overlaps: bool
    ) -> Name:
        """An operand's indices of one interval."""
        name, plan = f"{'ab'[index]} {number}", self._plan.operand_plans[index]
        lo, hi = interval.lo, interval.hi
        if here:
            x = self._columns(index, self._steps.matrix(here))
            last = min(up(hi, GRAIN) if hi == plan.extent else hi, x.rows)
            ranges = [(lo, last), (0, x.columns)]
            rows, columns = ranges if index else ranges[::-1]
            return self._steps.part(name, here, rows, columns)
        stream = self._steps.beside(interval, overlaps=overlaps)
        memory, lines = f"panel {'ab'[index]}", self._lines(index)
        self._steps.take(memory, (up(self._plan.schedule[1], GRAIN) + GRAIN) * lines)
        start = up(interval.offset, GRAIN) * lines
        into = self._padded(index, name, memory, start, hi - lo, plan.width, lines)
        moves = plan.gather_moves(lo, hi)
        self._steps.gather("ab"[index], name, moves, into, stream=stream)
        return name

    def _packed(self, index: int) -> Name:
        """An operand that needs no gathering, in place or copied; "" for one that comes."""
        plan, name, steps = self._plan.operand_plans[index], "ab"[index], self._steps
        if plan.gathers:
            return ""
        own, lines = steps.own_part(index), self._lines(index)
        if lines == plan.width and fits(self._columns(index, steps.matrix(own))):
            return own
        packed = f"packed {name}"
        steps.take(packed, up(plan.extent, GRAIN) * lines)
        into = self._padded(index, packed, packed, 0, plan.extent, plan.width, lines)
        self._copy_own(index, plan.moves, into)
        return packed

    def _copy_own(self, index: int, moves: tuple[Move, ...], target: Name) -> None:
        """This rank's own elements of an operand, to where they are wanted."""
        moves = tuple(move for move in moves if move.elements)
        if moves:
            source = (self._rank, self._steps.factors[index])
            self._steps.emit(Gather(f"own of {target}", moves, (source,), target))

    def _padded(
        self, index: int, name: Name, memory: str, start: int, k: int, width: int, lines: int
    ) -> Name:
        """The part of an operand, laid out along k in memory, that is to be filled: zeros are put
        behind each of its lines. `name` is all of it.
        """
        deep = up(k, GRAIN)
        x = Matrix(start, deep, lines, 1, deep, self._scaling.given[index])
        self._steps.lay(name, memory, self._columns(index, x))
        if k < deep and width:
            behind = x.part((k, deep), (0, width))
            self._steps.emit(Clear(self._steps.lay(f"behind {name}", memory, behind)))
        part = x.part((0, k), (0, width))
        return self._steps.lay(f"filled {name}", memory, self._columns(index, part))

    # -- scales ------------------------------------------------------------------------------------

    def _publish_scales(self) -> None:
        """Put this rank's scales where peers read them, before the barrier that lets them."""
        for index, moves in enumerate(self._plan.scale_moves):
            if moves is None or self._stays(index):
                continue
            name = f"scales {'ab'[index]}"
            rows, columns = moves.transfer.src.local_shape(self._rank)
            self._steps.new(name, (rows, columns), "float32", "F", shared=True)
            blocks = Blocks(1 if moves.given == moves.blocks else moves.given.rows, 1)
            given = self._given_scales(index, moves)
            self._steps.emit(LayOut(given, "", blocks, (name,), rows))
            self._steps.publish(name)

    def _stays(self, index: int) -> bool:
        """Whether no rank reads another's scales of an operand from where they are published."""
        moves = self._plan.scale_moves[index]
        exchanged = self._rounds is not None and self._rounds.index == index
        return exchanged or moves is None or moves.stay

    def _given_scales(self, index: int, moves: ScaleMoves) -> Name:
        """This rank's scales of an operand, lines first."""
        x, steps, name = self._steps.matrix("ab"[index]), self._steps, f"given scales {'ab'[index]}"
        lines, k = (x.rows, x.columns) if index == 0 else (x.columns, x.rows)
        shape = moves.given.shape(lines, k)
        given = steps.scales_as(index, shape if index == 0 else shape[::-1])
        matrix = steps.matrix(given)
        return steps.lay(name, given, matrix if index == 0 else matrix.transposed())

    def _source(self, index: int) -> _Source:
        """What the scales that this rank needs of an operand are made from, when they have come."""
        steps, number = self._steps, SCALES[index]
        moves, name = self._plan.scale_moves[index], f"scales {'ab'[index]}"
        if moves is None:
            one = None
            if number in steps.buffers:
                one = View(number, Matrix(steps.matrix(number).address, 1, 1, 0, 0, "float32"))
            return _Source(one, Blocks(None, None), number)
        if self._stays(index):
            given = steps.buffers[self._given_scales(index, moves)]
            assert isinstance(given, View)
            return _Source(given, moves.given, number)
        come, shape = f"come {name}", moves.transfer.dst.local_shape(self._rank)
        if come not in steps.buffers:
            steps.new(come, shape, "float32", "F")
            steps.gather(name, "", self._plan.scales_into(index), come)
        view = steps.buffers[come]
        assert isinstance(view, View)
        return _Source(view, moves.blocks, number)

    def _lay_out(self, index: int) -> list[ScaleOf]:
        """The scales of each interval, where its product reads them; of lines that are exchanged,
        those of this rank's own.
        """
        lines, known = self._lines(index), self._plan.operand_plans[index].width
        if self._rounds is not None and self._rounds.index == index:
            lines = known = self._plan.own_lines
        mode, steps, name = self._plan.modes[index], self._steps, f"laid scales {'ab'[index]}"
        if mode == "tensor":
            given = SCALES[index] if SCALES[index] in steps.buffers else ""
            return [ScaleOf(mode, given)] * len(self._intervals)
        source, scales, used = self._source(index), [], 0
        for number, each in enumerate(self._intervals):
            laid = scale_layout(mode, lines, each.hi - each.lo)._replace(address=used)
            used += 4 * laid.size
            place = self._laid(f"{name} {number}", name, mode, laid, source, known, each)
            scales.append(ScaleOf(mode, place))
            if mode == "outer":  # the same for all of k
                scales *= len(self._intervals)
                break
        steps.take(name, used)
        return scales

    def _laid(
        self,
        name: Name,
        memory: str,
        mode: str,
        laid: Matrix,
        source: _Source,
        known: int,
        each: Interval,
    ) -> Name:
        """Where an interval's scales are: in memory of their own, or where they lie already."""
        if mode == "squares":
            known = -(-known // BLOCK)
        view = source.view
        if view is not None and source.blocks.columns is not None:
            view = view.part((0, view.matrix.rows), (each.lo // BLOCK, view.matrix.columns))
        laid = laid.part((0, laid.rows), (0, min(laid.columns, -(-(each.hi - each.lo) // BLOCK))))
        blocks = _in_layout(mode, source.blocks)
        is_plain = source.number in self._steps.lying.ones and blocks.rows == 1
        if is_plain and view is not None and _lies_as(view.matrix, laid):
            return self._steps.lay(name, *view)
        given = "" if view is None else self._steps.lay(f"source of {name}", *view)
        target = self._steps.lay(name, memory, laid)
        self._steps.emit(LayOut(given, source.number, blocks, (target,), known))
        return target

    # -- lines that all ranks need -----------------------------------------------------------------

    def _prepare_lines(self, rounds: Rounds) -> None:
        """Room for all lines and their scales, where peers write; and this rank's own lines without
        gaps, as they are sent and multiplied.
        """
        index, steps = rounds.index, self._steps
        lines = self._lines(index) if self._plan.multiplies else rounds.starts[-1]
        dtype, mode = self._scaling.given[index], self._plan.modes[index]
        steps.new(_LINES, (self._deep(index), lines), dtype, "F", shared=True)
        if mode != "tensor":
            layout = scale_layout(mode, lines, self._plan.operand_plans[index].extent)
            shape, order = (layout.rows, layout.columns), "C" if mode == "squares" else "F"
            steps.new(_LINE_SCALES, shape, "float32", order, shared=True)
        own = self._columns(index, steps.matrix("ab"[index]))
        self._sent: Name = "ab"[index]
        if fits(own) and own.leading == own.rows:
            return
        self._sent = "own lines"
        steps.take(self._sent, self._deep(index) * own.columns)
        k, lines = self._plan.operand_plans[index].extent, own.columns
        into = self._padded(index, self._sent, self._sent, 0, k, lines, lines)
        layout_of = (self._problem.a, self._problem.b)[index]
        moves = shared_part(layout_of, layout_of, src=self._rank, dst=self._rank)
        self._copy_own(index, moves, into)

    def _deep(self, index: int) -> int:
        """Elements of a line in memory, with those that pad it."""
        return up(self._plan.operand_plans[index].extent, GRAIN)

    def _send_lines(self, rounds: Rounds) -> None:
        """This rank's lines and their scales, to all ranks."""
        steps, ranks = self._steps, range(len(rounds.lines))
        places = [self._place(rounds, rank) for rank in ranks]
        if not rounds.cuts:
            steps.emit(REUSE)
            self._send_scales(rounds, ranks)
            steps.emit(Push(self._sent, tuple(places)), READ)
            return
        self._follow("side", "", "begun")
        steps.emit(REUSE, stream="side")
        self._follow("copies", "side", "free")
        self._send_scales(rounds, [rank for rank in ranks if rank != self._rank], stream="side")
        for number in range(1, rounds.count + 1):
            to = places[rounds.target(self._rank, number)]
            if steps.matrix(self._sent).size:
                steps.emit(Convert(self._columns_of_sent(rounds.index), to), stream="copies")
            if number in rounds.cuts:
                self._follow("side", "copies", f"sent {number}")
                steps.emit(READ, Record(f"come {number}"), stream="side")

    def _columns_of_sent(self, index: int) -> Name:
        """The lines that are sent, as columns."""
        view = self._steps.buffers[self._sent]
        assert isinstance(view, View)
        return self._steps.lay("sent lines", view.memory, self._columns(index, view.matrix))

    def _follow(self, stream: str, other: str, event: str) -> None:
        """What follows on one stream comes after what is on the other."""
        self._steps.emit(Record(event), stream=other)
        self._steps.emit(Await(event), stream=stream)

    def _await_round(self, number: int) -> None:
        """What follows on the products' stream comes after a round that products follow on."""
        if number:
            self._steps.emit(Await(f"come {number}"))

    def _place(self, rounds: Rounds, rank: int) -> Name:
        """Where this rank's lines lie at another."""
        lines = rounds.starts[self._rank], rounds.starts[self._rank + 1]
        name, box = f"lines at {rank}", ((0, self._deep(rounds.index)), lines)
        dtype = self._scaling.given[rounds.index]
        self._steps.buffers[name] = Peer(_LINES, rank, dtype, box=box)
        return name

    def _come_lines(self, index: int, stage: Stage) -> Name:
        """The lines of a stage, which have come."""
        x, name = self._steps.matrix(_LINES), f"lines from {stage.lo}"
        part = x.part((0, x.rows), (stage.lo, stage.hi))
        return self._steps.lay(name, _LINES, self._columns(index, part))

    def _come_scale(self, index: int, stage: Stage) -> ScaleOf:
        """Their scales, which have come; those of tensors all ranks know."""
        mode, name = self._plan.modes[index], f"line scales from {stage.lo}"
        layout = scale_layout(mode, stage.hi - stage.lo, self._plan.operand_plans[index].extent)
        x = layout._replace(address=4 * self._offset(index, stage.lo))
        return ScaleOf(mode, self._steps.lay(name, _LINE_SCALES, x))

    def _offset(self, index: int, line: int) -> int:
        """Where the scales of a stage begin whose first line is this one."""
        mode = self._plan.modes[index]
        if mode == "outer":
            return line
        layout = scale_layout(mode, BLOCK, self._plan.operand_plans[index].extent)
        return line * layout.columns if mode == "vectors" else line // BLOCK * layout.row_stride

    def _send_scales(self, rounds: Rounds, ranks: Sequence[int], *, stream: str = "") -> None:
        """This rank's own scales of the lines, as products want them, to these ranks."""
        index, steps = rounds.index, self._steps
        mode, lines = self._plan.modes[index], rounds.lines[self._rank]
        if mode == "tensor" or not lines or not ranks:
            return
        layout = scale_layout(mode, lines, self._plan.operand_plans[index].extent)
        rows = lines if mode == "outer" else layout.rows
        columns = min(layout.columns, -(-self._plan.operand_plans[index].extent // BLOCK))
        source, targets = self._source(index), []
        for rank in ranks:
            place = f"line scales at {rank}"
            steps.buffers[place] = self._scales_place(rounds, rank, rows, columns)
            targets.append(place)
        given = "" if source.view is None else steps.lay("sent scales", *source.view)
        blocks = _in_layout(mode, source.blocks)
        steps.emit(LayOut(given, source.number, blocks, tuple(targets), rows), stream=stream)

    def _scales_place(self, rounds: Rounds, rank: int, rows: int, columns: int) -> Peer:
        """Where the scales of this rank's lines lie at another: within those of their stage."""
        index, first = rounds.index, rounds.starts[self._rank]
        if self._plan.modes[index] == "squares":
            layout = scale_layout("squares", BLOCK, self._plan.operand_plans[index].extent)
            parcel = 4 * self._offset(index, first), (4 * layout.row_stride, 4)
            return Peer(_LINE_SCALES, rank, "float32", ((0, rows), (0, columns)), parcel)
        if not rounds.cuts:
            return Peer(_LINE_SCALES, rank, "float32", ((first, first + rows), (0, columns)))
        stage = next(x for x in rounds.stages(rank) if x.lo <= first < x.hi)
        start = self._offset(index, stage.lo) + first - stage.lo
        parcel = 4 * start, (4, 4 * (stage.hi - stage.lo))  # stages lie one behind the other
        return Peer(_LINE_SCALES, rank, "float32", ((0, rows), (0, columns)), parcel)


def scale_layout(mode: str, lines: int, deep: int) -> Matrix:
    """The form of the scales of so many lines and indices of k, lines first, at address 0."""
    blocks = -(-deep // BLOCK)
    if mode == "tensor":
        return Matrix.packed(0, (1, 1), "float32", "F")
    if mode == "outer":
        return Matrix.packed(0, (up(lines, 4), 1), "float32", "F")
    if mode == "vectors":
        return Matrix.packed(0, (lines, blocks), "float32", "F")
    return Matrix(0, -(-lines // BLOCK), up(blocks, 4), up(blocks, 4), 1, "float32")


def _in_layout(mode: str, blocks: Blocks) -> Blocks:
    """The same counted in numbers of the form, not in lines and indices of k."""
    rows, columns = blocks
    lines = None if rows is None else 1 if mode == "squares" else rows
    return Blocks(lines, None if columns is None else 1)


def _lies_as(x: Matrix, wanted: Matrix) -> bool:
    """Whether the wanted columns of a matrix of scales can be read in place."""
    steps = (
        x.rows == 1 or x.row_stride == wanted.row_stride,
        wanted.columns == 1 or x.column_stride == wanted.column_stride,
    )
    has_all = x.rows == wanted.rows and x.columns >= wanted.columns
    return has_all and all(steps) and x.address % GRAIN == 0
