"""A = P L U with partial pivoting, and what follows from it: solutions, inverse, determinant.

A rank has a whole panel, so it searches all rows for each pivot by itself. There is no tournament:
pivots, the growth of elements and the error are those of LAPACK. Exchanges go with the panel to the
other ranks, which make them in their own columns; those in columns before are made at the end.

    panel k   factorise ─┬─ read by all, with its pivots
    behind k             exchange rows ─ solve by L of the diagonal block ─ subtract L U

2/3 n^3 operations. Source: Golub, Van Loan, Matrix Computations, 4th edition, 3.4; Higham, Accuracy
and Stability of Numerical Algorithms, 2nd edition, chapter 9. Pivots that are searched over several
ranks meet for each column, or are chosen by a tournament, of a weaker bound: Grigori, Demmel,
Xiang, "CALU", SIAM J. Matrix Anal. Appl. 32 (2011).
"""

from __future__ import annotations

from shardmath.factorisations.operation import Factorisation
from shardmath.factorisations.panels import STATUS, PanelSteps
from shardmath.factorisations.steps import (
    NOT_FINITE_A,
    CopyDiagonal,
    Cut,
    ExchangeRows,
    FactoriseLU,
    SetIdentity,
    Substitute,
    Subtract,
)
from shardmath.geometry import Layout, Spans
from shardmath.local.lapack import PRECISIONS, Op
from shardmath.program.performing import Names
from shardmath.program.steps import READ, Move, Program, SplitArray
from shardmath.redistribution import TransferPlan

_PIVOTS = "exchanges"
_ITEMSIZE = 4  # of a pivot


class LUSteps(PanelSteps):
    """The steps of one rank that make L and U, and leave the rows that were exchanged with those of
    its columns in "exchanges". Rows are not exchanged in columns before a panel.
    """

    def factorise(self, *, solves: bool = False) -> None:
        self.workspace[_PIVOTS] = SplitArray(self.blocks.vector, "int32")
        super().factorise(solves=solves)

    def factorise_panel(self, k: int) -> None:
        lo, _ = self.blocks.bounds(k)
        panel, place = self.own(k, (lo, self.blocks.n)), self.blocks.place(k)
        self.steps.append(FactoriseLU(panel, _PIVOTS, place, STATUS, lo))

    def bring_panel(self, k: int) -> None:
        super().bring_panel(k)
        blocks = self.blocks
        here = Spans.interval(*blocks.bounds(k))
        layout = Layout.product((blocks.n,), [[here] * blocks.size], size=blocks.size)
        self.pivots = f"pivots {k}"
        self.workspace[self.pivots] = SplitArray(layout, "int32", memory="pivots of a panel")
        plan = TransferPlan(blocks.vector, layout, _ITEMSIZE)
        self.steps.append(Move(plan, _PIVOTS, self.pivots))

    def update(self, k: int, first: int, last: int) -> None:
        lo, hi = (self.blocks.before(j, self.rank) for j in (first, last))
        if lo < hi:
            self._update(k, Cut("columns", (0, self.blocks.n), (lo, hi)))

    def update_right_sides(self, k: int) -> None:
        self._update(k, self.right)

    def _update(self, k: int, columns: Cut) -> None:
        """Apply panel `k` to columns of all rows."""
        n, (lo, hi) = self.blocks.n, self.blocks.bounds(k)
        here, below = columns.of_rows(lo, hi), columns.of_rows(hi, n)
        self.steps += [
            ExchangeRows(self.pivots, (0, hi - lo), columns.of_rows(lo, n), lo, STATUS),
            Substitute(self.panel_rows(lo, hi), here, lower=True, unit=True),
            Subtract(below, self.panel_rows(hi, n), here, precision=self.precision),
        ]


