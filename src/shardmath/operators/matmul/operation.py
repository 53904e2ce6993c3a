"""A matrix product as an operation: one rank's arguments, what ranks compare, and the program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from shardmath.arrays import ArraySpec
from shardmath.context.context import Context
from shardmath.geometry import Distribution
from shardmath.local.epilog import INPUTS, OUTPUTS, MatmulEpilog
from shardmath.machine import CORES, Machine
from shardmath.operators.arguments import options_of
from shardmath.operators.matmul.options import MatmulOptions, MatmulPlanPreferences
from shardmath.operators.matmul.problem import Call, Problem, check, check_operands, describe
from shardmath.operators.matmul.program import SCALES, output, product_program
from shardmath.operators.matmul.scaling import Given, given_scales, known_scale, scales_in_order
from shardmath.operators.matmul.strategy import Cost, Strategy, candidates, choose
from shardmath.program.performing import Arguments, Names, Performer
from shardmath.program.steps import Program

_OUTPUTS = (*OUTPUTS, "result_amax")
_NO_EXTRAS = (None,) * (len(INPUTS) + len(SCALES))
_NO_OUTPUTS = (None,) * len(_OUTPUTS)
_NO_SCALES = (None,) * len(SCALES)


class Qualifiers(NamedTuple):
    """Which of a, b and c are transposed, and which conjugated."""

    transpose: tuple[bool, bool, bool]
    conjugate: tuple[bool, bool, bool]


class Words(NamedTuple):
    """What a call says beside its arrays and numbers; what cannot be read is there as it came.

    The first three and the last are fixed when an object is planned.
    """

    distributions: Any
    qualifiers: Any
    epilog: Any
    inputs: Any  # names
    scales: (
        Any  # of a, b, c and the result: "number", "array", None, or the spec of an array of one
    )
    complex_scalars: tuple[bool, bool]  # alpha, beta
    has_beta: bool
    preferences: Any


_PLAIN = Qualifiers((False,) * 3, (False,) * 3)


def arguments_of(
    a: Any,
    b: Any,
    c: Any,
    *,
    distributions: Any,
    alpha: Any,
    beta: Any,
    qualifiers: Any,
    scales: Any,
    options: Any,
    epilog: Any,
    inputs: Any,
    preferences: Any,
    stream: Any,
) -> Arguments:
    """One rank's arguments for the driver. It raises nothing: what is wrong is described."""
    extras, names = _NO_EXTRAS, inputs
    numbers: tuple[Any, ...] = _NO_SCALES
    given = scales
    if inputs is not None or scales is not None:
        arrays = inputs if isinstance(inputs, Mapping) else {}
        names = None if inputs is None else tuple(inputs) if arrays else inputs
        given, held, numbers = _read_scales(scales)
        extras = (*(arrays.get(name) for name in INPUTS), *held)
    words = Words(
        tuple(distributions) if isinstance(distributions, (list, tuple)) else distributions,
        _PLAIN if qualifiers is None else _flags(qualifiers),
        epilog,
        names,
        given,
        (alpha is not None and _is_complex(alpha), beta is not None and _is_complex(beta)),
        beta is not None,
        preferences,
    )
    alpha, beta = 1.0 if alpha is None else alpha, 0.0 if beta is None else beta
    results = (c if _is_inplace(options) else None, *_NO_OUTPUTS)
    return Arguments((a, b, c, *extras), results, words, options, stream, (alpha, beta, *numbers))


def given_results(results: Sequence[Any]) -> Any:
    """What a call returns: D, or (D, outputs by name) where there are outputs."""
    d, *outputs = results
    for x in outputs:
        if x is not None:
            pairs = zip(_OUTPUTS, outputs, strict=True)
            return d, {name: given for name, given in pairs if given is not None}
    return d


