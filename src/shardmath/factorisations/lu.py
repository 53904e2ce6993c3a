"""A = P L U with partial pivoting, and what follows from it: solutions, inverse, determinant.

A rank has a panel whole, so it searches all rows for each pivot by itself: no tournament, and the
pivots, the growth of elements and the error are those of LAPACK. Exchanges go to the other ranks
with the panel, which make them in their own columns; those in columns before are made at the end.

    panel k   factorise ─┬─ read by all, with its pivots
    behind k             exchange rows ─ solve by L of the diagonal block ─ subtract L U

2/3 n^3 operations. Source: Golub, Van Loan, Matrix Computations, 4th edition, 3.4; Higham, Accuracy
and Stability of Numerical Algorithms, 2nd edition, chapter 9. Pivots that are searched over several
ranks meet for each column, or are chosen by a tournament, of a weaker bound: Grigori, Demmel,
Xiang, "CALU", SIAM J. Matrix Anal. Appl. 32 (2011).
"""

from __future__ import annotations

from shardmath.factorisations.panels import STATUS, PanelSteps
from shardmath.factorisations.problem import Factorisation, Problem
from shardmath.factorisations.steps import (
    NOT_FINITE_A,
    CheckFinite,
    CopyDiagonal,
    Cut,
    ExchangeRows,
    FactoriseLU,
    SetIdentity,
    Substitute,
    Subtract,
)
from shardmath.geometry import Layout, Spans
from shardmath.machine import Machine
from shardmath.program.performing import Names
from shardmath.program.steps import Move, Program, SplitArray
from shardmath.redistribution import TransferPlan

_PIVOTS = "exchanges"
_ITEMSIZE = 4  # of a pivot


class LUFactor(Factorisation):
    """The operation: L and U in one matrix, and the pivots, on every rank. Flags: check_finite."""

    names = Names("lu_factor", ("a",), ("lu", "pivots", "fault"))

    def program(self, problem: Problem, machine: Machine, rank: int) -> Program:
        (check_finite,) = problem.flags
        panels = PanelSteps(problem, problem.block_on(machine), rank, rounded=self.rounded)
        panels.bring_columns(problem.a, check_finite=check_finite)
        factorise(panels)
        panels.synchronise()
        blocks, n = panels.blocks, problem.n
        whole = Layout.replicated((n,), blocks.size)
        panels.workspace["all pivots"] = SplitArray(whole, "int32")
        plan = TransferPlan(blocks.vector, whole, _ITEMSIZE)
        panels.steps.append(Move(plan, _PIVOTS, "all pivots"))
        for k in blocks.owned(rank):
            _, hi = blocks.bounds(k)
            below = panels.own(k, (hi, n))
            panels.steps.append(ExchangeRows("all pivots", (hi, n), below, hi, STATUS))
        return panels.program(
            [("columns", "lu", problem.result)], vectors={"pivots": (_PIVOTS, "int32")}
        )


class RoundedLUFactor(LUFactor):
    """The operation: P A = L U, by products of factors rounded to bfloat16."""

    names = LUFactor.names._replace(operation="lu_factor, rounded")
    rounded = True


class LUSolve(Factorisation):
    """The operation: X of op(P L U) X = B. Flags: op, check_finite."""

    names = Names("lu_solve", ("lu", "pivots", "b"), ("x", "fault"))

    def program(self, problem: Problem, machine: Machine, rank: int) -> Program:
        op, check_finite = problem.flags
        panels = PanelSteps(problem, problem.block_on(machine), rank)
        if check_finite:
            panels.steps.append(CheckFinite("lu", STATUS, NOT_FINITE_A))
        panels.move_right_sides(check_finite=check_finite)
        everywhere = (0, problem.n)
        exchange = ExchangeRows("pivots", everywhere, panels.right, 0, STATUS, op != "N")
        if op == "N":
            panels.steps.append(exchange)
            panels.substitute("lu", problem.a, lower=True, unit=True)
            panels.substitute("lu", problem.a, lower=False, notes=True)
        else:
            panels.substitute("lu", problem.a, lower=False, op=op, notes=True)
            panels.substitute("lu", problem.a, lower=True, op=op, unit=True)
            panels.steps.append(exchange)
        return panels.program([("rhs", "x", problem.result)])


class Solve(Factorisation):
    """The operation: X of A X = B, or of A^T X = B. Flags: transposed, check_finite.

    L Y = P B is solved as panels of L come, and U X = Y when U is there.
    """

    names = Names("solve", ("a", "b"), ("x", "fault"))

    def program(self, problem: Problem, machine: Machine, rank: int) -> Program:
        transposed, check_finite = problem.flags
        panels = PanelSteps(problem, problem.block_on(machine), rank)
        a = problem.a.transposed() if transposed else problem.a
        panels.bring_columns(a, check_finite=check_finite)
        panels.move_right_sides(check_finite=check_finite)
        factorise(panels, solves=True)
        panels.substitute("columns", panels.blocks.layout, lower=False)
        return panels.program([("rhs", "x", problem.result)], ("a",) if transposed else ())