class LUFactor(Factorisation):
    """The operation: L and U in one matrix, and the pivots, on every rank."""

    names = Names("lu_factor", ("a",), ("lu", "pivots", "fault"))
    steps = LUSteps

    def built(self, panels: LUSteps) -> Program:
        problem, blocks = panels.problem, panels.blocks
        panels.bring_columns(problem.a)
        panels.factorise()
        panels.steps.append(READ)
        n, whole = problem.n, Layout.replicated((problem.n,), blocks.size)
        panels.workspace["all pivots"] = SplitArray(whole, "int32")
        plan = TransferPlan(blocks.vector, whole, _ITEMSIZE)
        panels.steps.append(Move(plan, _PIVOTS, "all pivots"))
        for k in blocks.owned(panels.rank):
            _, hi = blocks.bounds(k)
            below = panels.own(k, (hi, n))
            panels.steps.append(ExchangeRows("all pivots", (hi, n), below, hi, STATUS))
        return panels.program(
            [("columns", "lu", problem.result)], vectors={"pivots": (_PIVOTS, "int32")}
        )


class LUSolve(Factorisation):
    """The operation: X of op(P L U) X = B."""

    names = Names("lu_solve", ("lu", "pivots", "b"), ("x", "fault"))

    def built(self, panels: PanelSteps, op: Op) -> Program:
        factors, everywhere = panels.problem.a, (0, panels.problem.n)
        panels.check_finite("lu", NOT_FINITE_A)
        panels.move_right_sides()
        exchange = ExchangeRows("pivots", everywhere, panels.right, 0, STATUS, op != "N")
        if op == "N":
            panels.steps.append(exchange)
            panels.substitute("lu", factors, lower=True, unit=True)
            panels.substitute("lu", factors, lower=False, notes=True)
        else:
            panels.substitute("lu", factors, lower=False, op=op, notes=True)
            panels.substitute("lu", factors, lower=True, op=op, unit=True)
            panels.steps.append(exchange)
        return panels.program([("rhs", "x", panels.problem.result)])


class Solve(Factorisation):
    """The operation: X of A X = B, or of A^T X = B.

    L Y = P B is solved as panels of L come, and U X = Y when U is there.
    """

    names = Names("solve", ("a", "b"), ("x", "fault"))
    steps = LUSteps

    def built(self, panels: LUSteps, transposed: bool) -> Program:
        a = panels.problem.a
        panels.bring_columns(a.transposed() if transposed else a)
        panels.move_right_sides()
        panels.factorise(solves=True)
        panels.substitute("columns", panels.blocks.layout, lower=False)
        return panels.program([("rhs", "x", panels.problem.result)], ("a",) if transposed else ())


class Inverse(Factorisation):
    """The operation: X of A X = I."""

    names = Names("inv", ("a",), ("out", "fault"))
    steps = LUSteps

    def built(self, panels: LUSteps) -> Program:
        problem, blocks = panels.problem, panels.blocks
        panels.bring_columns(problem.a)
        panels.bring_right_sides((problem.n, problem.n))
        first = Spans.even(problem.n, blocks.size, panels.rank).start
        panels.steps.append(SetIdentity("rhs", first))
        panels.factorise(solves=True)
        panels.substitute("columns", blocks.layout, lower=False)
        return panels.program([("rhs", "out", problem.result)])


class Diagonal(Factorisation):
    """The operation: the diagonal of U, and the pivots, on every rank."""

    names = Names("det", ("a",), ("diagonal", "pivots", "fault"))
    steps = LUSteps

    def built(self, panels: LUSteps) -> Program:
        problem, blocks = panels.problem, panels.blocks
        panels.bring_columns(problem.a)
        panels.factorise()
        panels.workspace["diagonals"] = SplitArray(blocks.vector, problem.dtype)
        for k in blocks.owned(panels.rank):
            block = panels.own(k, blocks.bounds(k))
            panels.steps.append(CopyDiagonal(block, "diagonals", blocks.place(k)))
        vectors = {"diagonal": ("diagonals", problem.dtype), "pivots": (_PIVOTS, "int32")}
        return panels.program([], vectors=vectors)


LU_FACTORS = {precision: LUFactor(precision) for precision in PRECISIONS}
LU_FACTOR = LU_FACTORS["full"]
LU_SOLVE = LUSolve()
SOLVE = Solve()
INVERSE = Inverse()
DIAGONAL = Diagonal()
