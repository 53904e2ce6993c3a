"""`DirectSolver`: a matrix that is factorised once, and solved with many times.

    DirectSolver(a, b) ── plan ── factorize ── solve ── reset_operands(b=...) ── solve ── free
                           │          │          └ reads the factors
                           └ memory   └ writes them

The factors lie on the symmetric heap, in blocks of columns dealt to the ranks, in column-major
order: a solution copies blocks from there without converting them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from logging import Logger
from typing import Any, ClassVar, Literal

from shardmath.arrays import ArraySpec, library_of
from shardmath.base.collective_call import collective_call
from shardmath.base.untraced import untraced_methods
from shardmath.call.driver import Driver, Operation
from shardmath.call.planned import Planned
from shardmath.context.agreement import checked, require_equal
from shardmath.errors import InvalidDirectSolverState
from shardmath.factorisations.api import PIVOT, require_good
from shardmath.factorisations.lu import LU_FACTOR, LU_SOLVE
from shardmath.factorisations.operation import Factorisation
from shardmath.factorisations.problem import FactorisationOptions, Problem, dealt_columns
from shardmath.geometry import Distribution, Layout
from shardmath.handles.allocation import empty_on_heap
from shardmath.machine import Machine
from shardmath.operators.arguments import check_common, check_stream, options_of
from shardmath.operators.redistribute.operation import REDISTRIBUTE
from shardmath.program.performing import Arguments, Names
from shardmath.program.steps import Program

FACTORS: tuple[Any, ...] = (True,)  # flags of LU_FACTOR: check_finite
SOLUTION: tuple[Any, ...] = ("N", True)  # flags of LU_SOLVE: op, check_finite


@dataclass(frozen=True)
class DirectSolverOptions:
    """`logger` is told what is planned; without one, a logger below "shardmath" is. `inplace_a`:
    `factorize` also writes the factors to a; `inplace_b`: `solve` writes x to b, and returns b.
    `block_size` is the number of columns of a panel, as in FactorisationOptions. `blocking`: True,
    or "auto"; a `handle` of a library has no effect.

    Raises TypeError where `logger` is not a logging.Logger, ValueError for other invalid values.
    Source: nvmath.distributed.linalg.DirectSolverOptions; `block_size` is ours.
    """

    logger: Logger | None = None
    blocking: Literal[True, "auto"] = "auto"
    inplace_a: bool = True
    inplace_b: bool = True
    handle: int | None = None
    block_size: int | None = None

    def __post_init__(self) -> None:
        check_common(self, ("inplace_a", "inplace_b"))
        self.of_calls()

    def of_calls(self) -> FactorisationOptions:
        """The options of the calls that factorise and solve."""
        return FactorisationOptions(block_size=self.block_size)


class DirectSolution(Factorisation):
    """The operation: X of A X = B, in two: the factors of A, and X by them."""

    names = Names("DirectSolver", ("a", "b"), ("x", "fault"))
    options = DirectSolverOptions  # type: ignore[assignment]

    def describe(
        self, arrays: Mapping[str, ArraySpec | None], words: tuple[Any, ...], options: Any
    ) -> tuple[Any, ...]:
        """As Factorisation, and which operands are overwritten."""
        given, flags = words
        if not isinstance(given, Sequence) or len(given) != 2:
            raise ValueError(f"distributions holds two, of a and of b, not {given!r}")
        described = super().describe(arrays, (tuple(given), flags), options)
        return described, (options.inplace_a, options.inplace_b)

    def check(self, specs: Sequence[Any]) -> Problem:
        """See Operation."""
        described, in_place = zip(*specs, strict=True)
        require_equal("options.inplace_a and inplace_b", in_place)
        return super().check(described)

    def program(self, problem: Problem, machine: Machine, rank: int) -> Program:
        """The program of the LU factors, which is the first to be performed."""
        return LU_FACTOR.program(_of_factors(problem, machine), machine, rank)

    def explain(self, problem: Problem, machine: Machine) -> str:
        """What `factorize` and `solve` do."""
        factors = _of_factors(problem, machine)
        solution = replace(problem, a=factors.result, flags=SOLUTION)
        return "\n".join(
            [
                f"{self.names.operation} of {problem.n} x {problem.n} {problem.dtype} on "
                f"{problem.a.size} ranks: factorize, and solve with {problem.columns} right-hand "
                "sides",
                LU_FACTOR.explain(factors, machine),
                LU_SOLVE.explain(solution, machine),
            ]
        )


def _of_factors(problem: Problem, machine: Machine) -> Problem:
    """The problem of factorising the matrix into factors that are split as they are computed."""
    dealt = dealt_columns(problem.n, problem.a.size, problem.block_on(machine))
    layout = Layout.bind([dealt] * problem.a.size, (problem.n, problem.n))
    return replace(problem, b=None, result=layout, order="F", flags=FACTORS)


DIRECT_SOLUTION = DirectSolution()


@untraced_methods
class DirectSolver(Planned):
    """The solution of a @ x = b by LU with partial pivoting, step by step. Collective to make.

        with DirectSolver(a, b, distributions=[Slab.X, Slab.X]) as solver:
            solver.plan()
            solver.factorize()
            x = solver.solve()                  # b itself, unless options say otherwise
            for b in others:
                solver.reset_operands(b=b)
                x = solver.solve()

    `a` is this rank's part of an n x n matrix of float32, float64, complex64 or complex128, `b` of
    a vector or of a matrix of n rows, of the same type; `distributions` are those of a and b. Or
    both are distributed arrays, without `distributions`, and then x is one, too. By default
    `factorize` leaves L and U in a, and `solve` leaves x in b: see DirectSolverOptions. The object
    keeps its own copy of the factors: changes to a take effect in the next `factorize`, changes to
    b in the next `solve`.

    All methods but `reset_operands_unchecked`, `release_operands` and `free` are collective: an
    error on one rank is raised on all. RuntimeError: methods in another order, released operands;
    InvalidDirectSolverState, which is one, after `free`. ValueError and TypeError as `solve`.
    Source: nvmath.distributed.linalg.DirectSolver.
    """

    noun: ClassVar[str] = "DirectSolver"
    invalid = InvalidDirectSolverState

    def __init__(
        self,
        a: Any,
        b: Any,
        /,
        *,
        distributions: Sequence[Distribution] | None = None,
        options: DirectSolverOptions | dict[str, Any] | None = None,
        stream: Any = None,
    ) -> None:
        self._layouts, self._whole_b = {"a": _layout_of(a), "b": _layout_of(b)}, b
        are_parts = [layout is None for layout in self._layouts.values()]
        if len({*are_parts, distributions is not None}) > 1:
            raise TypeError(
                f"{self.noun} takes parts and their distributions=, or two distributed arrays alone"
            )
        if distributions is None:
            distributions = a.distribution, b.distribution
        words, operands = (distributions, FACTORS), (_part_of(a), _part_of(b))
        super().__init__(DIRECT_SOLUTION, Arguments(operands, (None, None), words, options, stream))
        for x in (a, b):
            if getattr(x, "context", self.context) is not self.context:
                raise ValueError(f"{self.noun}: make it within `with x.context:` of its arrays")
        self._own = options_of(DirectSolverOptions, options)
        self._calls = self._own.of_calls()
        self._split = tuple(distributions)
        self._factors: Any = None  # L and U
        self._pivots: Any = None  # None where they are not those of a

    @collective_call
    def plan(self, *, stream: Any = None) -> None:  # type: ignore[override]
        """Reserve memory for the factors; a second call does nothing. Collective.

        Raises RuntimeError where operands were released, HeapExhausted, a MemoryError.
        """

        def described() -> None:
            self._require_operands()
            check_stream(stream)
            if not self._planned:
                self._reserve()

        self._gather("plan", described)
        self._planned = True

    @collective_call
    def factorize(self, *, stream: Any = None) -> None:
        """Factorise a, with partial pivoting. Collective.

        Raises RuntimeError before `plan`; SingularMatrix, a LinAlgError and a RuntimeError, which
        names the pivot that is 0, and ValueError for NaN and infinity: a is then as it was.
        """
        self._gather("factorize", lambda: self._require_step("factorize", stream))
        a, self._pivots = self._operands["a"], None
        how, back = (self._split[0], self._dealt), (self._dealt, self._split[0])
        given = Arguments((a,), (self._factors, None, None), (how, FACTORS), self._calls, stream)
        _, pivots, fault = self._call(LU_FACTOR, given)
        require_good(fault, PIVOT)
        if self._own.inplace_a:
            self._call(REDISTRIBUTE, Arguments((self._factors,), (a,), back, None, stream))
        self._pivots = pivots

    @collective_call
    def solve(self, *, stream: Any = None) -> Any:
        """This rank's part of x, or the distributed array, by the factors of the last `factorize`:
        b, unless `inplace_b` is False. Collective.

        Raises RuntimeError before `factorize`, and where a was reset since; ValueError for NaN and
        infinity: b is then as it was.
        """
        self._gather("solve", lambda: self._require_step("solve", stream))
        b = self._operands["b"]
        words = (self._dealt, self._split[1]), SOLUTION
        operands = self._factors, self._pivots, b
        x, fault = self._call(
            LU_SOLVE, Arguments(operands, (None, None), words, self._calls, stream)
        )
        require_good(fault)
        whole = self._whole_b
        if not self._own.inplace_b:
            return x if self._layouts["b"] is None else whole.with_part(x)
        b[...] = x
        return b if self._layouts["b"] is None else whole

    @collective_call
    def reset_operands(self, *, a: Any = None, b: Any = None, stream: Any = None) -> None:
        """Use other operands, of the same library, dtype and shape, from now on; another a has to
        be factorised first. Collective.

        Operands that are None stay; after `release_operands` both are needed. Raises ValueError on
        every rank, and then changes nothing.
        """
        given = {name: x for name, x in (("a", a), ("b", b)) if x is not None}

        def described() -> bytes:
            check_stream(stream)
            if not given:
                raise ValueError("reset_operands was given nothing to reset")
            if not self._has_operands and len(given) < 2:
                raise ValueError("the operands were released: reset_operands needs both a and b")
            self._check_operands(given)
            return ",".join(given).encode()

        told = self._gather("reset_operands", described)
        checked(self.context.board, partial(require_equal, "which operands are reset"), told)
        self._take(given)

    def reset_operands_unchecked(self, *, a: Any = None, b: Any = None, stream: Any = None) -> None:
        """Use these operands from now on; the next step raises what does not fit. Local."""
        self._require_alive()
        self._take({name: x for name, x in (("a", a), ("b", b)) if x is not None})

    def release_operands(self) -> None:
        """Drop the references to a and b; then `reset_operands` must be given both. Local."""
        self._require_alive()
        self._release_operands()

    # -- shared by the steps -----------------------------------------------------------------------

    def _reserve(self) -> None:
        """Make room for this rank's part of the factors. Local."""
        problem, context = self._plan.problem, self.context
        width = problem.block_on(self._driver.machine)
        self._dealt = dealt_columns(problem.n, context.size, width)
        layout = Layout.bind([self._dealt] * context.size, (problem.n, problem.n))
        shape = layout.local_shape(context.rank)
        library = library_of(self._operands["a"])
        self._factors = empty_on_heap(context, library, shape, problem.dtype, "F")

    def _call(self, operation: Operation[Any], arguments: Arguments) -> Any:
        """The results of an operation in the context of this object. Collective."""
        return Driver.of(self.context, operation).call(arguments)

    def _take(self, given: Mapping[str, Any]) -> None:
        self._set_operands(**{name: _part_of(x) for name, x in given.items()})
        self._whole_b = given.get("b", self._whole_b)
        if "a" in given:
            self._pivots = None

    def _require_step(self, step: str, stream: Any) -> None:
        """Raise unless `step`, "factorize" or "solve", can be done now."""
        self._require_operands()
        if not self._planned:
            raise RuntimeError(f"this DirectSolver is not planned yet; call plan() before {step}()")
        if step == "solve" and self._pivots is None:
            raise RuntimeError("this a has not been factorised; call factorize() before solve()")
        check_stream(stream)
        self._check_operands(self._operands)

    def _check_operands(self, given: Mapping[str, Any]) -> None:
        """Raise ValueError for operands unlike those that the object was made for."""
        for name, x in given.items():
            part, layout = _part_of(x), self._layouts[name]
            if x is not self._operands.get(name) and _layout_of(x) != layout:
                made_for = "parts" if layout is None else f"a distributed array of {layout}"
                raise ValueError(f"this {self.noun} was made for {name} as {made_for}")
            try:
                self._check_like(name, library_of(part, name).spec(part))
            except TypeError as mistake:
                raise ValueError(str(mistake)) from None

    def _release_operands(self) -> None:
        super()._release_operands()
        self._whole_b = None

    def _release(self) -> None:
        super()._release()
        self._factors = self._pivots = self._whole_b = None


def _layout_of(x: Any) -> Layout | None:
    """The layout of a distributed array; None for a part."""
    return x.layout if hasattr(x, "__shardmath_functions__") else None


def _part_of(x: Any) -> Any:
    """This rank's part of a distributed array; a part itself."""
    return x.local if hasattr(x, "__shardmath_functions__") else x


def direct_solver(
    a: Any,
    b: Any,
    /,
    *,
    distributions: Sequence[Distribution] | None = None,
    options: DirectSolverOptions | dict[str, Any] | None = None,
    stream: Any = None,
) -> Any:
    """X of a @ x = b, by a DirectSolver that is used once. Collective.

        x = direct_solver(a, b, distributions=[Slab.X, Slab.X], options={"inplace_b": False})

    By default a is overwritten by its factors, and b by x, which is returned; `solve` leaves them
    as they are. Arguments and errors as DirectSolver. Source:
    nvmath.distributed.linalg.direct_solver.
    """
    with DirectSolver(a, b, distributions=distributions, options=options, stream=stream) as solver:
        solver.plan(stream=stream)
        solver.factorize(stream=stream)
        return solver.solve(stream=stream)
