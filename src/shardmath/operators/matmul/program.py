"""The program of a matrix product: one rank's part of a strategy, as steps over named buffers.

    "a" ── move ──► "a here" ┐
                             ├ multiply ──► "sums" ── combine ──► "reduced" ── move ──► "total"
    "b" ── move ──► "b here" ┘
    "total" ── axpby ("alpha", "c", "beta") ── finish (epilog) ──► "d"

Steps that a strategy does not need are left out. Sums are of the accumulator's type, and rounded
once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from shardmath.arrays import dtypes
from shardmath.geometry import Layout
from shardmath.local.epilog import MatmulEpilog, requirements
from shardmath.local.reduction import Reduction
from shardmath.operators.matmul.problem import Problem
from shardmath.operators.matmul.scaling import SCALES, TENSOR, blocks_of
from shardmath.operators.matmul.strategy import Strategy
from shardmath.program.steps import (
    READ,
    TAKEN,
    Axpby,
    Combine,
    Convert,
    Dequantize,
    Finish,
    Largest,
    LocalArray,
    Move,
    Multiply,
    Program,
    Quantize,
    Scratch,
    SplitArray,
    Step,
    SumLines,
    Synchronise,
)


def product_program(problem: Problem, strategy: Strategy, rank: int) -> Program:
    """The program of `rank`. `strategy` is for the numbers of `problem`, if elements are scaled."""
    return _Product(problem, strategy, rank).program()


def output(name: str) -> str:
    """The buffer of an epilog's output. Another epilog may have an input of the same name."""
    return f"output {name}"


