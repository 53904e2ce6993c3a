"""The phases of a product on one rank, as steps over named matrices: what its rank plan means.

    publish a, b ── synchronise ── gather, multiply ──► "sums" ── synchronise ── add up ──► d

It follows from the rank plan and from how the arrays lie, and is the same for all executions that
are alike in this. Products never read a peer's memory themselves: what lies there is gathered
first, on a second stream while the last panel is multiplied. Sums of several ranks are added in
rank order, so that the bits are the same every time. Between hosts what peers take is packed before
they read it, and fetched by them. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from shardmath.arrays import dtypes
from shardmath.arrays.dtypes import FLOAT8
from shardmath.geometry import Move, shared_part
from shardmath.geometry.integers import up
from shardmath.local.epilog import MatmulEpilog
from shardmath.local.float8 import BLOCK, Blocks
from shardmath.local.gpu import Matrix, scaled
from shardmath.local.gpu.fused_epilog import fused_epilog, split
from shardmath.local.gpu.gemm import fits, takes_result
from shardmath.local.gpu.scaled import GRAIN
from shardmath.operators.matmul.gpu.panel_schedule import TILINGS
from shardmath.operators.matmul.gpu.panels import Interval
from shardmath.operators.matmul.gpu.rank_plan import Placement, RankPlan
from shardmath.operators.matmul.gpu.rounds import Rounds, Stage
from shardmath.operators.matmul.gpu.scale_moves import (
    ScaleMoves,
    blocks_in_layout,
    lies_as,
    scale_layout,
)
from shardmath.operators.matmul.gpu.steps import (
    AddUp,
    ByEngines,
    Clear,
    Collective,
    EpilogProduct,
    Gemm,
    Greatest,
    LayOut,
    Name,
    OneKernel,
    PanelProduct,
    Push,
    ScaleOf,
)
from shardmath.operators.matmul.problem import gradient_layouts
from shardmath.operators.matmul.program import output
from shardmath.operators.matmul.scaling import SCALES, TENSOR, Scaling, blocks_of
from shardmath.program.rank_program import Peer, RankProgram, View
from shardmath.program.steps import (
    READ,
    TAKEN,
    Await,
    Convert,
    Dequantize,
    Fused,
    Get,
    Memory,
    On,
    Pack,
    Quantize,
    Record,
    SumLines,
    Unpack,
)
from shardmath.program.steps import Move as MoveStep
from shardmath.redistribution.delivery import Delivery
from shardmath.redistribution.plan import SomeMoves

# What peers may read and write, beside op(A) and op(B), in the order in which ranks tell of it.
_SHARED = (
    *("own c", "sums", "reduced", "vector", "scales a", "scales b", "amax"),
    *("lines", "line scales"),
)
Box = tuple[tuple[int, int], tuple[int, int]]


class ProgramBuilder:
    """The program of one rank, as far as it has been put together: arrays, steps, and what peers
    reach. What passes from rank to rank is shared by its owner, and reached by moves.
    """

    def __init__(self, rank_plan: RankPlan, placement: Placement, addition_order: str = "") -> None:
        self.rank_plan = rank_plan
        self.strategy, self.rank = rank_plan.strategy, rank_plan.rank
        self.problem = rank_plan.strategy.problem
        self.intervals = rank_plan.schedule[0]
        self.k = rank_plan.operand_plans[0].extent  # of both operands, here
        self.placement = placement
        self.wide = dtypes.accumulator(self.problem.dtype).name
        self.steps: list[Any] = []
        self.arrays = {name: View.of(name, x) for name, x in placement.arrays}
        self.peers: dict[Name, Peer] = {}
        self.memories: dict[str, Memory] = {}
        self.told: dict[str, View] = {}
        self.factors = ["a", "b"]  # arrays of op(A) and op(B)
        self.out = self.matrix("d")
        self.order = "F" if self.out.by_columns else "C"
        self.addend = "c" if "c" in self.arrays and "beta" not in placement.zeros else ""
        self.addition_order = addition_order
        scaling = self.problem.scaling
        self.quantizes = scaling is not None and scaling.d
        self.wants_amax = scaling is not None and scaling.amax and scaling.d
        self.sums = self._sums()  # this rank's product, to be added or moved; "" if that is D

    def built(self, steps: tuple[Any, ...]) -> RankProgram:
        """The program of these steps."""
        shared = (*self.factors, *_SHARED)
        if self.rank_plan.multi_host:
            shared = tuple(map(_outbox, shared))
        outboxes = {name for name in shared if self.rank_plan.multi_host and name in self.memories}
        told = {name: self.told.get(name) for name in shared if name not in outboxes}
        arrays, memories = self.arrays, self.memories
        return RankProgram(steps, arrays, memories, shared, told=told, peers=self.peers)

    # -- arrays ------------------------------------------------------------------------------------

    def emit(self, *steps: Any, stream: str = "") -> None:
        """Steps that follow, on a stream of the lane's or the user's."""
        self.steps += [On(stream, step) for step in steps] if stream else steps

    def matrix(self, name: Name) -> Matrix:
        """The matrix of an array in memory of this rank."""
        return self.arrays[name].matrix

    def take(self, memory: str, nbytes: int, *, shared: bool = False) -> None:
        """Memory of the lane of at least that size."""
        held = self.memories.get(memory, Memory(0))
        self.memories[memory] = Memory(max(held.nbytes, nbytes), shared or held.shared)

    def lay(self, name: Name, memory: str, x: Matrix) -> Name:
        """An array of that name at a place of a memory."""
        self.arrays[name] = View.of(memory, x)
        return name

    def new(
        self, name: Name, shape: tuple[int, ...], dtype: str, order: str, *, shared: bool = False
    ) -> Name:
        """A packed matrix in memory of the same name, which peers may reach."""
        rows, columns = shape
        x = Matrix.packed(0, (rows, columns), dtype, order)
        self.take(name, x.size * x.itemsize)
        self.lay(name, name, x)
        if shared:
            self.share(name)
        return name

    def part(self, name: Name, of: Name, rows: tuple[int, int], columns: tuple[int, int]) -> Name:
        """An array of that name that is a part of another."""
        return self.lay(name, self.arrays[of].memory, self.matrix(of).part(rows, columns))

    # -- what peers read ---------------------------------------------------------------------------

    def own(self, name: str) -> Name:
        """The array that this rank has itself of the matrices of that name."""
        a, b = self.factors
        return {"a": a, "b": b, "c": "own c"}.get(name, name)

    def delivery(self, name: str) -> Delivery:
        """How the matrices of that name pass between hosts."""
        return self.rank_plan.delivery(name, self.matrix(self.own(name)).itemsize)

    def share(self, name: str, view: View | None = None) -> None:
        """Let peers reach the matrix of that name, or a `view` in place of it; between hosts what
        they take of it, once that is packed.
        """
        own = self.own(name)
        if not self.rank_plan.multi_host:
            self.told[own] = view = view or self.arrays[own]
            if view.memory in self.memories:
                self.take(view.memory, 0, shared=True)
        elif nbytes := self.delivery(name).outbox.nbytes:
            self.take(_outbox(own), nbytes, shared=True)

    def publish(self, name: str) -> None:
        """Put what peers take of this rank's matrix of that name where they find it when all have
        synchronised: between hosts it is packed.
        """
        own = self.own(name)
        if self.rank_plan.multi_host and _outbox(own) in self.memories:
            self.emit(Pack(self.delivery(name), own, _outbox(own)))

    def synchronise(self, name: str) -> None:
        """Synchronise after writing what a peer will read, the matrix of that name, and before
        reading what it wrote.
        """
        self.publish(name)
        self.emit(READ)

    def gather(self, name: str, moves: Sequence[Move], target: Name, *, stream: str = "") -> None:
        """Put what moves bring of the ranks' matrices of that name into `target`."""
        moves, own = tuple(move for move in moves if move.elements), self.own(name)
        if not moves:
            return
        step: Any = MoveStep(SomeMoves(moves, self.matrix(own).itemsize), own, target)
        if self.rank_plan.multi_host:
            delivery = self.delivery(name).only(moves)
            room = self._fetched(delivery, own, f"room {name}", stream)
            step = Unpack(delivery, own, _outbox(own), room, target)
        self.emit(Fused(ByEngines(), (step,)) if stream else step, stream=stream)

    def read(self, name: str, array: Name, move: Move, box: Box | None = None) -> Name:
        """An array that is the dense box which a move reads of the ranks' matrices of that name, or
        another box of those, where that is readable; between hosts it is fetched.
        """
        own, src = self.own(name), move.src
        rows, columns = box or [(run.src_start, run.src_start + run.length) for run in move.runs]
        if src == self.rank:
            return self.part(array, own, rows, columns)
        dtype, parcel = self.matrix(own).dtype, None
        if self.rank_plan.multi_host:
            delivery = self.delivery(name).only([move])
            start, (one, two) = parcel = delivery.place(src)
            if delivery.is_far(src):
                room = self._fetched(delivery, own, f"room of {array}", "")
                item = delivery.transfer.itemsize
                x = Matrix(start, 0, 0, one // item, two // item, dtype)
                return self.lay(array, room, x.part(rows, columns))
            own = _outbox(own)
        self.peers[array] = Peer(own, src, dtype, (rows, columns), parcel)
        return array

    def _fetched(self, delivery: Delivery, own: Name, room: str, stream: str) -> str:
        """Memory with what is fetched from other hosts; what it had before is gone."""
        self.take(room, delivery.room, shared=True)
        if delivery.fetches:
            self.emit(Get(delivery, _outbox(own), room), stream=stream)
        return room

    # -- what is multiplied ------------------------------------------------------------------------

    def _sums(self) -> Name:
        """Memory for this rank's product, where it is added to others or moved."""
        if not (self.strategy.reduces or self.strategy.moves_result):
            return ""
        shape, dtype, order = self.strategy.sums.local_shape(self.rank), self.wide, self.order
        if self.addition_order:
            dtype, order = self.rank_plan.parts_dtype, self.addition_order
        return self.new("sums", shape, dtype, order, shared=True)

    def own_part(self, index: int) -> Name:
        """This rank's own part of an operand that needs no gathering."""
        operand_plan = self.rank_plan.operand_plans[index]
        assert operand_plan.place is not None, operand_plan
        row, column = operand_plan.place
        rows, columns = operand_plan.shape(0, operand_plan.extent)
        name = f"own {'ab'[index]}"
        return self.part(name, self.factors[index], (row, row + rows), (column, column + columns))

    def scales_as(self, index: int, shape: tuple[int, int]) -> Name:
        """The scales of a matrix, which are of that shape, an array or a number."""
        name = SCALES[index]
        if name in self.arrays:
            self.lay(name, name, self.matrix(name)._replace(rows=shape[0], columns=shape[1]))
        return name

    @property
    def words(self) -> int:
        """Greatest values of this rank's part of D: of each product that may make it, one."""
        return self.problem.size if self.rank_plan.rounds is not None else 1

    # -- order -------------------------------------------------------------------------------------

    def follow(self, stream: str, other: str, event: str) -> None:
        """Make one stream wait for all that is on the other."""
        self.emit(Record(event), stream=other)
        self.emit(Await(event), stream=stream)


def _outbox(own: Name) -> str:
    """The memory in which peers on other hosts find what they take of an array."""
    return f"outbox {own}"


_SPARE_PROCESSORS = 4  # multiprocessors, for what runs beside products: the barriers of the rounds
_LINES, _LINE_SCALES = "lines", "line scales"  # what peers write, by name


def lowered(rank_plan: RankPlan, placement: Placement, addition_order: str = "") -> RankProgram:
    """What the rank does. `addition_order` is the order of products that one collective adds up,
    the same on all ranks; "" where peers read them.
    """
    kind = ScaledLowering if rank_plan.multiplies_elements else Lowering
    return kind(rank_plan, placement, addition_order).program()


class Lowering(ProgramBuilder):
    """Lowers a product of numbers, or of elements that become numbers first, to steps."""

    def program(self) -> RankProgram:
        """The program of the rank, from publishing its operands to the result."""
        self._dequantize()
        for index in (0, 1):
            self._publish_factor(index)
        self._begin()
        if self.wants_amax:
            self.new("amax", (1, self.words), "float32", "C", shared=True)
            self.emit(Clear("amax"))
        together = self._publish_c() or self.rank_plan.reads_peers
        if together:
            self.emit(READ)
        if not self.rank_plan.multiplies:
            parts: tuple[Name, ...] | None = ()
            if self.sums:
                self.emit(AddUp((), self.sums))  # zeros
        else:
            parts = self._multiply()
        if self._finish(parts) or together:
            self.emit(TAKEN)
        steps = tuple(self.steps)
        if self.rank_plan.one_kernel:
            assert self.rank_plan.pattern is not None
            steps = (Fused(OneKernel(self.rank_plan.pattern.kind), steps),)
        return self.built(steps)

    # -- before the product ------------------------------------------------------------------------

    def _dequantize(self) -> None:
        """Eight-bit operands that are not multiplied as they are become numbers."""
        scaling = self.problem.scaling
        if scaling is None:
            return
        if not self.rank_plan.multiplies_elements:
            for index, granularity in enumerate((scaling.a, scaling.b)):
                self.factors[index] = self._numbers("ab"[index], index, granularity)
        if self.addend and self.matrix("c").dtype in FLOAT8:
            self.addend = self._numbers("c", 2, TENSOR)

    def _numbers(self, name: str, index: int, granularity: str) -> Name:
        x, numbers = self.matrix(name), f"numbers {name}"
        order = "F" if x.by_columns else "C"
        packed = Matrix.packed(0, (x.rows, x.columns), "float32", order)
        self.take(numbers, 4 * x.size, shared=index < 2 and not self.rank_plan.multi_host)
        self.lay(numbers, numbers, packed)
        blocks = blocks_of(granularity, index if index < 2 else 0)
        self.emit(Dequantize(name, self.scales_as(index, blocks.shape(x.rows, x.columns)), blocks,
                             numbers))  # fmt: skip
        return numbers

    def _publish_factor(self, index: int) -> None:
        """Op(A), index 0, or op(B), where peers read it: in place if it is on the heap, else as a
        copy of what they read.
        """
        name, factor = "ab"[index], self.factors[index]
        read = self.strategy.transfers[index].read_by_peers(self.rank)
        if read is None or self.rank_plan.rounds is not None:
            return
        if self.rank_plan.multi_host or self.placement.on_heap[index] or factor != name:
            self.share(name)
            self.publish(name)
            return
        rows, columns = read
        part = self.part(f"read of {name}", factor, rows, columns)
        order = "F" if self.matrix(part).by_columns else "C"
        shape, dtype = self.arrays[part].shape, self.matrix(part).dtype
        copy = self.new(f"copy of {name}", shape, dtype, order)
        x, (top, left) = self.matrix(copy), (rows[0], columns[0])
        self.share(name, View.of(copy, x.part((-top, 0), (-left, 0))))  # as if it had all
        self.emit(Convert(part, copy))

    def _publish_c(self) -> bool:
        """Copy C to where peers read it, if each rank has one: true on all ranks if so."""
        if not self.problem.sums_c or "c" not in self.arrays:
            return False
        given = self.addend or "c"
        c = self.matrix(given)
        self.new("own c", (c.rows, c.columns), c.dtype, self.order)
        self.share("c")
        self.emit(Convert(given, "own c"))
        self.publish("c")
        return True

    # -- the product -------------------------------------------------------------------------------

    def _multiply(self) -> tuple[Name, ...] | None:
        """The product of the work's rows and columns as what is to be finished; None if it is."""
        target, epilog = self.sums, self.problem.epilog
        writes_d = not target and self._can_write_d()
        in_panels = self._may_come_in_panels()
        before = self.steps
        if not (target or (writes_d and not epilog.changes_d)):
            x = Matrix.packed(0, (self.out.rows, self.out.columns), self.wide, self.order)
            self.take("product", x.size * x.itemsize)
            target = self.lay("product", "product", x)
            writes_d = writes_d and self._does_epilog()
        fused: tuple[Any, ...] = ()
        if writes_d and epilog.changes_d:  # within the product, if there is an algorithm
            self.steps = []
            first, rest = split(epilog, self.out.dtype)
            self._multiply_into("d", first, ends=True)
            if rest is not MatmulEpilog.DEFAULT:
                self.emit(AddUp(("d",), "d", epilog=rest, aux=self._aux(rest)))
            fused = tuple(self.steps)
        self.steps = []
        self._multiply_into(target or "d", ends=not target)
        if target and (fused or in_panels):
            self._finish_sums((target,))
        if fused:
            self.steps = [Fused(EpilogProduct(fused), tuple(self.steps))]
        elif in_panels:
            self.steps = [Fused(PanelProduct(), tuple(self.steps))]
        self.steps = before + self.steps
        return None if fused or in_panels or not target else (target,)

    def _may_come_in_panels(self) -> bool:
        """Whether nothing is asked for that the kernel lacks which multiplies panels as they come:
        it writes D, in the operands' type, and has no epilog, no alpha and no C.
        """
        strategy, problem = self.strategy, self.problem
        return (
            not self.rank_plan.multi_host
            and not (strategy.reduces or strategy.moves_result)
            and strategy.sums.disjoint()
            and any(operand_plan.gathers for operand_plan in self.rank_plan.operand_plans)
            and problem.dtype in TILINGS
            and self.out.dtype == problem.dtype
            and problem.epilog is MatmulEpilog.DEFAULT
            and "alpha" in self.placement.ones
            and not self.addend
        )

    def _can_write_d(self) -> bool:
        """Whether a product can be written to D, if the epilog can be done within it."""
        several = len(self.intervals) > 1
        return not (
            self.problem.sums_c
            or "alpha" in self.placement.zeros  # NaN times 0 is NaN, which BLAS does not look for
            or not takes_result(self.out)
            or (several and self.out.dtype != self.wide)
            or (self.problem.scaling is not None and self.out.dtype != self.wide)
            or (self.addend and not self._takes_c(self.matrix(self.addend)))
        )

    def _takes_c(self, c: Matrix) -> bool:
        if c.dtype != self.out.dtype:
            return False
        if self.out.leading is None:
            c = c.transposed()
        return c.leading is not None

    def _does_epilog(self) -> bool:
        """Whether a product can do the epilog's first part, as far as can be seen here."""
        first, _ = split(self.problem.epilog, self.out.dtype)
        aux, bias = self._aux(first), self._bias
        fused = fused_epilog(
            first,
            self.out,
            bias=(self.matrix(bias).address, self.matrix(bias).row_stride) if bias else None,
            aux=self.matrix(aux) if aux else None,
        )
        wider = self.problem.result != self.problem.dtype  # not seen with a bias
        return fused is not None and not wider and len(self.intervals) == 1

    def _aux(self, epilog: MatmulEpilog) -> Name:
        """The auxiliary matrix that an epilog reads or makes."""
        if epilog.needs_aux:
            return epilog.needs_aux
        return output(epilog.makes_aux) if epilog.makes_aux else ""

    @property
    def _bias(self) -> Name:
        return "bias" if "bias" in self.arrays else ""

    def _multiply_into(
        self,
        target: Name,
        epilog: MatmulEpilog = MatmulEpilog.DEFAULT,
        *,
        ends: bool,
        **how: Any,
    ) -> None:
        """Multiply interval after interval of k, each product added to those before it. With `ends`
        their sum is D.
        """
        overlaps = len(self.intervals) > 1
        scales = self._scales()
        dense = [self._dense(index, target) for index in (0, 1)]
        beside = "side" if overlaps else ""
        if overlaps:
            self.follow(beside, "", "fork")
        for number, interval in enumerate(self.intervals):
            names = f"a {number}", f"b {number}"
            if overlaps and interval.after is not None:  # whose memory the panels take
                self.emit(Await(f"used {interval.after}"), stream=beside)
            for index, operand_plan in enumerate(self.rank_plan.operand_plans):
                name, held = names[index], dense[index]
                if held:
                    x = self.matrix(held)
                    ranges = [(0, x.rows), (0, x.columns)]
                    ranges[operand_plan.axis] = interval.lo, self._end(index, interval, x)
                    self.part(name, held, ranges[0], ranges[1])
                    continue
                into = self._panel(index, name, interval, target)
                moves = operand_plan.gather_moves(interval.lo, interval.hi)
                self.gather("ab"[index], moves, into, stream=beside)
            if overlaps:
                self.follow("", beside, f"come {number}")
            addend = target if number else self.addend if ends else ""
            self._gemm(names, target, addend, epilog, ends=ends, scales=scales[number], **how)
            if overlaps:
                self.emit(Record(f"used {number}"))

    def _gemm(
        self,
        factors: tuple[Name, Name],
        target: Name,
        addend: Name,
        epilog: MatmulEpilog = MatmulEpilog.DEFAULT,
        *,
        ends: bool,
        **how: Any,
    ) -> None:
        """Multiply two factors into the target; `addend`, the target itself or C, is added."""
        step = Gemm(
            *factors,
            target,
            self.problem.conjugate,
            alpha=("alpha",) * ends + self._scale_numbers,
            addend=addend,
            beta="beta" if addend not in ("", target) else "",
            epilog=epilog,
            bias=self._bias if epilog.has_bias else "",
            aux=self._aux(epilog),
            **how,
        )
        self.emit(step)

    # -- what float8 operands have besides ---------------------------------------------------------

    @property
    def _scale_numbers(self) -> tuple[str, ...]:
        """Names of scales by which products are multiplied."""
        return ()

    def _begin(self) -> None:
        """Publish what scaled operands have besides their elements."""

    def _scales(self) -> list[tuple[ScaleOf, ScaleOf] | None]:
        """The scales of each interval's factors."""
        return [None] * len(self.intervals)

    def _end(self, index: int, interval: Interval, held: Matrix) -> int:
        """The end of an interval of k in an operand that this rank holds, with what pads it."""
        return interval.hi

    # -- factors -----------------------------------------------------------------------------------

    def _dense(self, index: int, target: Name) -> Name:
        """An operand that needs no gathering in a form that BLAS takes; "" for one that does."""
        operand_plan = self.rank_plan.operand_plans[index]
        if operand_plan.gathers:
            return ""
        own = self.own_part(index)
        if self._fits(index, self.matrix(own), target):
            return own
        packed = f"packed {'ab'[index]}"
        x = self._oriented(index, self.matrix(own), target)
        self.take(packed, x.size * x.itemsize)
        self.emit(AddUp((own,), self.lay(packed, packed, x)))
        return packed

    def _fits(self, index: int, x: Matrix, target: Name) -> bool:
        return fits(x, self.matrix(target), conjugate=self.problem.conjugate[index])

    def _panel(self, index: int, name: Name, interval: Interval, target: Name) -> Name:
        """Memory for an interval of an operand, in its order where BLAS takes that."""
        operand_plan, like = self.rank_plan.operand_plans[index], self.matrix(self.factors[index])
        rows, columns = operand_plan.shape(interval.lo, interval.hi)
        x = self._oriented(index, like._replace(rows=rows, columns=columns), target)
        line, memory = operand_plan.width * x.itemsize, f"panel {'ab'[index]}"
        self.take(memory, self.rank_plan.schedule[1] * line)
        return self.lay(name, memory, x._replace(address=interval.offset * line))

    def _oriented(self, index: int, like: Matrix, target: Name) -> Matrix:
        orders = ("F", "C") if like.by_columns else ("C", "F")
        shape = like.rows, like.columns
        packed = [Matrix.packed(0, shape, like.dtype, order) for order in orders]
        return next(x for x in packed if self._fits(index, x, target))

    # -- after the product -------------------------------------------------------------------------

    def _finish(self, parts: tuple[Name, ...] | None) -> bool:
        """What follows the products of all ranks, `parts` of this one, None if that is D already;
        whether peers may still read when it is done.
        """
        strategy, reads_peers = self.strategy, bool(self.problem.epilog.makes_bgrad)
        if self.addition_order:
            parts = self._add_by_collective()
        else:
            reads_peers |= strategy.reduces or strategy.moves_result
            if strategy.reduces:
                parts = self._added()
            if strategy.moves_result:
                name = "reduced" if strategy.reduces else "sums"
                self.synchronise(name)
                shape = self.problem.d.local_shape(self.rank)
                parts = self._collected([self.rank_plan.moves(name)], name, shape, "final")
        if parts is not None:
            self._finish_sums(parts)
        if self.problem.epilog.makes_bgrad:
            self._add_gradients()
        if self.wants_amax:
            self.synchronise("amax")
            self._find_greatest()
            reads_peers = True
        return reads_peers

    def _added(self) -> tuple[Name, ...]:
        """The ranks' products of this rank's part, to be added in rank order."""
        shape = self.strategy.reduced.local_shape(self.rank)
        if self.strategy.moves_result:
            self.new("reduced", shape, self.wide, self.order, shared=True)
        self.synchronise("sums")
        parts = self._collected(self.rank_plan.added("sums"), "sums", shape, "pieces")
        if not self.strategy.moves_result:
            return parts
        self.emit(AddUp(parts, "reduced"))
        return ("reduced",)

    def _add_by_collective(self) -> tuple[Name, ...] | None:
        """The sum of all ranks' products by one collective; None where it is D: nothing follows,
        and D lies as the collective writes.
        """
        pattern, out, dtype = self.rank_plan.pattern, self.out, self.rank_plan.parts_dtype
        assert pattern is not None
        shape = out.rows, out.columns
        packed = Matrix.packed(out.address, shape, dtype, self.addition_order)
        is_last = (
            "alpha" in self.placement.ones and not self.addend and not self.problem.epilog.changes_d
        )
        is_last = is_last and (packed == out or (not out.size and out.dtype == dtype))
        counts: tuple[int, ...] = ()
        total = "sums"
        if pattern.kind != "all-reduce":
            width = self.strategy.sums.local_shape(self.rank)[not pattern.transposed]
            counts = tuple(width * lines for lines in pattern.rows)
            total = "total"
        if is_last:
            total = "d"
        elif total == "total":
            self.new("total", shape, dtype, self.addition_order)
        before, self.steps = self.steps, [READ]
        if counts:
            parts = self._collected(self.rank_plan.added("sums"), "sums", shape, "pieces")
        else:
            parts = tuple(f"sums of {rank}" for rank in range(self.problem.size))
            box = (0, out.rows), (0, out.columns)
            self.peers |= {name: Peer("sums", r, dtype, box) for r, name in enumerate(parts)}
        if total == "sums":  # which peers read until all have
            x = self.matrix("sums")
            self.take("added", x.size * x.itemsize)
            self.emit(AddUp(parts, self.lay("added", "added", x)), TAKEN, Convert("added", "sums"))
        else:
            self.emit(AddUp(parts, total), TAKEN)
        self.steps = [*before, Fused(Collective("sums", total, counts), tuple(self.steps))]
        return None if is_last else (total,)

    def _collected(
        self, groups: Sequence[tuple[Move, ...]], name: str, shape: tuple[int, ...], room: str
    ) -> tuple[Name, ...]:
        """What each group of moves brings of the ranks' matrices of that name, as one matrix each.

        What is one dense box is read in place; the rest is gathered in memory `room`.
        """
        if 0 in shape:
            return ()
        dtype, order = self.matrix(self.own(name)).dtype, "C" if name == "vector" else self.order
        rows, columns = shape
        parts, used = [], 0
        for number, moves in enumerate(groups):
            if not moves:
                continue
            piece = f"{room} {number}"
            if _is_whole(moves, shape):
                parts.append(self.read(name, piece, moves[0]))
                continue
            x = Matrix.packed(used, (rows, columns), dtype, order)
            used += x.size * x.itemsize
            parts.append(self.lay(piece, room, x))
            if sum(move.elements for move in moves) < x.size:
                self.emit(Clear(piece))
            self.gather(name, moves, piece)
        if used:
            self.take(room, used)
        return tuple(parts)

    def _finish_sums(self, parts: tuple[Name, ...]) -> None:
        """Add the parts, apply alpha, beta C and the epilog; D is rounded once."""
        epilog, target, unrounded = self.problem.epilog, "d", ""
        shape = self.out.rows, self.out.columns
        if epilog.makes_bgrad and epilog.gradient:
            unrounded = self.new("kept", shape, self.wide, self.order)
        if self.quantizes:
            target = self.new("numbers d", shape, "float32", self.order)
        addend = self._sum_of_c()
        step = AddUp(
            parts,
            target,
            alpha="alpha",
            addend=addend,
            beta="beta" if addend else "",
            epilog=epilog if epilog.changes_d else MatmulEpilog.DEFAULT,
            bias=self._bias if epilog.has_bias else "",
            aux=self._aux(epilog),
            unrounded=unrounded,
            extras=self.problem.extras if self.quantizes else "",
        )
        self.emit(step)
        if self.quantizes:
            amax = "amax" if self.wants_amax else ""
            self.emit(Quantize(target, self.scales_as(3, (1, 1)), "d", amax))

    def _sum_of_c(self) -> Name:
        """C; where each rank has one, their sum."""
        if not self.addend or "own c" not in self.arrays:
            return self.addend
        shape = self.arrays["own c"].shape
        self.new("all c", shape, self.wide, self.order)
        parts = self._collected(self.rank_plan.added("c"), "c", shape, "each c")
        self.emit(AddUp(parts, "all c"))
        return "all c"

    def _add_gradients(self) -> None:
        """Bias gradients: each rank sums what it holds, and all ranks' sums add up."""
        epilog, conjugate = self.problem.epilog, False
        _, held, need = gradient_layouts(self.problem)
        self.new("vector", held.local_shape(self.rank), self.wide, "C", shared=True)
        lines = "kept"
        if not epilog.gradient:
            index = 0 if epilog is MatmulEpilog.BGRADA else 1
            lines, conjugate = self.factors[index], self.problem.conjugate[index]
        self.emit(SumLines(lines, "vector", epilog is MatmulEpilog.BGRADB, conjugate))
        self.synchronise("vector")
        assert epilog.makes_bgrad is not None
        shape = need.local_shape(self.rank)
        parts = self._collected(self.rank_plan.added("vector"), "vector", shape, "vectors")
        self.emit(AddUp(parts, output(epilog.makes_bgrad)))

    # -- eight-bit results -------------------------------------------------------------------------

    def _find_greatest(self) -> None:
        """The greatest of all ranks' values."""
        parts = [
            self.read("amax", f"amax of {move.src}, {word}", move, ((0, 1), (word, word + 1)))
            for move in self.rank_plan.moves("amax")
            for word in range(self.words)
        ]
        self.emit(Greatest(tuple(parts), output("result_amax")))


class ScaledLowering(Lowering):
    """Lowers a product of float8 operands, which are multiplied as they are, with their scales.

    cuBLASLt wants both operands along k, and all at multiples of 16 bytes. What lies so is used in
    place; the rest comes, or is copied, into memory that is padded along k with zeros. A result
    that does not suit is computed in padded memory too, whose last lines nobody reads. Scales
    travel as the elements do, and are laid out for each interval of k as its product wants them.

    Lines of an operand that all ranks need are sent to all, beside the products of those that are
    here: see `rounds`. Every rank has room for them and their scales, where peers write. A barrier
    before says that nobody reads what was there, one behind a round that its lines have come.
    Copies are one behind the other on a stream of their own, and the barriers on yet another:
    neither waits for a product, nor a copy for a barrier.
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
        """Whether products give D itself: nothing follows that cuBLASLt could not do."""
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
        """Whether products are written to D itself, and nothing follows them."""
        return self._gives_result and self._is_direct

    @cached_property
    def _is_direct(self) -> bool:
        """Whether products are written to the target where it lies."""
        if self._target == "d" and not self._gives_result:
            return False
        blocks = bool({"vectors", "squares"} & set(self.rank_plan.modes))
        return scaled.takes_result(self.matrix(self._target), blocks=blocks)

    @cached_property
    def _product(self) -> Matrix:
        """The target of the products, or memory that is padded for one that cannot take them:
        float32, in the order of D.
        """
        target = self.matrix(self._target)
        if self._is_direct:
            return target
        rows, columns = up(target.rows, GRAIN), up(target.columns, GRAIN)
        return Matrix.packed(0, (rows, columns), "float32", self.order)

    def _lines(self, index: int) -> int:
        """Rows of op(A), columns of op(B), in the memory of an operand."""
        return (self._product.rows, self._product.columns)[index]

    # -- begin -------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Publish this rank's scales; in rounds, send lines to those who multiply them."""
        self._publish_scales()
        rounds = self.rank_plan.rounds
        if rounds is None:
            return
        self._prepare_lines(rounds)
        self._send_lines(rounds)
        if not self.rank_plan.multiplies:
            self._await_round(rounds.count)

    def _multiply(self) -> tuple[Name, ...] | None:
        target, ends = self._target, self._ends
        if not self._is_direct:
            self.take("product", 4 * self._product.size)
            target = self.lay("product", "product", self._product)
        quantized = None
        if ends and self.quantizes:
            quantized = self._scale_of_result(), "amax" if self._scaling.amax else ""
        if self.rank_plan.rounds is None:
            self._multiply_into(target, ends=ends, quantized=quantized)
        else:
            self._multiply_lines(self.rank_plan.rounds, target, quantized)
        if self._is_direct:
            return None if ends else (target,)
        wanted = self.matrix(self._target)
        part = self.part("wanted product", target, (0, wanted.rows), (0, wanted.columns))
        if self._target == "d":
            return (part,)
        self.emit(AddUp((part,), self._target))
        return (self._target,)

    def _scale_of_result(self) -> Name:
        """An array of the scale of an eight-bit D; "" where it is 1."""
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

    def _multiply_lines(
        self, rounds: Rounds, target: Name, quantized: tuple[Name, Name] | None
    ) -> None:
        """Products of the lines that have come, beside the rounds that bring others."""
        index, addend = rounds.index, self.addend if self._ends else ""
        other, scale = self._dense(1 - index, target), self._lay_out(1 - index)[0]
        assert other, "one operand is exchanged, the other is here"
        stages = rounds.stages(self.rank)
        if not rounds.cuts:
            stages = [Stage(0, 0, self._lines(index))]  # with lines that pad it
        for number, stage in enumerate(stages):
            self._await_round(stage.round)
            is_own = bool(rounds.cuts) and not stage.round
            lines = self._sent if is_own else self._received_lines(index, stage)
            is_known = is_own or self.rank_plan.modes[index] == "tensor"
            laid = self._lay_out(index)[0] if is_known else self._received_scale(index, stage)
            words = quantized
            if quantized is not None and quantized[1]:
                word = self.part(f"amax {number}", "amax", (0, 1), (number, number + 1))
                words = quantized[0], word
            self._gemm(
                (lines, other) if index == 0 else (other, lines),
                self._of_lines(target, index, stage),
                self._of_lines(addend, index, stage) if addend else "",
                ends=self._ends,
                scales=(laid, scale) if index == 0 else (scale, laid),
                quantized=words,
                spare=_SPARE_PROCESSORS if stage.round < rounds.count else 0,
            )
        self._await_round(rounds.count)

    def _of_lines(self, name: Name, index: int, stage: Stage) -> Name:
        """The part of a product's matrix that a stage's lines of an operand make."""
        x, part = self.matrix(name), f"{name}, lines from {stage.lo}"
        if index == 0:
            return self.part(part, name, (stage.lo, stage.hi), (0, x.columns))
        return self.part(part, name, (0, x.rows), (stage.lo, stage.hi))

    # -- operands ----------------------------------------------------------------------------------

    def _columns(self, index: int, x: Matrix) -> Matrix:
        """An operand with its lines as columns; or, of that, the operand."""
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
        """Copy this rank's own elements of an operand, which `moves` say, to the target."""
        moves = tuple(move for move in moves if move.elements)
        if moves:
            factor = self.factors[index]
            taken = SomeMoves(moves, self.matrix(factor).itemsize)
            self.emit(MoveStep(taken, factor, target))

    def _padded(
        self, index: int, name: Name, memory: str, start: int, k: int, width: int, lines: int
    ) -> Name:
        """The part of an operand, laid out along k in memory, that is to be filled: zeros are put
        behind each of its lines. `name` is all of it.
        """
        deep = up(k, GRAIN)
        x = Matrix(start, deep, lines, 1, deep, self._scaling.given[index])
        self.lay(name, memory, self._columns(index, x))
        if k < deep and width:
            behind = x.part((k, deep), (0, width))
            self.emit(Clear(self.lay(f"behind {name}", memory, behind)))
        part = x.part((0, k), (0, width))
        return self.lay(f"filled {name}", memory, self._columns(index, part))

    # -- scales ------------------------------------------------------------------------------------

    def _publish_scales(self) -> None:
        """Put this rank's scales where peers read them, before the barrier that lets them."""
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

    def _stays(self, index: int) -> bool:
        """Whether no rank reads another's scales of an operand from where they are published."""
        moves = self.rank_plan.scale_moves[index]
        rounds = self.rank_plan.rounds
        return moves is None or moves.stay or (rounds is not None and rounds.index == index)

    def _given_scales(self, index: int, moves: ScaleMoves) -> Name:
        """This rank's scales of an operand, lines first."""
        x, name = self.matrix("ab"[index]), f"given scales {'ab'[index]}"
        lines, k = (x.rows, x.columns) if index == 0 else (x.columns, x.rows)
        shape = moves.given.shape(lines, k)
        given = self.scales_as(index, shape if index == 0 else shape[::-1])
        matrix = self.matrix(given)
        return self.lay(name, given, matrix if index == 0 else matrix.transposed())

    def _source(self, index: int) -> tuple[Name, Blocks]:
        """What the scales that this rank needs of an operand are made from, when they have come: a
        matrix, lines first, in which one is for each of the blocks; "" where all are 1.
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

    def _lay_out(self, index: int) -> list[ScaleOf]:
        """The scales of each interval, where its product reads them; of lines that are exchanged,
        those of this rank's own.
        """
        lines, known = self._lines(index), self.rank_plan.operand_plans[index].width
        rounds = self.rank_plan.rounds
        if rounds is not None and rounds.index == index:
            lines = known = rounds.lines[self.rank]
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
                target = array  # where they lie already
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

    # -- lines that all ranks need -----------------------------------------------------------------

    def _prepare_lines(self, rounds: Rounds) -> None:
        """Room for all lines and their scales, where peers write; and this rank's own lines without
        gaps, as they are sent and multiplied.
        """
        index = rounds.index
        lines = self._lines(index) if self.rank_plan.multiplies else rounds.starts[-1]
        dtype, mode = self._scaling.given[index], self.rank_plan.modes[index]
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

    @property
    def _deep(self) -> int:
        """Elements of a line in memory, with those that pad it."""
        return up(self.k, GRAIN)

    def _send_lines(self, rounds: Rounds) -> None:
        """Send this rank's lines and their scales to all ranks."""
        ranks = range(len(rounds.lines))
        places = [self._place(rounds, rank) for rank in ranks]
        if not rounds.cuts:
            self.emit(TAKEN)
            self._send_scales(rounds, ranks)
            self.emit(Push(self._sent, tuple(places)), READ)
            return
        self.follow("side", "", "begun")
        self.emit(TAKEN, stream="side")
        self.follow("copies", "side", "free")
        self._send_scales(rounds, [rank for rank in ranks if rank != self.rank], stream="side")
        for number in range(1, rounds.count + 1):
            to = places[rounds.target(self.rank, number)]
            if self.matrix(self._sent).size:
                self.emit(Convert(self._columns_of_sent(rounds.index), to), stream="copies")
            if number in rounds.cuts:
                self.follow("side", "copies", f"sent {number}")
                self.emit(READ, Record(f"come {number}"), stream="side")

    def _columns_of_sent(self, index: int) -> Name:
        """The lines that are sent, as columns."""
        view = self.arrays[self._sent]
        return self.lay("sent lines", view.memory, self._columns(index, view.matrix))

    def _await_round(self, number: int) -> None:
        """Make the products' stream wait for the lines of that round; 0 is no round."""
        if number:
            self.emit(Await(f"come {number}"))

    def _place(self, rounds: Rounds, rank: int) -> Name:
        """The place of this rank's lines in the memory of another."""
        lines = rounds.starts[self.rank], rounds.starts[self.rank + 1]
        name, box = f"lines at {rank}", ((0, self._deep), lines)
        dtype = self._scaling.given[rounds.index]
        self.peers[name] = Peer(_LINES, rank, dtype, box)
        return name

    def _received_lines(self, index: int, stage: Stage) -> Name:
        """The lines of a stage, which have come."""
        x, name = self.matrix(_LINES), f"lines from {stage.lo}"
        part = x.part((0, x.rows), (stage.lo, stage.hi))
        return self.lay(name, _LINES, self._columns(index, part))

    def _received_scale(self, index: int, stage: Stage) -> ScaleOf:
        """The scales of a stage's lines, which have come; all ranks know those of tensors."""
        mode, name = self.rank_plan.modes[index], f"line scales from {stage.lo}"
        layout = scale_layout(mode, stage.hi - stage.lo, self.k)
        x = layout._replace(address=4 * self._offset(index, stage.lo))
        return ScaleOf(mode, self.lay(name, _LINE_SCALES, x))

    def _offset(self, index: int, line: int) -> int:
        """The first element of the scales of a stage that begins with this line."""
        mode = self.rank_plan.modes[index]
        if mode == "outer":
            return line
        layout = scale_layout(mode, BLOCK, self.k)
        return line * layout.columns if mode == "vectors" else line // BLOCK * layout.row_stride

    def _send_scales(self, rounds: Rounds, ranks: Sequence[int], *, stream: str = "") -> None:
        """Send this rank's own scales of the lines to these ranks, laid out for their products."""
        index = rounds.index
        mode, lines = self.rank_plan.modes[index], rounds.lines[self.rank]
        if mode == "tensor" or not lines or not ranks:
            return
        layout = scale_layout(mode, lines, self.k)
        rows = lines if mode == "outer" else layout.rows
        columns = min(layout.columns, -(-self.k // BLOCK))
        (source, blocks), targets = self._source(index), []
        for rank in ranks:
            place = f"line scales at {rank}"
            self.peers[place] = self._scales_place(rounds, rank, rows, columns)
            targets.append(place)
        blocks = blocks_in_layout(mode, blocks)
        self.emit(LayOut(source, SCALES[index], blocks, tuple(targets), rows), stream=stream)

    def _scales_place(self, rounds: Rounds, rank: int, rows: int, columns: int) -> Peer:
        """The place of the scales of this rank's lines at another, within those of their stage."""
        index, first = rounds.index, rounds.starts[self.rank]
        if self.rank_plan.modes[index] == "squares":
            layout = scale_layout("squares", BLOCK, self.k)
            parcel = 4 * self._offset(index, first), (4 * layout.row_stride, 4)
            return Peer(_LINE_SCALES, rank, "float32", ((0, rows), (0, columns)), parcel)
        if not rounds.cuts:
            return Peer(_LINE_SCALES, rank, "float32", ((first, first + rows), (0, columns)))
        stage = next(x for x in rounds.stages(rank) if x.lo <= first < x.hi)
        start = self._offset(index, stage.lo) + first - stage.lo
        parcel = 4 * start, (4, 4 * (stage.hi - stage.lo))  # stages lie one behind the other
        return Peer(_LINE_SCALES, rank, "float32", ((0, rows), (0, columns)), parcel)


def _is_whole(moves: Sequence[Move], shape: tuple[int, ...]) -> bool:
    """Whether moves are one dense box that covers the destination."""
    if len(moves) != 1 or moves[0].shape != shape:
        return False
    return all(run.count == 1 for run in moves[0].runs)