class _Matmul:
    """The operation: D = F(alpha op(A) op(B) + beta C)."""

    names = Names(
        "matmul",
        ("a", "b", "c", *INPUTS, *SCALES),
        ("d", *map(output, _OUTPUTS)),
        separate="a, b or an input, and options.inplace=True overwrites it",
        optional=("c", *INPUTS, *SCALES),
        beside=(*INPUTS, *SCALES),
        numbers=("alpha", "beta", *SCALES),
    )
    options = MatmulOptions

    def describe(
        self,
        arrays: Mapping[str, ArraySpec | None],
        words: tuple[Any, ...],
        options: MatmulOptions,
    ) -> Any:
        """See Operation, and `problem.describe`."""
        return describe(_call(arrays, Words(*words), options))

    def check(self, specs: Sequence[Any]) -> Problem:
        """See Operation."""
        return check(specs)

    def check_operands(self, specs: Sequence[Any]) -> None:
        """Raise what is wrong with all ranks' descriptions before an epilog is known."""
        check_operands(specs)

    def program(self, problem: Problem, machine: Machine, rank: int) -> Program:
        """See Operation."""
        return product_program(problem, _strategy(problem, machine), rank)

    def explain(self, problem: Problem, machine: Machine, found: Sequence[str] = ()) -> str:
        """What was chosen, its steps, and what it was compared with, predicted by counting; and
        what was `found` out by timing.
        """
        strategy, compared = chosen(problem, machine)
        notes: list[str] = []
        if machine.kind != "cpu":
            from shardmath.operators.matmul import gpu

            notes = gpu.notes(gpu.RankPlan(strategy, 0, machine.hosts))
        return explanation(strategy, compared, (*notes, *found))

    def on_gpus(self, context: Context, names: Names, *, kept: bool) -> Performer:
        """See Operation."""
        from shardmath.operators.matmul import gpu

        return gpu.Products(context, names, kept=kept)


MATMUL = _Matmul()


def chosen(problem: Problem, machine: Machine) -> tuple[Strategy, Sequence[tuple[Strategy, Cost]]]:
    """The strategy of a product, and what it was compared with, fastest first."""
    if machine.kind == "cpu":
        return _chosen_on_cores(problem)
    from shardmath.operators.matmul import gpu

    return gpu.choose_strategy(problem, machine)


def _strategy(problem: Problem, machine: Machine) -> Strategy:
    """The strategy. Others cost nothing where the problem names one by its label."""
    if machine.kind == "cpu" and problem.strategy is not None:
        for each in candidates(problem.widened()):
            if each.label == problem.strategy:
                return each
    return chosen(problem, machine)[0]


@lru_cache(maxsize=64)
def _chosen_on_cores(problem: Problem) -> tuple[Strategy, Sequence[tuple[Strategy, Cost]]]:
    return choose(problem.widened(), CORES)


def explanation(
    strategy: Strategy, compared: Sequence[tuple[Strategy, Cost]], notes: Sequence[str] = ()
) -> str:
    """What was chosen, its steps, notes on those, and what it was compared with."""
    problem = strategy.problem
    costs = {id(each): cost for each, cost in compared}
    forced = f", as options.strategy={problem.strategy!r} asks" * bool(problem.strategy)
    lines = [str(problem), f"chosen: {strategy}{forced}; predicted {costs[id(strategy)]}"]
    lines += [f"  {i}. {step}" for i, step in enumerate(strategy.steps(), 1)]
    lines += [f"  {note}" for note in notes]
    others = [entry for entry in compared if entry[0] is not strategy]
    if others:
        lines.append("compared with")
        lines += [f"  {each!s:<34} {cost}" for each, cost in others]
    return "\n".join(lines)


# -- reading one rank's arguments ------------------------------------------------------------------


def _call(arrays: Mapping[str, ArraySpec | None], words: Words, options: MatmulOptions) -> Call:
    """The call with specs in place of arrays. Raises ValueError or TypeError on this rank."""
    qualifiers = words.qualifiers
    transpose, conjugate = (
        qualifiers if isinstance(qualifiers, Qualifiers) else _qualifiers(qualifiers)
    )
    options_of(MatmulPlanPreferences, words.preferences, "preferences").check()
    return Call(
        operands=(arrays["a"], arrays["b"], arrays["c"]),
        distributions=_distributions(words.distributions),
        complex_scalars=words.complex_scalars,
        has_beta=words.has_beta,
        transpose=transpose,
        conjugate=conjugate,
        options=options,
        epilog=_epilog(words.epilog),
        inputs=_inputs(arrays, words.inputs),
        scales=_scales(arrays, words.scales),
    )


