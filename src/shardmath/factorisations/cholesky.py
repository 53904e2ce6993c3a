"""The Cholesky factor of a positive definite matrix, A = L L^H, and solutions with it.

Right-looking, panel by panel: L of the diagonal block, L of what is below it, and the columns
behind minus their products, of the lower triangle alone. n^3/3 operations; the error of L is within
c n eps ||A||, without any pivots.

Source: Golub, Van Loan, Matrix Computations, 4th edition, 4.2; Higham, Accuracy and Stability of
Numerical Algorithms, 2nd edition, chapter 10.
"""

from __future__ import annotations

from shardmath.factorisations.panels import STATUS, PanelSteps
from shardmath.factorisations.problem import Factorisation, Problem
from shardmath.factorisations.steps import Conjugate, Cut, FactoriseCholesky, KeepLower, Subtract
from shardmath.machine import Machine
from shardmath.program.performing import Names
from shardmath.program.steps import Program


class Cholesky(Factorisation):
    """The operation: the factor of a matrix. Flags: lower, check_finite.

    The upper factor is that of the transposed array, seen so.
    """

    names = Names("cholesky", ("a",), ("out", "fault"))

    def program(self, problem: Problem, machine: Machine, rank: int) -> Program:
        lower, check_finite = problem.flags
        a, result = problem.a, problem.result
        if not lower:
            a, result = a.transposed(), result.transposed()
        panels = PanelSteps(problem, problem.block_on(machine), rank, rounded=self.rounded)
        panels.bring_columns(a, check_finite=check_finite)
        factorise(panels)
        blocks = panels.blocks
        for k in blocks.owned(rank):
            panels.steps.append(KeepLower(panels.own(k, (0, blocks.n)), blocks.bounds(k)[0]))
        return panels.program([("columns", "out", result)], () if lower else ("a", "out"))


class RoundedCholesky(Cholesky):
    """The operation: Cholesky's factor, by products of factors rounded to bfloat16."""

    names = Cholesky.names._replace(operation="cholesky, rounded")
    rounded = True


class SolvePositiveDefinite(Factorisation):
    """The operation: X of A X = B, or of A^T X = B, for a positive definite A. Flags: lower,
    transposed, check_finite.

    L Y = B is solved as panels of L come, and L^H X = Y when L is there. The upper triangle of a
    matrix is the lower one of its conjugate transpose, which is the same matrix.
    """

    names = Names("solve, positive definite", ("a", "b"), ("x", "fault"))

    def program(self, problem: Problem, machine: Machine, rank: int) -> Program:
        lower, transposed, check_finite = problem.flags
        panels = PanelSteps(problem, problem.block_on(machine), rank)
        panels.bring_columns(
            problem.a if lower else problem.a.transposed(), check_finite=check_finite
        )
        if lower == transposed:
            panels.steps.append(Conjugate("columns"))
        panels.move_right_sides(check_finite=check_finite)
        factorise(panels, solves=True)
        panels.substitute("columns", panels.blocks.layout, lower=True, op="C")
        return panels.program([("rhs", "x", problem.result)], () if lower else ("a",))


def factorise(panels: PanelSteps, *, solves: bool = False) -> None:
    """Add the steps that leave L in "columns"; those of L Y = B beside, if it `solves`."""
    blocks, rank = panels.blocks, panels.rank
    if blocks.count and blocks.owner(0) == rank:
        _factorise_panel(panels, 0)
    last = blocks.count if solves else blocks.count - 1
    for k in range(last):
        panels.synchronise()
        panel, first = panels.bring_panel(k, lower=True)
        ahead = k + 1 < blocks.count and blocks.owner(k + 1) == rank
        if ahead:
            _subtract(panels, panel, first, k + 1)
            _factorise_panel(panels, k + 1)
        if k + 1 < last:
            panels.arrive()
        for j in blocks.owned(rank):
            if j > k + ahead:
                _subtract(panels, panel, first, j)
        if solves:
            panels.substitute_by(panel, k, unit=False)


def _factorise_panel(panels: PanelSteps, k: int) -> None:
    lo, hi = panels.blocks.bounds(k)
    diagonal, below = panels.own(k, (lo, hi)), panels.own(k, (hi, panels.blocks.n))
    panels.steps.append(FactoriseCholesky(diagonal, below, STATUS, lo))


def _subtract(panels: PanelSteps, panel: Cut, first: int, j: int) -> None:
    """Take the product of a panel, which is there from row `first` of the matrix on, from block
    `j`, from the diagonal on.
    """
    blocks = panels.blocks
    lo, hi = blocks.bounds(j)
    left, right = panel.of_rows(lo - first, blocks.n - first), panel.of_rows(lo - first, hi - first)
    target = panels.own(j, (lo, blocks.n))
    panels.steps.append(Subtract(target, left, right, ("N", "C"), panels.rounded))


CHOLESKY = Cholesky()
ROUNDED_CHOLESKY = RoundedCholesky()
SOLVE_POSITIVE_DEFINITE = SolvePositiveDefinite()