@dataclass
class _Product:
    """Puts the steps of one rank together."""

    problem: Problem
    strategy: Strategy
    rank: int
    steps: list[Step] = field(default_factory=list)
    workspace: dict[str, SplitArray] = field(default_factory=dict)
    scratch: dict[str, Scratch] = field(default_factory=dict)
    results: dict[str, SplitArray | LocalArray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.passed = self.strategy.passed

    def program(self) -> Program:
        """The whole program."""
        problem, scaling = self.problem, self.problem.scaling
        factors = self._prepare()
        self.steps.append(READ)
        self._total(factors)
        self._finish(factors)
        like = ("c",) if problem.has_c else ("a", "b")
        d = SplitArray(problem.d, problem.result, like=like)
        if len([step for step in self.steps if isinstance(step, Synchronise)]) > 1 or any(
            self.strategy.moves_inputs
        ):
            self.steps.append(TAKEN)
        else:
            self.steps.remove(READ)  # nothing passes from rank to rank
        names = zip("ab", SCALES, problem.transpose, strict=False)
        equal = ["alpha", "beta"]
        if scaling is not None:
            pairs = zip(SCALES, scaling.whole, strict=True)
            equal += [name for name, is_number in pairs if is_number]
        return Program(
            tuple(self.steps),
            results={"d": d, **self.results},
            workspace=self.workspace,
            scratch=self.scratch,
            transposed=tuple(x for *both, turned in names if turned for x in both),
            equal=tuple(equal),
            blocking=problem.blocking,
        )

    @property
    def _wide(self) -> str:
        return dtypes.accumulator(self.strategy.problem.dtype).name

    def _prepare(self) -> tuple[str, str]:
        """Add the steps before the ranks agree. Returns the buffers of op(A) and op(B)."""
        problem, scaling, factors = self.problem, self.problem.scaling, ["a", "b"]
        if problem.sums_c and problem.has_c:
            self.workspace["c here"] = SplitArray(problem.d, self._wide)
            self._convert_c("c here")
        if scaling is not None:
            for index, layout in enumerate((problem.a, problem.b)):
                name, blocks = "ab"[index], blocks_of((scaling.a, scaling.b)[index], index)
                factors[index] = f"numbers of {name}"
                self.workspace[factors[index]] = SplitArray(layout, "float32", like=(name,))
                self.steps.append(Dequantize(name, SCALES[index], blocks, factors[index]))
        return factors[0], factors[1]

    def _convert_c(self, target: str) -> None:
        """Bring C to the accumulator's type."""
        scaling = self.problem.scaling
        if scaling is not None and scaling.c:
            self.steps.append(Dequantize("c", SCALES[2], blocks_of(TENSOR, 0), target))
        else:
            self.steps.append(Convert("c", target))

    def _total(self, factors: tuple[str, str]) -> None:
        """Add the steps to the complete sums where the caller wants D: in D itself, if it can hold
        them.
        """
        problem, strategy = self.problem, self.strategy
        here = [self._moved(index, name) for index, name in enumerate(factors)]
        self._last = "total"
        if problem.result == self._wide and not problem.has_c:
            self._last = "d"
        else:
            self.scratch["total"] = Scratch("d", self._wide)
        sums = self._last
        if strategy.reduces or strategy.moves_result:
            sums = "sums"
            held = strategy.sums
            if strategy.reduces:
                held = self._combine("sums").held
            self.workspace[sums] = SplitArray(held, self._wide)
        self.steps.append(Multiply(here[0], here[1], sums, problem.conjugate))
        if strategy.reduces:
            sums = self._last
            if strategy.moves_result:
                sums = "reduced"
                self.workspace[sums] = SplitArray(strategy.reduced, self._wide)
            self.steps += [READ, replace(self._combine("sums"), target=sums)]
        if strategy.moves_result:
            move = self.passed[sums]
            assert isinstance(move, Move)
            self.steps += [READ, replace(move, target=self._last)]

    def _combine(self, name: str) -> Combine:
        step = self.passed[name]
        assert isinstance(step, Combine), name
        return step

    def _moved(self, index: int, name: str) -> str:
        """The buffer of op(A), index 0, or op(B), with what this rank needs of it."""
        move, layout = self.passed["ab"[index]], (self.strategy.a, self.strategy.b)[index]
        if layout.same_as((self.problem.a, self.problem.b)[index]):
            return name
        assert isinstance(move, Move)
        self.workspace[move.target] = SplitArray(layout, self.strategy.problem.dtype)
        self.steps.append(replace(move, source=name))
        return move.target

    def _finish(self, factors: tuple[str, str]) -> None:
        """Add alpha, beta C and the epilog. D is rounded once."""
        problem, scaling, last = self.problem, self.problem.scaling, self._last
        addend = "c" if problem.has_c and not problem.sums_c else ""
        if addend and scaling is not None and scaling.c:
            addend = "numbers of c"
            self.scratch[addend] = Scratch("c", "float32")
            self._convert_c(addend)
        self.steps.append(Axpby(last, "alpha", addend, "beta" if addend else ""))
        if problem.sums_c and problem.has_c:
            everybodys = replace(self._combine("c"), source="c here", target=last)
            self.steps += [READ, everybodys]
        m, n = problem.d.local_shape(self.rank)
        extras = requirements(problem.epilog, m, n, problem.extras)
        gradient = problem.epilog.makes_bgrad
        for extra in extras.outputs:
            if extra.name != gradient:
                self.results[output(extra.name)] = LocalArray(extra.shape, extra.dtype, "F")
        outputs = tuple(
            (extra.name, "vector" if extra.name == gradient else output(extra.name))
            for extra in extras.outputs
        )
        quantizes = scaling is not None and scaling.d
        target = last if quantizes else "d"
        exact = not problem.epilog.changes_d
        if not (exact and target == last):
            inputs = tuple(extra.name for extra in extras.inputs)
            how = (MatmulEpilog.DEFAULT, (), ()) if exact else (problem.epilog, inputs, outputs)
            self.steps.append(Finish(last, target, *how, problem.extras))
        if gradient is not None:
            self._add_gradients(gradient, factors)
        if quantizes:
            self._quantize(last)

    def _add_gradients(self, name: str, factors: tuple[str, str]) -> None:
        """Add the gradient of a bias: each rank sums its own elements, then all ranks' sums."""
        problem = self.problem
        combine = self._combine("vector")
        held, need = _vector(combine.held), _vector(combine.needed)
        self.workspace["vector"] = SplitArray(held, self._wide)
        if problem.epilog is MatmulEpilog.BGRADA:
            self.steps.append(SumLines(factors[0], "vector", False, problem.conjugate[0]))
        elif problem.epilog is MatmulEpilog.BGRADB:
            self.steps.append(SumLines(factors[1], "vector", True, problem.conjugate[1]))
        if not combine.alone:
            self.steps.append(READ)
        self.steps.append(replace(combine, held=held, needed=need, target=output(name)))
        self.results[output(name)] = LocalArray(need.local_shape(self.rank), problem.extras)

    def _quantize(self, numbers: str) -> None:
        """Add the eight-bit D, and the greatest absolute value of all ranks if it is wanted."""
        scaling = self.problem.scaling
        self.steps.append(Quantize(numbers, SCALES[3], "d"))
        if scaling is None or not scaling.amax:
            return
        one = Layout.replicated((1,), self.problem.size)
        self.workspace["largest"] = SplitArray(one, "float32")
        self.results[output("result_amax")] = LocalArray((1,), "float32")
        greatest = Reduction.of("max", "float32")
        combine = Combine(one, one, "largest", output("result_amax"), reduction=greatest)
        self.steps += [Largest(numbers, "largest"), READ, combine]


def _vector(column: Layout) -> Layout:
    """The layout of a column as a vector."""
    return Layout(column.global_shape[:1], tuple(part[:1] for part in column.parts))
