"""Solutions of triangular systems: each rank reads the triangle once, block by block.

Source: Golub, Van Loan, Matrix Computations, 4th edition, 3.1.
"""

from __future__ import annotations

from shardmath.factorisations.panels import STATUS, PanelSteps
from shardmath.factorisations.problem import Factorisation, Problem
from shardmath.factorisations.steps import NOT_FINITE_A, CheckFinite
from shardmath.machine import Machine
from shardmath.program.performing import Names
from shardmath.program.steps import Program


class SolveTriangular(Factorisation):
    """The operation: X of op(T) X = B. Flags: op, lower, whether the diagonal is taken for ones,
    check_finite.
    """

    names = Names("solve_triangular", ("a", "b"), ("x", "fault"))

    def program(self, problem: Problem, machine: Machine, rank: int) -> Program:
        op, lower, unit, check_finite = problem.flags
        panels = PanelSteps(problem, problem.block_on(machine), rank)
        if check_finite:
            panels.steps.append(CheckFinite("a", STATUS, NOT_FINITE_A))
        panels.move_right_sides(check_finite=check_finite)
        panels.substitute("a", problem.a, lower=lower, op=op, unit=unit, notes=not unit)
        return panels.program([("rhs", "x", problem.result)])


SOLVE_TRIANGULAR = SolveTriangular()
