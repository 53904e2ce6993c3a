"""The columns of a square matrix, dealt to the ranks in blocks; programs that go panel by panel.

    columns   0   1   2   3   4        rank 0 has 0, 2, 4, rank 1 has 1, 3; each all rows of these.
    rank      0   1   0   1   0        A diagonal block and all below it is a panel.

One rank has a whole panel: it searches pivots and divides without the others, and hands the result
to all. With blocks in two dimensions, the ranks of a panel would have to meet for each column. Each
rank reads each panel of the others once, for LU n^2/2 (1 - 1/P) elements in all, and for Cholesky's
factor only the rows from its own next block on; docs/linear-algebra.md says how many fewer elements
two dimensions would need.

Look-ahead: the rank that has the next panel brings that up to date and factorises it first, and
arrives (`Arrive`) before it does the rest. The others arrive as soon as they have read the last
panel. So a panel is there when those that need it are done with the last:

    owner of k+1   read k ─ subtract from k+1 ─ factorise k+1 ─ arrive ─ subtract from the rest ─┐
    others         read k ─ arrive ─ subtract from the rest ───────────────────────────── read k+1

Source: Dongarra, van de Geijn, Walker, "Scalability issues affecting the design of a dense linear
algebra library", J. Parallel Distrib. Comput. 22 (1994); Kurzak, Dongarra, "Implementing linear
algebra routines on multi-core processors with pipelining and a look ahead", PARA 2006.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardmath.factorisations.blocks import Blocks, LowerTriangle, Rows
from shardmath.factorisations.problem import Problem
from shardmath.factorisations.steps import (
    GOOD,
    NOT_FINITE_A,
    NOT_FINITE_B,
    CheckFinite,
    Clear,
    Cut,
    Fill,
    Substitute,
    Subtract,
)
from shardmath.geometry import Layout
from shardmath.local.lapack import Op, Precision
from shardmath.local.reduction import Reduction
from shardmath.program.steps import (
    READ,
    TAKEN,
    Arrive,
    Combine,
    LocalArray,
    Move,
    Program,
    SplitArray,
    Step,
)
from shardmath.redistribution import Transfer, TransferPlan

STATUS = "status"


class PanelSteps:
    """Puts one rank's steps together: those of the columns of `a` and of right-hand sides `b`.

    A subclass for each factorisation says how a panel is factorised, and what it does to the
    columns behind. `precision` is that of the products that bring columns up to date.
    """

    is_lower = False  # whether all is computed in the lower triangle, which alone is there

    def __init__(
        self, problem: Problem, width: int, rank: int, *, precision: Precision = "full"
    ) -> None:
        self.problem, self.rank, self.precision = problem, rank, precision
        size = problem.a.size
        self.blocks = Blocks(problem.n, width, size)
        one = Layout.replicated((1,), size)
        self.steps: list[Step] = [READ, Fill(STATUS, GOOD)]
        self.workspace = {STATUS: SplitArray(one, "int64", "F")}
        self._one = one
        self.right = Cut("rhs", (0, 0), (0, 0))
        self._solving = [False] * size  # which ranks have right-hand sides

    # -- what is brought here, and results ---------------------------------------------------------

    def bring_columns(self, source: Layout) -> None:
        """Bring this rank's columns of matrix "a"."""
        problem, blocks = self.problem, self.blocks
        self.workspace["columns"] = SplitArray(blocks.layout, problem.dtype, "F")
        plan: Transfer = TransferPlan(source, blocks.layout, problem.itemsize)
        if self.is_lower:
            plan = LowerTriangle(blocks, source, problem.itemsize)
        self.steps.append(Move(plan, "a", "columns"))
        self.check_finite("a" if self.is_lower else "columns", NOT_FINITE_A)

    def check_finite(self, buffer: str, code: int) -> None:
        """Note `code` where an element of a buffer is NaN or infinite, if the caller wants that."""
        if self.problem.check_finite:
            self.steps.append(CheckFinite(buffer, STATUS, code))

    def bring_right_sides(self, shape: tuple[int, ...]) -> None:
        """Make room for right-hand sides of that shape, split evenly over the ranks."""
        size = self.blocks.size
        if len(shape) == 1:
            layout = Layout.on_one_rank(shape, size, rank=0)
        else:
            layout = Layout.slab(shape, size, axis=1)
        self.workspace["rhs"] = SplitArray(layout, self.problem.dtype, "F")
        widths = [(*layout.local_shape(rank), 1)[1] for rank in range(size)]
        heights = [layout.local_shape(rank)[0] for rank in range(size)]
        self._solving = [bool(w and h) for w, h in zip(widths, heights, strict=True)]
        self.right = Cut("rhs", (0, heights[self.rank]), (0, widths[self.rank]))

    def move_right_sides(self) -> None:
        """Bring this rank's part of the right-hand sides "b"."""
        b = self.problem.b
        assert b is not None, "there are some"
        self.bring_right_sides(b.global_shape)
        plan = TransferPlan(b, self.workspace["rhs"].layout, self.problem.itemsize)
        self.steps.append(Move(plan, "b", "rhs"))
        self.check_finite("rhs", NOT_FINITE_B)

    def program(
        self,
        moves: Sequence[tuple[str, str, Layout]],
        transposed: tuple[str, ...] = (),
        vectors: dict[str, tuple[str, str]] | None = None,
    ) -> Program:
        """The whole program. At its end `moves`, which are (buffer, result, layout), bring matrices
        to the caller. `vectors` are results that every rank gets whole, with their (buffer, dtype).
        Arrays in `transposed` are seen transposed, also in these layouts.
        """
        problem = self.problem
        results: dict[str, SplitArray | LocalArray] = {}
        self.steps.append(READ)
        for source, target, layout in moves:
            if source == "columns" and self.is_lower:
                plan: Transfer = LowerTriangle(self.blocks, layout, problem.itemsize, returns=True)
                self.steps.append(Clear(target))
            else:
                plan = TransferPlan(self.workspace[source].layout, layout, problem.itemsize)
            self.steps.append(Move(plan, source, target))
            results[target] = SplitArray(problem.result, problem.dtype, problem.order)
        for target, (source, dtype) in (vectors or {}).items():
            held = self.workspace[source].layout
            whole = Layout.replicated(held.global_shape, held.size)
            itemsize = 4 if dtype == "int32" else problem.itemsize
            self.steps.append(Move(TransferPlan(held, whole, itemsize), source, target))
            results[target] = LocalArray(held.global_shape, dtype)
        least = Reduction.of("min", "int64")
        self.steps.append(Combine(self._one, self._one, STATUS, "fault", reduction=least))
        results["fault"] = LocalArray((1,), "int64")
        self.steps.append(TAKEN)
        return Program(tuple(self.steps), results, self.workspace, transposed=transposed)

    # -- panels ------------------------------------------------------------------------------------

    def factorise(self, *, solves: bool = False) -> None:
        """Add the steps that leave the factors in "columns", with look-ahead: see the top of this
        module. With `solves`, also those that solve with the lower factor, as its panels come.
        """
        blocks = self.blocks
        last = blocks.count if solves else blocks.count - 1
        if blocks.count and blocks.owner(0) == self.rank:
            self.factorise_panel(0)
        for k in range(last):
            self.steps.append(READ)
            self.bring_panel(k)
            behind = k + 1
            if behind < blocks.count and blocks.owner(behind) == self.rank:
                self.update(k, behind, behind + 1)
                self.factorise_panel(behind)
                behind += 1
            if k + 1 < last:
                self.steps.append(Arrive())
            self.update(k, behind, blocks.count)
            if not self.right.is_empty:
                self.update_right_sides(k)

    def factorise_panel(self, k: int) -> None:
        """Factorise panel `k`, which this rank has."""
        raise NotImplementedError

    def update(self, k: int, first: int, last: int) -> None:
        """Apply panel `k` to this rank's columns of blocks `first` to before `last`."""
        raise NotImplementedError

    def update_right_sides(self, k: int) -> None:
        """Apply panel `k` to the right-hand sides: solve for its unknowns."""
        raise NotImplementedError

    def own(self, k: int, rows: Rows) -> Cut:
        """These rows of block `k`, on the rank that has it."""
        return Cut("columns", rows, self.blocks.place(k))

    def bring_panel(self, k: int) -> None:
        """Let `panel` be block `k` where this rank can read it, its own or a copy, from row `top`
        of the matrix on: that of its diagonal.

        Ranks that have neither columns behind it nor right-hand sides read nothing. A rank without
        right-hand sides whose matrix `is_lower` reads those from its next diagonal block on.
        """
        blocks = self.blocks
        lo, _ = blocks.bounds(k)
        rows: list[Rows | None] = []
        for rank, solves in enumerate(self._solving):
            behind = next((j for j in blocks.owned(rank) if j > k), None)
            if rank == blocks.owner(k) or (behind is None and not solves):
                rows.append(None)
            elif self.is_lower and behind is not None and not solves:
                rows.append((blocks.bounds(behind)[0], blocks.n))
            else:
                rows.append((lo, blocks.n))
        self.panel = self._read(f"panel {k}", "columns", blocks.layout, k, rows)
        self.top = (rows[self.rank] or (lo, blocks.n))[0]
        if blocks.owner(k) == self.rank:
            self.panel = self.own(k, (lo, blocks.n))

    def panel_rows(self, lo: int, hi: int) -> Cut:
        """Rows `lo` to `hi` of the matrix, of the panel that is here."""
        return self.panel.of_rows(lo - self.top, hi - self.top)

    def _read(
        self, name: str, source: str, held: Layout, k: int, rows: Sequence[Rows | None]
    ) -> Cut:
        """Copy rows of block `k` of a buffer to those ranks that read them."""
        lo, hi = self.blocks.bounds(k)
        layout = self.blocks.read(k, rows)
        self.workspace[name] = SplitArray(layout, self.problem.dtype, "F", memory="panel")
        self.steps.append(Move(TransferPlan(held, layout, self.problem.itemsize), source, name))
        return Cut(name, (0, layout.local_shape(self.rank)[0]), (0, hi - lo))

    # -- right-hand sides --------------------------------------------------------------------------

    def substitute(
        self,
        source: str,
        held: Layout,
        *,
        lower: bool,
        op: Op = "N",
        unit: bool = False,
        notes: bool = False,
    ) -> None:
        """Solve op(T) X = B, in place of B, where T is a triangle of buffer `source`, which is
        split as `held`. With `notes` a 0 on its diagonal is noted.

        Each rank reads T once, block by block, and solves for its own right-hand sides.
        """
        blocks = self.blocks
        numbers = range(blocks.count)
        for k in numbers if lower == (op == "N") else reversed(numbers):
            lo, hi = blocks.bounds(k)
            rows = (lo, blocks.n) if lower else (0, hi)
            mine = source == "columns" and blocks.owner(k) == self.rank
            copies = [
                rows if solves and not (source == "columns" and blocks.owner(k) == rank) else None
                for rank, solves in enumerate(self._solving)
            ]
            part = self._read(f"{op} {source} {lower} {k}", source, held, k, copies)
            if self.right.is_empty:
                continue
            if mine:
                part = self.own(k, rows)
            here = self.right.of_rows(lo, hi)
            if lower:
                triangle, beside = part.of_rows(0, hi - lo), part.of_rows(hi - lo, blocks.n - lo)
                others = self.right.of_rows(hi, blocks.n)
            else:
                triangle, beside = part.of_rows(lo, hi), part.of_rows(0, lo)
                others = self.right.of_rows(0, lo)
            solve = Substitute(triangle, here, lower, op, unit, STATUS if notes else "", lo)
            if op == "N":
                self.steps += [solve, Subtract(others, beside, here)]
            else:
                self.steps += [Subtract(here, beside, others, (op, "N")), solve]
