"""A matrix product as an operation: description, check, program and explanation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from shardmath.context.context import Context
from shardmath.geometry import Layout
from shardmath.local.epilog import INPUTS
from shardmath.machine import CORES, Machine
from shardmath.operators.matmul.description import OUTPUTS, describe
from shardmath.operators.matmul.options import MatmulOptions
from shardmath.operators.matmul.problem import Problem, check
from shardmath.operators.matmul.program import output, product_program
from shardmath.operators.matmul.scaling import SCALES
from shardmath.operators.matmul.strategy import Cost, Strategy, candidates, choose
from shardmath.program.performing import Names, Performer
from shardmath.program.steps import Program


def given_results(results: Sequence[Any]) -> Any:
    """The return value of a call: D, or (D, outputs by name) where there are outputs."""
    d, *outputs = results
    for x in outputs:
        if x is not None:
            pairs = zip(OUTPUTS, outputs, strict=True)
            return d, {name: given for name, given in pairs if given is not None}
    return d


class _Matmul:
    """The operation: D = F(alpha op(A) op(B) + beta C)."""

    names = Names(
        "matmul",
        ("a", "b", "c", *INPUTS, *SCALES),
        ("d", *map(output, OUTPUTS)),
        separate="a, b or an input, and options.inplace=True overwrites it",
        optional=("c", *INPUTS, *SCALES),
        beside=(*INPUTS, *SCALES),
        numbers=("alpha", "beta", *SCALES),
    )
    options = MatmulOptions

    describe = staticmethod(describe)
    check = staticmethod(check)

    def operands(self, problem: Problem) -> Mapping[str, Layout]:
        """See Operation. The layouts of transposed operands are those of op(A) and op(B)."""
        c = {"c": problem.d} if problem.has_c and not problem.sums_c else {}
        return {"a": problem.a, "b": problem.b, **c}

    def program(self, problem: Problem, machine: Machine, rank: int) -> Program:
        """See Operation."""
        return product_program(problem, _strategy(problem, machine), rank)

    def explain(self, problem: Problem, machine: Machine, timed: Sequence[str] = ()) -> str:
        """The chosen strategy, its steps, and the alternatives, with predicted costs; and `timed`,
        lines about measurements.
        """
        strategy, compared = chosen(problem, machine)
        notes = list(timed)
        if machine.kind != "cpu":
            from shardmath.operators.matmul import gpu

            notes = [*gpu.notes(gpu.RankPlan(strategy, 0, machine.hosts)), *timed]
        problem = strategy.problem
        costs = {id(candidate): cost for candidate, cost in compared}
        forced = f", as options.strategy={problem.strategy!r} asks" * bool(problem.strategy)
        lines = [str(problem), f"chosen: {strategy}{forced}; predicted {costs[id(strategy)]}"]
        lines += [f"  {i}. {step}" for i, step in enumerate(strategy.steps(), 1)]
        lines += [f"  {note}" for note in notes]
        others = [entry for entry in compared if entry[0] is not strategy]
        lines += ["compared with"] * bool(others)
        lines += [f"  {candidate!s:<34} {cost}" for candidate, cost in others]
        return "\n".join(lines)

    def on_gpus(self, context: Context, names: Names, *, kept: bool) -> Performer:
        """See Operation."""
        from shardmath.operators.matmul import gpu

        return gpu.Products(context, names, kept=kept)


MATMUL = _Matmul()


@lru_cache(maxsize=64)
def chosen(problem: Problem, machine: Machine) -> tuple[Strategy, Sequence[tuple[Strategy, Cost]]]:
    """The strategy of a product, and all candidates with their costs, fastest first."""
    if machine.kind == "cpu":
        return choose(problem.widened(), CORES)
    from shardmath.operators.matmul import gpu

    return gpu.choose_strategy(problem, machine)


def _strategy(problem: Problem, machine: Machine) -> Strategy:
    """The strategy of a product. One named by its label is found without costs of the others."""
    if machine.kind == "cpu" and problem.strategy is not None:
        for candidate in candidates(problem.widened()):
            if candidate.label == problem.strategy:
                return candidate
    return chosen(problem, machine)[0]