def _inputs(
    arrays: Mapping[str, ArraySpec | None], names: Any
) -> tuple[tuple[str, ArraySpec | None], ...]:
    """The inputs of the epilog by name; None for one that no epilog has."""
    if names is None:
        return ()
    if not isinstance(names, tuple):
        if isinstance(names, Mapping):
            return ()
        raise TypeError(f"epilog_inputs is a dictionary of arrays, not {type(names).__name__}")
    unnamed = [name for name in names if not isinstance(name, str)]
    if unnamed:
        raise TypeError(f"the names of epilog_inputs are strings, not {unnamed[0]!r}")
    return tuple((name, arrays[name] if name in INPUTS else None) for name in sorted(names))


def _scales(arrays: Mapping[str, ArraySpec | None], kinds: Any) -> tuple[Given, ...]:
    if not isinstance(kinds, tuple):
        return given_scales(kinds)  # None, or something that raises
    return tuple(
        arrays[name] if kind == "array" else kind for name, kind in zip(SCALES, kinds, strict=True)
    )


def _read_scales(scales: Any) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    """The kinds of scales, the arrays among them, and what is known of their values."""
    try:
        given, values = given_scales(scales), scales_in_order(scales)
        numbers = tuple(known_scale(x) for x in values)
    except (TypeError, ValueError):  # raised again where the call is described
        return scales, _NO_SCALES, _NO_SCALES
    kinds = tuple(
        "array" if isinstance(spec, ArraySpec) and number is None else spec
        for spec, number in zip(given, numbers, strict=True)
    )
    arrays = tuple(x if kind == "array" else None for x, kind in zip(values, kinds, strict=True))
    return kinds, arrays, numbers


def _flags(given: Any) -> Any:
    """The qualifiers in plain data; what is none as it came."""
    try:
        return Qualifiers(*_qualifiers(given))
    except (TypeError, ValueError):
        return given


def _is_complex(value: Any) -> bool:
    return isinstance(value, complex) or "complex" in str(getattr(value, "dtype", ""))


def _is_inplace(options: Any) -> bool:
    if options is None:
        return False
    named = options.get("inplace") if isinstance(options, Mapping) else None
    inplace = options.inplace if isinstance(options, MatmulOptions) else named
    return isinstance(inplace, (bool, np.bool_)) and bool(inplace)


def _qualifiers(
    given: Any,
) -> tuple[tuple[bool, bool, bool], tuple[bool, bool, bool]]:
    """Which of a, b and c are transposed, and which conjugated. Raises ValueError."""
    if given is None:
        return (False, False, False), (False, False, False)
    entries = np.asarray(given)
    names = entries.dtype.names or ()
    if entries.shape not in ((2,), (3,)) or not {"is_transpose", "is_conjugate"} <= set(names):
        raise ValueError(
            "qualifiers is an array of two or three entries of matrix_qualifiers_dtype, for a, b "
            f"and c, not {given!r}"
        )
    flags = [(bool(e["is_transpose"]), bool(e["is_conjugate"])) for e in entries]
    flags += [(False, False)] * (3 - len(flags))
    (ta, ca), (tb, cb), (tc, cc) = flags
    return (ta, tb, tc), (ca, cb, cc)


def _distributions(given: Any) -> tuple[Distribution, ...]:
    """The distributions of a, b and the result. Raises ValueError."""
    found = tuple(given) if isinstance(given, (list, tuple, Sequence)) else ()
    known = len(found) == 3
    for each in found:
        known = known and isinstance(each, Distribution)
    if not known:
        raise ValueError(
            "distributions holds three Distribution objects, for a, b and the result, not "
            f"{given!r}"
        )
    return found


def _epilog(given: Any) -> MatmulEpilog:
    """The epilog, the default for None. Raises ValueError."""
    if given is None:
        return MatmulEpilog.DEFAULT
    try:
        return MatmulEpilog(given)
    except ValueError:
        raise ValueError(f"epilog is a MatmulEpilog, not {given!r}") from None
