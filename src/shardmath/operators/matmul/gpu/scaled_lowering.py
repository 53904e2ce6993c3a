"""The phases of a product of float8 elements, which cuBLASLt multiplies with their scales. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from shardmath.arrays.dtypes import FLOAT8
from shardmath.base.integers import up
from shardmath.geometry import Move, shared_part
from shardmath.local.epilog import MatmulEpilog
from shardmath.local.float8 import BLOCK, Blocks
from shardmath.local.gpu import Matrix, scaled
from shardmath.local.gpu.scaled import GRAIN
from shardmath.operators.matmul.gpu.panels import Interval
from shardmath.operators.matmul.gpu.product_lowering import ProductLowering
from shardmath.operators.matmul.gpu.rank_plan import Placement, RankPlan
from shardmath.operators.matmul.gpu.rounds import Stage
from shardmath.operators.matmul.gpu.scale_moves import (
    ScaleMoves,
    blocks_in_layout,
    lies_as,
    scale_layout,
)
from shardmath.operators.matmul.gpu.steps import AddUp, Clear, LayOut, Name, Push, ScaleOf
from shardmath.operators.matmul.scaling import SCALES, Scaling
from shardmath.program.rank_program import Peer, RankProgram
from shardmath.program.steps import READ, TAKEN, Await, Convert, Record
from shardmath.program.steps import Move as MoveStep
from shardmath.redistribution.plan import SomeMoves

_SPARE_PROCESSORS = 4  # multiprocessors for the barriers of the rounds, which run beside products
_LINES, _LINE_SCALES = "lines", "line scales"  # what peers write, by name


class ScaledLowering(ProductLowering):
    """Lowers a product of float8 operands, which are multiplied as they are, with their scales.

    cuBLASLt wants both operands contiguous along k, and everything at multiples of 16 bytes.
    Operands that lie so are used in place; others are gathered or copied into memory that is padded
    along k with zeros. A result that does not suit is computed in padded memory, too, whose last
    lines nobody reads. Scales travel as the elements do, and are laid out for each interval of k.
    """

    @property
    def _target(self) -> Name:
        return self.sums or "d"

    # -- where things lie --------------------------------------------------------------------------

    @property
    def _scaling(self) -> Scaling:
        assert self.problem.scaling is not None
        return self.problem.scaling

    @cached_property
    def _gives_result(self) -> bool:
        """Whether cuBLASLt can make D itself, and all that follows the product."""
        out, adds = self.out, self.addend
        if self._target != "d" or "alpha" in self.placement.zeros or self.problem.sums_c:
            return False
        several = len(self.intervals) > 1
        if self.problem.epilog is not MatmulEpilog.DEFAULT or (several and out.dtype != "float32"):
            return False
        if out.dtype in FLOAT8:
            known = out.dtype == "float8_e4m3fn" or out.dtype in self._scaling.given
            return known and not adds and set(self.rank_plan.modes) == {"tensor"}
        if not adds:
            return True
        addend = self.matrix(adds)
        addend = addend if out.leading is not None else addend.transposed()
        leading = addend.leading
        aligned = leading is not None and not (leading * addend.itemsize | addend.address) % GRAIN
        return aligned and addend.dtype == out.dtype

    @property
    def _ends(self) -> bool:
        """Whether products write D where it lies, and nothing follows."""
        return self._gives_result and self._is_direct

    @cached_property
    def _is_direct(self) -> bool:
        """Whether products write the target where it lies."""
        if self._target == "d" and not self._gives_result:
            return False
        blocks = bool({"vectors", "squares"} & set(self.rank_plan.modes))
        return scaled.takes_result(self.matrix(self._target), blocks=blocks)

    @cached_property
    def _product(self) -> Matrix:
        """The target of the products, or in place of one that does not suit padded memory of
        float32, in the order of D.
        """
        target = self.matrix(self._target)
        if self._is_direct:
            return target
        rows, columns = up(target.rows, GRAIN), up(target.columns, GRAIN)
        return Matrix.packed(0, (rows, columns), "float32", self.order)

    def _lines(self, index: int) -> int:
        """The lines that an operand needs in memory: rows of op(A), columns of op(B)."""
        return (self._product.rows, self._product.columns)[index]

    # -- begin -------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Put this rank's scales where peers read them after the first barrier."""
        for index, moves in enumerate(self.rank_plan.scale_moves):
            if moves is None or self._stays(index):
                continue
            name = f"scales {'ab'[index]}"
            rows, columns = moves.transfer.src.local_shape(self.rank)
            self.new(name, (rows, columns), "float32", "F", shared=True)
            blocks = Blocks(1 if moves.given == moves.blocks else moves.given.rows, 1)
            given = self._given_scales(index, moves)
            self.emit(LayOut(given, "", blocks, (name,), rows))
            self.publish(name)

    def _multiply(self) -> tuple[Name, ...] | None:
        target, ends = self._target, self._ends
        if not self._is_direct:
            self.take("product", 4 * self._product.size)
            target = self.lay("product", "product", self._product)
        quantized = None
        if ends and self.quantizes:
            quantized = self._scale_of_result(), "amax" if self._scaling.amax else ""
        self._multiply_into(target, ends=ends, quantized=quantized)
        if self._is_direct:
            return None if ends else (target,)
        wanted = self.matrix(self._target)
        part = self.part("wanted product", target, (0, wanted.rows), (0, wanted.columns))
        if self._target == "d":
            return (part,)
        self.emit(AddUp((part,), self._target))
        return (self._target,)

    def _scale_of_result(self) -> Name:
        """The buffer of the scale of an eight-bit D, "" for 1."""
        name = SCALES[3]
        if name not in self.arrays and name in self.placement.ones:
            return ""
        given = self.scales_as(3, (1, 1)) if name in self.arrays else ""
        scale = self.new("scale d", (1, 1), "float32", "C")
        self.emit(LayOut(given, name, Blocks(None, None), (scale,), 1))
        return scale

    # -- products ----------------------------------------------------------------------------------

    @property
    def _scale_numbers(self) -> tuple[str, ...]:
        return SCALES[:2] if set(self.rank_plan.modes) == {"tensor"} else ()

    def _scales(self) -> list[tuple[ScaleOf, ScaleOf] | None]:
        return list(zip(self._lay_out(0), self._lay_out(1), strict=True))

    def _end(self, index: int, interval: Interval, held: Matrix) -> int:
        hi = interval.hi
        return min(up(hi, GRAIN) if hi == self.k else hi, self._columns(index, held).rows)

    # -- operands ----------------------------------------------------------------------------------

    def _columns(self, index: int, x: Matrix) -> Matrix:
        """An operand with its lines as columns, or back from that."""
        return x.transposed() if index == 0 else x

    def _panel(self, index: int, name: Name, interval: Interval, target: Name) -> Name:
        memory, lines = f"panel {'ab'[index]}", self._lines(index)
        self.take(memory, (up(self.rank_plan.schedule[1], GRAIN) + GRAIN) * lines)
        start, k = up(interval.offset, GRAIN) * lines, interval.hi - interval.lo
        width = self.rank_plan.operand_plans[index].width
        return self._padded(index, name, memory, start, k, width, lines)

    def _dense(self, index: int, target: Name) -> Name:
        plan = self.rank_plan.operand_plans[index]
        if plan.gathers:
            return ""
        own, lines, packed = self.own_part(index), self._lines(index), f"packed {'ab'[index]}"
        if lines == plan.width and scaled.fits(self._columns(index, self.matrix(own))):
            return own
        self.take(packed, self._deep * lines)
        into = self._padded(index, packed, packed, 0, self.k, plan.width, lines)
        self._copy_own(index, plan.moves, into)
        return packed

    def _copy_own(self, index: int, moves: tuple[Move, ...], target: Name) -> None:
        """Copy this rank's own elements of an operand to the target, as `moves` say."""
        moves = tuple(move for move in moves if move.elements)
        if moves:
            factor = self.factors[index]
            taken = SomeMoves(moves, self.matrix(factor).itemsize)
            self.emit(MoveStep(taken, factor, target))

    def _padded(
        self, index: int, name: Name, memory: str, start: int, k: int, width: int, lines: int
    ) -> Name:
        """Lay out array `name` along k in memory, with zeros behind each line. Returns the part of
        it that is to be filled.
        """
        deep = up(k, GRAIN)
        x = Matrix(start, deep, lines, 1, deep, self._scaling.given[index])
        self.lay(name, memory, self._columns(index, x))
        if k < deep and width:
            behind = x.part((k, deep), (0, width))
            self.emit(Clear(self.lay(f"behind {name}", memory, behind)))
        part = x.part((0, k), (0, width))
        return self.lay(f"filled {name}", memory, self._columns(index, part))

    @property
    def _deep(self) -> int:
        """The elements of a line in memory, with padding."""
        return up(self.k, GRAIN)

    # -- scales ------------------------------------------------------------------------------------

    def _stays(self, index: int) -> bool:
        """Whether no rank reads published scales of an operand."""
        moves = self.rank_plan.scale_moves[index]
        return moves is None or moves.stay

    def _given_scales(self, index: int, moves: ScaleMoves) -> Name:
        """This rank's scales of an operand, lines first."""
        x, name = self.matrix("ab"[index]), f"given scales {'ab'[index]}"
        lines, k = (x.rows, x.columns) if index == 0 else (x.columns, x.rows)
        shape = moves.given.shape(lines, k)
        given = self.scales_as(index, shape if index == 0 else shape[::-1])
        matrix = self.matrix(given)
        return self.lay(name, given, matrix if index == 0 else matrix.transposed())

    def _source(self, index: int) -> tuple[Name, Blocks]:
        """The scales that this rank needs of an operand, gathered where they are not here: a
        matrix, lines first, "" where all are 1; and the blocks that its elements stand for.
        """
        given, moves = SCALES[index], self.rank_plan.scale_moves[index]
        name = f"scales {'ab'[index]}"
        if moves is None:
            if given not in self.arrays:
                return "", Blocks(None, None)
            x = Matrix(self.matrix(given).address, 1, 1, 0, 0, "float32")
            return self.lay(f"one scale {'ab'[index]}", given, x), Blocks(None, None)
        if self._stays(index):
            return self._given_scales(index, moves), moves.given
        come, shape = f"come {name}", moves.transfer.dst.local_shape(self.rank)
        if come not in self.arrays:
            self.new(come, shape, "float32", "F")
            self.gather(name, self.rank_plan.moves(name), come)
        return come, moves.blocks

    def _laid_lines(self, index: int) -> tuple[int, int]:
        """The lines for which scales are laid out, and how many of these are not padding."""
        return self._lines(index), self.rank_plan.operand_plans[index].width

    def _lay_out(self, index: int) -> list[ScaleOf]:
        """The scales of each interval, laid out for its product."""
        lines, known = self._laid_lines(index)
        mode, name = self.rank_plan.modes[index], f"laid scales {'ab'[index]}"
        if mode == "tensor":
            given = SCALES[index] if SCALES[index] in self.arrays else ""
            return [ScaleOf(mode, given)] * len(self.intervals)
        (source, blocks), scales, used = self._source(index), [], 0
        if mode == "squares":
            known = -(-known // BLOCK)
        laid = blocks_in_layout(mode, blocks)
        is_plain = SCALES[index] in self.placement.ones and laid.rows == 1
        for number, interval in enumerate(self.intervals):
            deep, target = interval.hi - interval.lo, f"{name} {number}"
            layout = scale_layout(mode, lines, deep)._replace(address=used)
            used += 4 * layout.size
            array = source
            if array and blocks.columns is not None:
                x = self.matrix(array)
                columns = interval.lo // BLOCK, x.columns
                array = self.part(f"source of {target}", array, (0, x.rows), columns)
            layout = layout.part((0, layout.rows), (0, min(layout.columns, -(-deep // BLOCK))))
            if is_plain and array and lies_as(self.matrix(array), layout):
                target = array  # they lie so already
            else:
                self.lay(target, name, layout)
                self.emit(
                    LayOut(array, SCALES[index], blocks_in_layout(mode, blocks), (target,), known)
                )
            scales.append(ScaleOf(mode, target))
            if mode == "outer":  # the same for all of k
                scales *= len(self.intervals)
                break
        self.take(name, used)
        return scales


class SentLinesLowering(ScaledLowering):
    """Lowers a product of float8 operands, one of which all ranks need whole: see `rounds`.

    Every rank sends its lines of that operand, and their scales, to all others, which have memory
    for them, beside the products of those lines that have come. A barrier before the first round
    says that nobody reads what was there, and one behind a round that its lines have come. Copies
    follow each other on one stream, barriers on another, so that neither waits for a product, and
    no copy for a barrier.
    """

    def __init__(self, rank_plan: RankPlan, placement: Placement, addition_order: str = "") -> None:
        super().__init__(rank_plan, placement, addition_order)
        assert rank_plan.rounds is not None
        self.rounds, self.index = rank_plan.rounds, rank_plan.rounds.index
        self.mode = rank_plan.modes[self.index]

    @property
    def words(self) -> int:
        return self.problem.size  # one for each stage

    def _publish_factor(self, index: int) -> None:
        """See ProductLowering. Lines are sent, and peers read none."""

    def _stays(self, index: int) -> bool:
        return index == self.index or super()._stays(index)

    def _laid_lines(self, index: int) -> tuple[int, int]:
        own = self.rounds.lines[self.rank]
        return (own, own) if index == self.index else super()._laid_lines(index)

    def _begin(self) -> None:
        super()._begin()
        self._prepare_lines()
        self._send_lines()
        if not self.rank_plan.multiplies:
            self._await_round(self.rounds.count)

    def _multiply_into(
        self,
        target: Name,
        *,
        ends: bool,
        quantized: tuple[Name, Name] | None = None,
        **how: Any,
    ) -> None:
        """Multiply the lines that have come, while the next rounds bring others."""
        rounds, index, addend = self.rounds, self.index, self.addend if ends else ""
        other, scale = self._dense(1 - index, target), self._lay_out(1 - index)[0]
        assert other, "one operand is exchanged, the other is here"
        stages = rounds.stages(self.rank)
        if not rounds.cuts:
            stages = [Stage(0, 0, self._lines(index))]  # with padding
        for number, stage in enumerate(stages):
            self._await_round(stage.round)
            is_own = bool(rounds.cuts) and not stage.round
            lines = self._sent if is_own else self._received_lines(stage)
            is_known = is_own or self.mode == "tensor"
            laid = self._lay_out(index)[0] if is_known else self._received_scale(stage)
            words = quantized
            if quantized is not None and quantized[1]:
                word = self.part(f"amax {number}", "amax", (0, 1), (number, number + 1))
                words = quantized[0], word
            self._gemm(
                (lines, other) if index == 0 else (other, lines),
                self._of_lines(target, stage),
                self._of_lines(addend, stage) if addend else "",
                ends=ends,
                scales=(laid, scale) if index == 0 else (scale, laid),
                quantized=words,
                spare=_SPARE_PROCESSORS if stage.round < rounds.count else 0,
            )
        self._await_round(rounds.count)

    def _of_lines(self, name: Name, stage: Stage) -> Name:
        """The part of a product's matrix that a stage's lines of an operand give."""
        x, part = self.matrix(name), f"{name}, lines from {stage.lo}"
        if self.index == 0:
            return self.part(part, name, (stage.lo, stage.hi), (0, x.columns))
        return self.part(part, name, (0, x.rows), (stage.lo, stage.hi))

    def _prepare_lines(self) -> None:
        """Take memory for all lines and their scales, where peers write; and lay out this rank's
        own lines without gaps, as they are sent and multiplied.
        """
        index, mode = self.index, self.mode
        lines = self._lines(index) if self.rank_plan.multiplies else self.rounds.starts[-1]
        dtype = self._scaling.given[index]
        self.new(_LINES, (self._deep, lines), dtype, "F", shared=True)
        if mode != "tensor":
            layout = scale_layout(mode, lines, self.k)
            shape, order = (layout.rows, layout.columns), "C" if mode == "squares" else "F"
            self.new(_LINE_SCALES, shape, "float32", order, shared=True)
        own = self._columns(index, self.matrix("ab"[index]))
        self._sent: Name = "ab"[index]
        if scaled.fits(own) and own.leading == own.rows:
            return
        self._sent = "own lines"
        self.take(self._sent, self._deep * own.columns)
        into = self._padded(index, self._sent, self._sent, 0, self.k, own.columns, own.columns)
        layout_of = (self.problem.a, self.problem.b)[index]
        moves = shared_part(layout_of, layout_of, src=self.rank, dst=self.rank)
        self._copy_own(index, moves, into)

    def _send_lines(self) -> None:
        """Send this rank's lines and their scales to all ranks."""
        rounds, ranks = self.rounds, range(self.problem.size)
        places = [self._place(rank) for rank in ranks]
        if not rounds.cuts:
            self.emit(TAKEN)
            self._send_scales(ranks)
            self.emit(Push(self._sent, tuple(places)), READ)
            return
        self.follow("side", "", "begun")
        self.emit(TAKEN, stream="side")
        self.follow("copies", "side", "free")
        self._send_scales([rank for rank in ranks if rank != self.rank], stream="side")
        for number in range(1, rounds.count + 1):
            to = places[rounds.target(self.rank, number)]
            if self.matrix(self._sent).size:
                self.emit(Convert(self._columns_of_sent(), to), stream="copies")
            if number in rounds.cuts:
                self.follow("side", "copies", f"sent {number}")
                self.emit(READ, Record(f"come {number}"), stream="side")

    def _columns_of_sent(self) -> Name:
        """The lines that are sent, as columns."""
        view = self.arrays[self._sent]
        return self.lay("sent lines", view.memory, self._columns(self.index, view.matrix))

    def _await_round(self, number: int) -> None:
        """Let products wait for the lines of a round; 0 stands for this rank's own lines."""
        if number:
            self.emit(Await(f"come {number}"))

    def _place(self, rank: int) -> Name:
        """The place of this rank's lines in the memory of another."""
        lines = self.rounds.starts[self.rank], self.rounds.starts[self.rank + 1]
        name, box = f"lines at {rank}", ((0, self._deep), lines)
        dtype = self._scaling.given[self.index]
        self.peers[name] = Peer(_LINES, rank, dtype, box)
        return name

    def _received_lines(self, stage: Stage) -> Name:
        """The lines of a stage."""
        x, name = self.matrix(_LINES), f"lines from {stage.lo}"
        part = x.part((0, x.rows), (stage.lo, stage.hi))
        return self.lay(name, _LINES, self._columns(self.index, part))

    def _received_scale(self, stage: Stage) -> ScaleOf:
        """The scales of a stage's lines."""
        layout = scale_layout(self.mode, stage.hi - stage.lo, self.k)
        x = layout._replace(address=4 * self._offset(stage.lo))
        return ScaleOf(self.mode, self.lay(f"line scales from {stage.lo}", _LINE_SCALES, x))

    def _offset(self, line: int) -> int:
        """The element at which the scales of a stage begin whose first line this is."""
        if self.mode == "outer":
            return line
        layout = scale_layout(self.mode, BLOCK, self.k)
        is_vectors = self.mode == "vectors"
        return line * layout.columns if is_vectors else line // BLOCK * layout.row_stride

    def _send_scales(self, ranks: Sequence[int], *, stream: str = "") -> None:
        """Send this rank's own scales of the lines to these ranks, laid out for their products."""
        index, mode, lines = self.index, self.mode, self.rounds.lines[self.rank]
        if mode == "tensor" or not lines or not ranks:
            return
        layout = scale_layout(mode, lines, self.k)
        rows = lines if mode == "outer" else layout.rows
        columns = min(layout.columns, -(-self.k // BLOCK))
        (source, blocks), targets = self._source(index), []
        for rank in ranks:
            place = f"line scales at {rank}"
            self.peers[place] = self._scales_place(rank, rows, columns)
            targets.append(place)
        blocks = blocks_in_layout(mode, blocks)
        self.emit(LayOut(source, SCALES[index], blocks, tuple(targets), rows), stream=stream)

    def _scales_place(self, rank: int, rows: int, columns: int) -> Peer:
        """The place of the scales of this rank's lines at another, within those of their stage."""
        rounds, first = self.rounds, self.rounds.starts[self.rank]
        if self.mode == "squares":
            layout = scale_layout("squares", BLOCK, self.k)
            parcel = 4 * self._offset(first), (4 * layout.row_stride, 4)
            return Peer(_LINE_SCALES, rank, "float32", ((0, rows), (0, columns)), parcel)
        if not rounds.cuts:
            return Peer(_LINE_SCALES, rank, "float32", ((first, first + rows), (0, columns)))
        stage = next(x for x in rounds.stages(rank) if x.lo <= first < x.hi)
        start = self._offset(stage.lo) + first - stage.lo
        parcel = 4 * start, (4, 4 * (stage.hi - stage.lo))  # stages lie one behind the other
        return Peer(_LINE_SCALES, rank, "float32", ((0, rows), (0, columns)), parcel)


def lowered(rank_plan: RankPlan, placement: Placement, addition_order: str = "") -> RankProgram:
    """The program of a rank. `addition_order` is the memory order of products that one collective
    adds up, the same on all ranks, or "" where peers read them.
    """
    kind = ProductLowering
    if rank_plan.multiplies_elements:
        kind = ScaledLowering if rank_plan.rounds is None else SentLinesLowering
    return kind(rank_plan, placement, addition_order).program()
