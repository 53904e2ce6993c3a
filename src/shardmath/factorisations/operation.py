"""Factorisations as operations: description, check, program and explanation. Pure.

The solution of a triangular system is here as well: it needs no factorisation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardmath.arrays import ArraySpec
from shardmath.context.agreement import require_equal
from shardmath.context.context import Context
from shardmath.factorisations.cores import FactorisationsOnCores
from shardmath.factorisations.operands import (
    require_equations,
    require_matrix,
    require_right_sides,
    require_square,
    require_type,
)
from shardmath.factorisations.panels import PanelSteps
from shardmath.factorisations.prediction import predicted
from shardmath.factorisations.problem import FactorisationOptions, Problem
from shardmath.factorisations.steps import NOT_FINITE_A
from shardmath.geometry import Distribution, Layout
from shardmath.local.lapack import Op, Precision
from shardmath.machine import Machine
from shardmath.operators.facts import ArrayFacts, agreed_facts
from shardmath.operators.layouts import (
    bind_layout,
    distributions_of,
    distributions_of_results,
    infer_layout,
    result_order,
)
from shardmath.program.performing import Names, Performer
from shardmath.program.steps import Arrive, Program

_SINGLE = ("float32", "complex64")  # types whose products can have a lower precision
_SHOWN = 40  # steps, in an explanation


class Factorisation:
    """The base of operations on a square matrix, which say by which steps they are done.

    Words are the distributions of operands and of the result, and flags: the arguments of `built`
    after the first, and whether operands are checked for NaN and infinity. The operands are a
    matrix, in some operations one more with as many rows, which has the shape of the result, and
    `pivots`, which every rank has whole. `precision` is that of the products, which are most of the
    work.
    """

    names: Names
    steps: type[PanelSteps] = PanelSteps
    options = FactorisationOptions
    on_cores = FactorisationsOnCores

    def __init__(self, precision: Precision = "full") -> None:
        self.precision = precision
        if precision != "full":
            self.names = self.names._replace(operation=f"{self.names.operation}, {precision}")

    def on_gpus(self, context: Context, names: Names, *, kept: bool) -> Performer:
        """See Operation."""
        from shardmath.factorisations.gpus import FactorisationsOnGPUs

        return FactorisationsOnGPUs(context, names, kept=kept)

    def describe(
        self,
        arrays: Mapping[str, ArraySpec | None],
        words: tuple[Any, ...],
        options: FactorisationOptions,
    ) -> tuple[Any, ...]:
        """(operands, distributions as they are encoded, flags, block size).

        Raises TypeError for another type than LAPACK's, and for what is no distribution,
        LinAlgError, a ValueError, for shapes.
        """
        given, flags = words
        facts = []
        for name in self.names.operands:
            spec = arrays[name]
            assert spec is not None, "required"
            facts.append(_facts(self.names.operation, name, spec))
            if self.precision != "full" and spec.dtype not in _SINGLE:
                raise TypeError(
                    f"products in {self.precision} take a matrix of {' or '.join(_SINGLE)}, "
                    f"and {name} has {spec.dtype}: convert it"
                )
        distributions = self._distributions(given)
        return tuple(facts), tuple(d.encode() for d in distributions), flags, options.block_size

    def _distributions(self, given: Any) -> tuple[Distribution, ...]:
        """The distributions of the operands that are split, and of the result, last."""
        names = [name for name in self.names.operands if name != "pivots"]
        operands, wanted = distributions_of(given, names)
        (result,) = distributions_of_results(wanted, 1)
        return (*operands, operands[-1] if result is None else result)

    def check(self, specs: Sequence[Any]) -> Problem:
        """See Operation. Raises ValueError where descriptions do not fit."""
        operands, encoded, flags, blocks = zip(*specs, strict=True)
        by_name = dict(zip(self.names.operands, zip(*operands, strict=True), strict=True))
        pivots = by_name.pop("pivots", None)
        arrays = {name: agreed_facts(name, sent) for name, sent in by_name.items()}
        first = next(iter(arrays.values()))[0]
        for what in ("library", "memory space", "dtype"):
            field = what.removeprefix("memory ")
            both = {name: getattr(facts[0], field) for name, facts in arrays.items()}
            if len(set(both.values())) > 1:
                said = " and ".join(f"{what} {fact} of {name}" for name, fact in both.items())
                raise ValueError(f"{said}: convert one of them")
        require_equal(f"the arguments of {self.names.operation}", flags)
        require_equal("options.block_size", blocks)
        layouts = []
        for number, (name, of_ranks) in enumerate(arrays.items()):
            shapes = [facts.shape for facts in of_ranks]
            layouts.append(infer_layout(name, [one[number] for one in encoded], shapes))
        a, b = layouts[0], layouts[1] if len(layouts) > 1 else None
        n = a.global_shape[0]
        require_square(next(iter(arrays)), a.global_shape)
        if b is not None:
            require_equations(a.global_shape, b.global_shape)
        for rank, facts in enumerate(pivots or ()):
            if facts[4] != (n,):
                raise ValueError(f"rank {rank}: pivots have shape {facts[4]}, not {(n,)}")
        like = a if b is None else b
        result = bind_layout("the result", [one[-1] for one in encoded], like.global_shape)
        order = result_order([facts.order for facts in list(arrays.values())[-1]])
        return Problem(a, b, result, first.dtype, first.itemsize, order, flags[0], blocks[0])

    def operands(self, problem: Problem) -> Mapping[str, Layout]:
        """See Operation."""
        return {"a": problem.a, **({} if problem.b is None else {"b": problem.b})}

    def program(self, problem: Problem, machine: Machine, rank: int) -> Program:
        """See Operation."""
        steps = self.steps(problem, problem.block_on(machine), rank, precision=self.precision)
        return self.built(steps, *problem.flags[:-1])

    def built(self, panels: Any, *args: Any, **kwargs: Any) -> Program:
        """The program that `panels`, which are `steps`, make; further arguments are the flags."""
        raise NotImplementedError

    def explain(self, problem: Problem, machine: Machine) -> str:
        """The `summary`, and the first steps of rank 0."""
        steps = list(map(str, self.program(problem, machine, 0).steps))
        lines = [f"  {number}. {step}" for number, step in enumerate(steps[:_SHOWN], 1)]
        if len(steps) > _SHOWN:
            lines.append(f"  and so on: {len(steps)} steps of rank 0")
        return "\n".join([self.summary(problem, machine), *lines])

    def summary(self, problem: Problem, machine: Machine) -> str:
        """The operation, how many panels it has, its predicted cost, and what look-ahead saves."""
        n, size, block = problem.n, problem.a.size, problem.block_on(machine)
        lines = [f"{self.names.operation} of {n} x {n} {problem.dtype} on {size} ranks: "]
        if block < n:
            lines[0] += f"{-(-n // block)} panels of {block} columns, dealt to the ranks in turn"
        else:
            lines[0] += "a single panel, on one rank"
        if problem.b is not None:
            sides = problem.columns
            lines[0] += f"; {sides} right-hand side{'s, split evenly' if sides > 1 else ''}"
        ranks = [self.program(problem, machine, rank).steps for rank in range(size)]
        words = problem.dtype, problem.itemsize, machine.rates
        cost = predicted(ranks, *words)
        lines.append(f"predicted {cost}")
        if size > 1 and any(isinstance(step, Arrive) for step in ranks[0]):
            kept = [[x for x in steps if not isinstance(x, Arrive)] for steps in ranks]
            without = predicted(kept, *words).seconds
            lines.append(
                "look-ahead: the rank of the next panel factorises it, and arrives, before it does "
                f"the rest with the last: {1 - cost.seconds / without:.1%} less than without"
            )
        return "\n".join(lines)


def _facts(operation: str, name: str, spec: ArraySpec) -> ArrayFacts:
    """What ranks compare of an operand. Raises an error where its type or shape is wrong."""
    if name == "pivots":
        if spec.dtype != "int32":
            raise TypeError(f"pivots must be int32, as lu_factor returns them, not {spec.dtype}")
        if spec.ndim != 1:
            raise ValueError(f"pivots are a vector, not an array of shape {spec.shape}")
    else:
        require_type(operation, name, spec.dtype)
        (require_right_sides if name == "b" else require_matrix)(name, spec.shape)
    return ArrayFacts.of(spec)


class SolveTriangular(Factorisation):
    """The operation: X of op(T) X = B, where T is a triangle of A; with `unit` its diagonal is
    taken for ones. Each rank reads the triangle once, block by block.

    Source: Golub, Van Loan, Matrix Computations, 4th edition, 3.1.
    """

    names = Names("solve_triangular", ("a", "b"), ("x", "fault"))

    def built(self, panels: PanelSteps, op: Op, lower: bool, unit: bool) -> Program:
        panels.check_finite("a", NOT_FINITE_A)
        panels.move_right_sides()
        split = panels.problem.a
        panels.substitute("a", split, lower=lower, op=op, unit=unit, notes=not unit)
        return panels.program([("rhs", "x", panels.problem.result)])


SOLVE_TRIANGULAR = SolveTriangular()