class Inverse(Factorisation):
    """The operation: X of A X = I. Flags: check_finite."""

    names = Names("inv", ("a",), ("out", "fault"))

    def program(self, problem: Problem, machine: Machine, rank: int) -> Program:
        (check_finite,) = problem.flags
        panels = PanelSteps(problem, problem.block_on(machine), rank)
        panels.bring_columns(problem.a, check_finite=check_finite)
        panels.bring_right_sides((problem.n, problem.n))
        first = Spans.even(problem.n, panels.blocks.size, rank).start
        panels.steps.append(SetIdentity("rhs", first))
        factorise(panels, solves=True)
        panels.substitute("columns", panels.blocks.layout, lower=False)
        return panels.program([("rhs", "out", problem.result)])


class Diagonal(Factorisation):
    """The operation: the diagonal of U, and the pivots, on every rank. Flags: check_finite."""

    names = Names("det", ("a",), ("diagonal", "pivots", "fault"))

    def program(self, problem: Problem, machine: Machine, rank: int) -> Program:
        (check_finite,) = problem.flags
        panels = PanelSteps(problem, problem.block_on(machine), rank)
        panels.bring_columns(problem.a, check_finite=check_finite)
        factorise(panels)
        blocks = panels.blocks
        panels.workspace["diagonals"] = SplitArray(blocks.vector, problem.dtype)
        for k in blocks.owned(rank):
            block = panels.own(k, blocks.bounds(k))
            panels.steps.append(CopyDiagonal(block, "diagonals", blocks.place(k)))
        vectors = {"diagonal": ("diagonals", problem.dtype), "pivots": (_PIVOTS, "int32")}
        return panels.program([], vectors=vectors)


def factorise(panels: PanelSteps, *, solves: bool = False) -> None:
    """Add the steps that leave L and U in "columns", and the rows that were exchanged with those of
    each rank's columns in "exchanges"; those of L Y = P B beside, if it `solves`.

    Rows are not exchanged in columns before a panel.
    """
    blocks, rank = panels.blocks, panels.rank
    panels.workspace[_PIVOTS] = SplitArray(blocks.vector, "int32")
    if blocks.count and blocks.owner(0) == rank:
        _factorise_panel(panels, 0)
    last = blocks.count if solves else blocks.count - 1
    for k in range(last):
        panels.synchronise()
        (panel, _), pivots = panels.bring_panel(k), _bring_pivots(panels, k)
        ahead = k + 1 < blocks.count and blocks.owner(k + 1) == rank
        if ahead:
            _bring_up_to_date(panels, panel, pivots, k, panels.own(k + 1, (0, blocks.n)))
            _factorise_panel(panels, k + 1)
        if k + 1 < last:
            panels.arrive()
        rest = panels.own_behind(k + ahead, (0, blocks.n))
        for columns in (rest, panels.right):
            if not columns.is_empty:
                _bring_up_to_date(panels, panel, pivots, k, columns)


def _factorise_panel(panels: PanelSteps, k: int) -> None:
    lo, _ = panels.blocks.bounds(k)
    panel, place = panels.own(k, (lo, panels.blocks.n)), panels.blocks.place(k)
    panels.steps.append(FactoriseLU(panel, _PIVOTS, place, STATUS, lo))


def _bring_pivots(panels: PanelSteps, k: int) -> str:
    """The pivots of panel `k`, on every rank."""
    blocks, name = panels.blocks, f"pivots {k}"
    here = Spans.interval(*blocks.bounds(k))
    layout = Layout.product((blocks.n,), [[here] * blocks.size], size=blocks.size)
    panels.workspace[name] = SplitArray(layout, "int32", memory="pivots of a panel")
    panels.steps.append(Move(TransferPlan(blocks.vector, layout, _ITEMSIZE), _PIVOTS, name))
    return name


def _bring_up_to_date(panels: PanelSteps, panel: Cut, pivots: str, k: int, columns: Cut) -> None:
    """Do to columns, of all rows, what panel `k` says."""
    n = panels.blocks.n
    lo, hi = panels.blocks.bounds(k)
    here, below = columns.of_rows(lo, hi), columns.of_rows(hi, n)
    diagonal, rest = panel.of_rows(0, hi - lo), panel.of_rows(hi - lo, n - lo)
    panels.steps += [
        ExchangeRows(pivots, (0, hi - lo), columns.of_rows(lo, n), lo, STATUS),
        Substitute(diagonal, here, lower=True, unit=True),
        Subtract(below, rest, here, rounded=panels.rounded),
    ]


LU_FACTOR = LUFactor()
ROUNDED_LU_FACTOR = RoundedLUFactor()
LU_SOLVE = LUSolve()
SOLVE = Solve()
INVERSE = Inverse()
DIAGONAL = Diagonal()
