"""Solutions of triangular systems: each rank reads the triangle once, block by block.

Source: Golub, Van Loan, Matrix Computations, 4th edition, 3.1.
"""

from __future__ import annotations

from shardmath.factorisations.operation import Factorisation
from shardmath.factorisations.panels import PanelSteps
from shardmath.factorisations.steps import NOT_FINITE_A
from shardmath.local.lapack import Op
from shardmath.program.performing import Names
from shardmath.program.steps import Program


class SolveTriangular(Factorisation):
    """The operation: X of op(T) X = B, where T is a triangle of A; with `unit` its diagonal is
    taken for ones.
    """

    names = Names("solve_triangular", ("a", "b"), ("x", "fault"))

    def built(self, panels: PanelSteps, op: Op, lower: bool, unit: bool) -> Program:
        panels.check_finite("a", NOT_FINITE_A)
        panels.move_right_sides()
        split = panels.problem.a
        panels.substitute("a", split, lower=lower, op=op, unit=unit, notes=not unit)
        return panels.program([("rhs", "x", panels.problem.result)])


SOLVE_TRIANGULAR = SolveTriangular()
