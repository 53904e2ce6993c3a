"""The phases of a product on one rank's GPU, as steps over named matrices. Pure.

    publish a, b ── synchronise ── gather, multiply ──► "sums" ── synchronise ── add up ──► d

The steps follow from the rank plan and from how the arrays lie, and serve all executions that are
alike in this. Products never read a peer's memory: what lies there is gathered first, on a second
stream while the last panel is multiplied. Sums of several ranks are added in rank order, so that
the bits are the same every time. Between hosts each rank packs what its peers take, and they fetch
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardmath.arrays.dtypes import FLOAT8
from shardmath.geometry import Move
from shardmath.local.epilog import MatmulEpilog
from shardmath.local.gpu import Matrix
from shardmath.local.gpu.fused_epilog import fused_epilog, split
from shardmath.local.gpu.gemm import fits, takes_result
from shardmath.operators.matmul.gpu.builder import ProgramBuilder
from shardmath.operators.matmul.gpu.panel_schedule import TILINGS
from shardmath.operators.matmul.gpu.panels import Interval
from shardmath.operators.matmul.gpu.steps import (
    AddUp,
    Clear,
    Collective,
    EpilogProduct,
    Gemm,
    Greatest,
    Name,
    OneKernel,
    PanelProduct,
    ScaleOf,
)
from shardmath.operators.matmul.problem import gradient_layouts
from shardmath.operators.matmul.program import output
from shardmath.operators.matmul.scaling import TENSOR, blocks_of
from shardmath.program.rank_program import Peer, RankProgram, View
from shardmath.program.steps import (
    READ,
    TAKEN,
    Await,
    Convert,
    Dequantize,
    Fused,
    Quantize,
    Record,
    SumLines,
)


class ProductLowering(ProgramBuilder):
    """Lowers a product of numbers. Eight-bit elements become numbers first."""

    def program(self) -> RankProgram:
        """The whole program."""
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
                self.emit(AddUp((), self.sums))  # zeros, which peers add
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
        """Make numbers of eight-bit operands, unless these are multiplied as they are."""
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
        self.new(numbers, self.arrays[name].shape, "float32", "F" if x.by_columns else "C")
        self.take(numbers, 0, shared=index < 2 and not self.rank_plan.multi_host)
        blocks = blocks_of(granularity, index if index < 2 else 0)
        self.emit(Dequantize(name, self.scales_as(index, blocks.shape(x.rows, x.columns)), blocks,
                             numbers))  # fmt: skip
        return numbers

    def _publish_factor(self, index: int) -> None:
        """Let peers read op(A), index 0, or op(B): in place if it is on the heap, else a copy of
        the part that they read.
        """
        name, factor = "ab"[index], self.factors[index]
        read = self.strategy.transfers[index].read_by_peers(self.rank)
        if read is None:
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
        self.share(name, View.of(copy, x.part((-top, 0), (-left, 0))))  # as if it were all
        self.emit(Convert(part, copy))

    def _publish_c(self) -> bool:
        """Copy C to where peers read it, if each rank has its own C. Returns whether it has."""
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
        """Add this rank's product. Returns the parts that are still to be finished, None if D is
        there.
        """
        target, epilog = self.sums, self.problem.epilog
        writes_d = not target and self._can_write_d()
        in_panels = self._may_come_in_panels()
        if not (target or (writes_d and not epilog.changes_d)):
            target = self.new("product", self.arrays["d"].shape, self.wide, self.order)
            writes_d = writes_d and self._does_epilog()
        plan: EpilogProduct | PanelProduct | None = PanelProduct() if in_panels else None
        if writes_d and epilog.changes_d:  # in the product, where there is an algorithm
            with self.apart() as steps:
                first, rest = split(epilog, self.out.dtype)
                self._multiply_into("d", ends=True, epilog=first)
                if rest is not MatmulEpilog.DEFAULT:
                    self.emit(AddUp(("d",), "d", epilog=rest, aux=self._aux(rest)))
            plan = EpilogProduct(tuple(steps))
        with self.apart() as steps:
            self._multiply_into(target or "d", ends=not target)
            if plan is not None and target:
                self._finish_sums((target,))
        self.emit(*(steps if plan is None else [Fused(plan, tuple(steps))]))
        return None if plan is not None or not target else (target,)

    def _may_come_in_panels(self) -> bool:
        """Whether the kernel that multiplies panels as they come can do this product: it writes D,
        in the operands' type, and has no epilog, no alpha and no C.
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
        """Whether a product can write D, provided that it can do the epilog."""
        several = len(self.intervals) > 1
        return not (
            self.problem.sums_c
            or "alpha" in self.placement.zeros  # BLAS would skip the product, and lose its NaN
            or not takes_result(self.out)
            or ((several or self.problem.scaling is not None) and self.out.dtype != self.wide)
            or (self.addend and not self._takes_c(self.matrix(self.addend)))
        )

    def _takes_c(self, c: Matrix) -> bool:
        if c.dtype != self.out.dtype:
            return False
        if self.out.leading is None:
            c = c.transposed()
        return c.leading is not None

    def _does_epilog(self) -> bool:
        """Whether a product may do the epilog's first part, if there is an algorithm."""
        first, _ = split(self.problem.epilog, self.out.dtype)
        aux, bias = self._aux(first), self._bias
        fused = fused_epilog(
            first,
            self.out,
            bias=(self.matrix(bias).address, self.matrix(bias).row_stride) if bias else None,
            aux=self.matrix(aux) if aux else None,
        )
        wider = self.problem.result != self.problem.dtype  # no algorithm was seen that adds a bias
        return fused is not None and not wider and len(self.intervals) == 1

    def _aux(self, epilog: MatmulEpilog) -> Name:
        """The auxiliary matrix that an epilog reads or makes, if any."""
        if epilog.needs_aux:
            return epilog.needs_aux
        return output(epilog.makes_aux) if epilog.makes_aux else ""

    @property
    def _bias(self) -> Name:
        return "bias" if "bias" in self.arrays else ""

    def _multiply_into(self, target: Name, *, ends: bool, **how: Any) -> None:
        """Multiply one interval of k after the other, and add the products. With `ends` the sum is
        D. `how` goes to `_gemm`.
        """
        overlaps = len(self.intervals) > 1
        scales = self._scales()
        dense = [self._dense(index, target) for index in (0, 1)]
        beside = "side" if overlaps else ""
        if overlaps:
            self.follow(beside, "", "fork")
        for number, interval in enumerate(self.intervals):
            names = f"a {number}", f"b {number}"
            if overlaps and interval.after is not None:  # these panels reuse its memory
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
            self._gemm(names, target, addend, ends=ends, scales=scales[number], **how)
            if overlaps:
                self.emit(Record(f"used {number}"))

    def _gemm(
        self,
        factors: tuple[Name, Name],
        target: Name,
        addend: Name,
        *,
        ends: bool,
        epilog: MatmulEpilog = MatmulEpilog.DEFAULT,
        **how: Any,
    ) -> None:
        """Multiply two factors into the target, and add the `addend`: the target itself, or C."""
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

    # -- what a product of float8 elements overrides -----------------------------------------------

    @property
    def _scale_numbers(self) -> tuple[str, ...]:
        """The names of scales that are multiplied to alpha."""
        return ()

    def _begin(self) -> None:
        """Publish more than the operands."""

    def _scales(self) -> list[tuple[ScaleOf, ScaleOf] | None]:
        """The scales of each interval's factors."""
        return [None] * len(self.intervals)

    def _end(self, index: int, interval: Interval, held: Matrix) -> int:
        """The end of an interval of k in an operand that this rank holds, with its padding."""
        return interval.hi

    # -- factors -----------------------------------------------------------------------------------

    def _dense(self, index: int, target: Name) -> Name:
        """An operand that needs no gathering, in a form that BLAS takes; else ""."""
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
        """Memory for an interval of an operand, in the operand's order if BLAS takes that."""
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
        """Add what follows the product, whose `parts` this rank has, None if D is there. Whether
        peers may still read this rank's memory after that.
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
        """The ranks' products for this rank's part of the sums, to be added in this order."""
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
        """The sum of all ranks' products, by one collective; None where that is D, since nothing
        follows and D lies as the collective writes.
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
        with self.apart() as steps:
            self.emit(READ)
            if counts:
                parts = self._collected(self.rank_plan.added("sums"), "sums", shape, "pieces")
            else:
                parts = tuple(f"sums of {rank}" for rank in range(self.problem.size))
                box = (0, out.rows), (0, out.columns)
                self.peers |= {name: Peer("sums", r, dtype, box) for r, name in enumerate(parts)}
            if total == "sums":  # peers read these until all are done
                x = self.matrix("sums")
                self.take("added", x.size * x.itemsize)
                added = self.lay("added", "added", x)
                self.emit(AddUp(parts, added), TAKEN, Convert(added, "sums"))
            else:
                self.emit(AddUp(parts, total), TAKEN)
        self.emit(Fused(Collective("sums", total, counts), tuple(steps)))
        return None if is_last else (total,)

    def _collected(
        self, groups: Sequence[tuple[Move, ...]], name: str, shape: tuple[int, ...], room: str
    ) -> tuple[Name, ...]:
        """One matrix for each group of moves, with what these bring of the ranks' matrices of that
        name. A group of one dense box is read in place; others are gathered in memory `room`.
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

    def _added_up(self, name: str, shape: tuple[int, ...], room: str, target: Name) -> Name:
        """The target, to which this adds up the ranks' matrices of that name: see `_collected`."""
        parts = self._collected(self.rank_plan.added(name), name, shape, room)
        self.emit(AddUp(parts, target))
        return target

    def _sum_of_c(self) -> Name:
        """The addend: C, or the sum of the ranks' own."""
        if not self.addend or "own c" not in self.arrays:
            return self.addend
        shape = self.arrays["own c"].shape
        self.new("all c", shape, self.wide, self.order)
        return self._added_up("c", shape, "each c", "all c")

    def _add_gradients(self) -> None:
        """Add the gradient of a bias: each rank sums its own elements, then all ranks' sums."""
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
        self._added_up("vector", need.local_shape(self.rank), "vectors", output(epilog.makes_bgrad))

    # -- eight-bit results -------------------------------------------------------------------------

    def _find_greatest(self) -> None:
        """Add the greatest of all ranks' absolute values."""
        parts = [
            self.read("amax", f"amax of {move.src}, {word}", move, ((0, 1), (word, word + 1)))
            for move in self.rank_plan.moves("amax")
            for word in range(self.words)
        ]
        self.emit(Greatest(tuple(parts), output("result_amax")))


def _is_whole(moves: Sequence[Move], shape: tuple[int, ...]) -> bool:
    """Whether the moves are one dense box, which covers a destination of this shape."""
    if len(moves) != 1 or moves[0].shape != shape:
        return False
    return all(run.count == 1 for run in moves[0].runs)
