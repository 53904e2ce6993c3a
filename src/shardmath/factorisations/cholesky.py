"""The Cholesky factor of a positive definite matrix, A = L L^H, and solutions with it.

Right-looking, panel by panel: L of the diagonal block, L of what is below it, and the columns
behind minus their products, of the lower triangle alone. n^3/3 operations; the error of L is within
c n eps ||A||, without any pivots.

Source: Golub, Van Loan, Matrix Computations, 4th edition, 4.2; Higham, Accuracy and Stability of
Numerical Algorithms, 2nd edition, chapter 10.
"""

from __future__ import annotations

from shardmath.factorisations.operation import Factorisation
from shardmath.factorisations.panels import STATUS, PanelSteps
from shardmath.factorisations.steps import (
    Conjugate,
    FactoriseCholesky,
    KeepLower,
    Substitute,
    Subtract,
)
from shardmath.local.lapack import PRECISIONS
from shardmath.program.performing import Names
from shardmath.program.steps import Program


class CholeskySteps(PanelSteps):
    """The steps of one rank that make the Cholesky factor."""

    is_lower = True

    def factorise_panel(self, k: int) -> None:
        lo, _ = self.blocks.bounds(k)
        self.steps.append(FactoriseCholesky(self.own(k, (lo, self.blocks.n)), STATUS, lo))

    def update(self, k: int, first: int, last: int) -> None:
        n = self.blocks.n
        for j in self.blocks.owned(self.rank):
            if first <= j < last:
                lo, hi = self.blocks.bounds(j)
                left, right = self.panel_rows(lo, n), self.panel_rows(lo, hi)
                target = self.own(j, (lo, n))
                self.steps.append(Subtract(target, left, right, ("N", "C"), self.precision))

    def update_right_sides(self, k: int) -> None:
        n, (lo, hi) = self.blocks.n, self.blocks.bounds(k)
        here, below = self.right.of_rows(lo, hi), self.right.of_rows(hi, n)
        self.steps += [
            Substitute(self.panel_rows(lo, hi), here, lower=True),
            Subtract(below, self.panel_rows(hi, n), here),
        ]


class Cholesky(Factorisation):
    """The operation: the factor of a matrix.

    The upper factor is the lower one of the transposed matrix, transposed.
    """

    names = Names("cholesky", ("a",), ("out", "fault"))
    steps = CholeskySteps

    def built(self, panels: CholeskySteps, lower: bool) -> Program:
        blocks, a, result = panels.blocks, panels.problem.a, panels.problem.result
        if not lower:
            a, result = a.transposed(), result.transposed()
        panels.bring_columns(a)
        panels.factorise()
        for k in blocks.owned(panels.rank):
            panels.steps.append(KeepLower(panels.own(k, blocks.bounds(k)), 0))
        return panels.program([("columns", "out", result)], () if lower else ("a", "out"))


class SolvePositiveDefinite(Factorisation):
    """The operation: X of A X = B, or of A^T X = B, for a positive definite A.

    L Y = B is solved as panels of L come, and L^H X = Y when L is there. The upper triangle of a
    matrix is the lower one of its conjugate transpose, which is the same matrix.
    """

    names = Names("solve, positive definite", ("a", "b"), ("x", "fault"))
    steps = CholeskySteps

    def built(self, panels: CholeskySteps, lower: bool, transposed: bool) -> Program:
        a = panels.problem.a
        panels.bring_columns(a if lower else a.transposed())
        if lower == transposed:
            panels.steps.append(Conjugate("columns"))
        panels.move_right_sides()
        panels.factorise(solves=True)
        panels.substitute("columns", panels.blocks.layout, lower=True, op="C")
        return panels.program([("rhs", "x", panels.problem.result)], () if lower else ("a",))


CHOLESKYS = {precision: Cholesky(precision) for precision in PRECISIONS}
CHOLESKY = CHOLESKYS["full"]
SOLVE_POSITIVE_DEFINITE = SolvePositiveDefinite()
