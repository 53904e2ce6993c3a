"""One rank's call of a matrix product: its arguments, and the description that ranks compare.

`arguments_of` runs in each call and raises nothing. `describe` turns a call that is new into plain
data, and raises for what this rank alone can see is wrong. Neither touches an element of a matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardmath.arrays import ArraySpec, dtypes
from shardmath.arrays.dtypes import FLOAT8
from shardmath.geometry import Distribution
from shardmath.local.epilog import INPUTS, MatmulEpilog
from shardmath.local.epilog import OUTPUTS as EPILOG_OUTPUTS
from shardmath.operators.arguments import options_of
from shardmath.operators.matmul.options import (
    FROM_FLOAT8,
    MULTIPLIED,
    MatmulOptions,
    MatmulPlanPreferences,
    result_dtype,
)
from shardmath.operators.matmul.scaling import (
    NO_SCALES,
    SCALES,
    Given,
    check_scales,
    read_scales,
    readings,
)
from shardmath.program.notes import is_complex
from shardmath.program.performing import Arguments

MATRICES = ("a", "b", "c")
OUTPUTS = (*EPILOG_OUTPUTS, "result_amax")  # beside D
_NO_EXTRAS = (None,) * (len(INPUTS) + len(SCALES))
_NO_OUTPUTS = (None,) * len(OUTPUTS)


class Qualifiers(NamedTuple):
    """Which of a, b and c are transposed, and which conjugated."""

    transpose: tuple[bool, bool, bool]
    conjugate: tuple[bool, bool, bool]


_PLAIN = Qualifiers((False,) * 3, (False,) * 3)


class Words(NamedTuple):
    """The arguments of a call beside its arrays and numbers; `describe` reads most of them.

    The first three and the last are fixed when an object is planned. `error` is the exception that
    reading the qualifiers or the scales has raised.
    """

    distributions: Any
    qualifiers: Qualifiers
    epilog: Any
    inputs: Any  # names of epilog inputs
    scales: tuple[Given, ...]  # of a, b, c and the result
    complex_scalars: tuple[bool, bool]  # whether alpha, and beta, are complex
    has_beta: bool
    error: Exception | None
    preferences: Any


class Description(NamedTuple):
    """One rank's call as plain, hashable data, which ranks compare."""

    operands: tuple[Any, ...]  # (library and memory, dtype, shape) of a, b, c, or None
    distributions: tuple[Any, ...]
    has_c: bool
    transpose: tuple[bool, bool, bool]
    conjugate: tuple[bool, bool, bool]
    options: tuple[Any, ...]  # (name, value)
    result: str
    epilog: int
    inputs: tuple[Any, ...]  # (name, (library and memory, dtype, shape, strides)) of epilog inputs
    scales: tuple[Any, ...]  # the granularities that the scales of a and of b can mean


def arguments_of(
    a: Any,
    b: Any,
    c: Any = None,
    *,
    distributions: Any,
    alpha: Any = None,
    beta: Any = None,
    epilog: Any = None,
    epilog_inputs: Any = None,
    qualifiers: Any = None,
    quantization_scales: Any = None,
    options: Any = None,
    preferences: Any = None,
    stream: Any = None,
) -> Arguments:
    """One rank's arguments for the driver.

    An error is kept for `describe`, which raises it inside the agreement: on all ranks.
    """
    flags, error = _PLAIN, None
    kinds, held, numbers = NO_SCALES
    try:
        if qualifiers is not None:
            flags = _read_qualifiers(qualifiers)
        if quantization_scales is not None:
            kinds, held, numbers = read_scales(quantization_scales)
    except (TypeError, ValueError) as wrong:
        error = wrong
    extras, names = _NO_EXTRAS, epilog_inputs
    if epilog_inputs is not None or quantization_scales is not None:
        arrays = epilog_inputs if isinstance(epilog_inputs, Mapping) else {}
        names = tuple(arrays) if arrays else epilog_inputs
        extras = (*(arrays.get(name) for name in INPUTS), *held)
    words = Words(
        tuple(distributions) if isinstance(distributions, (list, tuple)) else distributions,
        flags,
        epilog,
        names,
        kinds,
        (alpha is not None and is_complex(alpha), beta is not None and is_complex(beta)),
        beta is not None,
        error,
        preferences,
    )
    alpha, beta = 1.0 if alpha is None else alpha, 0.0 if beta is None else beta
    results = (c if _is_inplace(options) else None, *_NO_OUTPUTS)
    return Arguments((a, b, c, *extras), results, words, options, stream, (alpha, beta, *numbers))


def describe(
    arrays: Mapping[str, ArraySpec | None], said: tuple[Any, ...], options: MatmulOptions
) -> Description:
    """The call in plain data; `said` are its Words. Raises ValueError or TypeError for what is
    wrong on this rank.
    """
    words = Words(*said)
    if words.error is not None:
        raise words.error
    options_of(MatmulPlanPreferences, words.preferences, "preferences").check()
    distributions, epilog = three_distributions(words.distributions), _epilog(words.epilog)
    inputs, (a, b, c) = _inputs(arrays, words.inputs), (arrays[name] for name in MATRICES)
    assert a is not None and b is not None, "required"
    for name, spec in zip(MATRICES, (a, b, c), strict=True):
        if spec is not None:
            _check_operand(name, spec, a)
    if a.space == "cpu":
        dtypes.to_numpy(a.dtype)  # raises where bfloat16 lacks the library that has it
    for name, spec in inputs:
        if spec is not None and spec.library != a.library:
            raise TypeError(
                f"{name} is a {spec.library} array and a is of {a.library}: convert one"
            )
    _check_scalars(words, options, a.dtype, b.dtype, None if c is None else c.dtype)
    options.check(a.dtype)
    result = result_dtype(options, a.dtype, None if c is None else c.dtype)
    if options.result_amax and result not in FLOAT8:
        raise ValueError(f"result_amax wants a float8 result, not {result}: leave it out")
    if options.inplace and c is None:
        raise ValueError("options.inplace=True overwrites c: pass c, or inplace=False")
    scales = [
        arrays[name] if kind == "array" else kind
        for name, kind in zip(SCALES, words.scales, strict=True)
    ]
    return Description(
        operands=tuple(None if spec is None else _fact(spec) for spec in (a, b, c)),
        distributions=tuple(distribution.encode() for distribution in distributions),
        has_c=c is not None,
        transpose=words.qualifiers.transpose,
        conjugate=words.qualifiers.conjugate,
        options=options.compared,
        result=result,
        epilog=int(epilog),
        inputs=tuple(
            (name, () if spec is None else (*_fact(spec), spec.strides)) for name, spec in inputs
        ),
        scales=_readings((a, b, c), words.qualifiers.transpose, scales, result),
    )


def _readings(
    operands: tuple[ArraySpec, ArraySpec, ArraySpec | None],
    transpose: Sequence[bool],
    scales: Sequence[Given],
    result: str,
) -> tuple[Any, ...]:
    """The granularities that this rank's scales of a and of b can mean. Raises ValueError or
    TypeError for scales that do not fit.
    """
    a, b, c = operands
    if a.dtype not in FLOAT8:
        if any(scales):
            raise ValueError(
                f"quantization_scales want float8 operands, not {a.dtype}: leave them out"
            )
        return ()
    narrow_c = c is not None and c.dtype in FLOAT8
    check_scales(scales, {"a": True, "b": True, "c": narrow_c, "d": result in FLOAT8}, a)
    return tuple(
        readings(scales[index], index, spec.shape, transposed)
        for index, (spec, transposed) in enumerate(zip((a, b), transpose, strict=False))
    )


def place_of(spec: ArraySpec) -> str:
    """The library of an array and the kind of its memory, in words."""
    return f"{spec.library} on {spec.space}"


def _fact(spec: ArraySpec) -> tuple[str, str, tuple[int, ...]]:
    """What ranks compare of an array. Strides may differ from rank to rank."""
    return place_of(spec), spec.dtype, spec.shape


def _check_operand(name: str, spec: ArraySpec, a: ArraySpec) -> None:
    if spec.ndim != 2:
        column = f": as a column a vector is {name}[:, None]" if spec.ndim == 1 else ""
        raise ValueError(f"{name} has shape {spec.shape}; matmul takes matrices{column}")
    on_gpu = spec.space == "cuda" and spec.dtype in MULTIPLIED
    if on_gpu and dtypes.of(spec.dtype).number is None:
        raise ValueError(f"{name} has dtype {spec.dtype}, which GPUs do not multiply: convert it")
    if spec.dtype not in MULTIPLIED:
        raise ValueError(
            f"{name} has dtype {spec.dtype}; supported are {', '.join(MULTIPLIED)}"
            f"{dtypes.advice(spec.dtype)}"
        )
    if place_of(spec) != place_of(a):
        raise ValueError(
            f"a is {place_of(a)}, and {name} is {place_of(spec)}; operands are arrays of "
            "one library, in one kind of memory"
        )


def _check_scalars(
    words: Words, options: MatmulOptions, dtype: str, other: str, addend: str | None
) -> None:
    """Raise ValueError where the types of b and c (`other`, `addend`), or scalars, do not suit an a
    of type `dtype`.
    """
    if other != dtype and not {other, dtype} <= FLOAT8:
        raise ValueError(f"a has dtype {dtype} and b has {other}; they must be equal")
    if other == dtype == "float8_e5m2":
        raise ValueError("a and b are both float8_e5m2; one of them must be float8_e4m3fn")
    transpose, conjugate = words.qualifiers
    if addend is None and words.has_beta:
        raise ValueError("beta is given without c; pass c, or leave beta out")
    if addend is not None:
        if not words.has_beta:
            raise ValueError("c is given without beta; pass beta too, for example beta=1")
        expected = result_dtype(options, dtype, addend)
        fits = addend in (FROM_FLOAT8 if dtype in FLOAT8 else (dtype, expected))
        if not fits or (options.inplace and addend != expected):
            raise ValueError(f"c has dtype {addend}; the result has {expected}")
        if transpose[2] or conjugate[2]:
            raise ValueError("c can be neither transposed nor conjugated by its qualifiers")
    real = dtypes.of(dtype).kind != "c"
    if real and (conjugate[0] or conjugate[1]):
        raise ValueError(f"a qualifier conjugates an operand of {dtype}, which is real")
    for name, wrong in zip(("alpha", "beta"), words.complex_scalars, strict=True):
        if real and wrong:
            raise ValueError(f"{name} is complex, and the operands are {dtype}")


# -- arguments as the user gave them ---------------------------------------------------------------


def _read_qualifiers(given: Any) -> Qualifiers:
    """The qualifiers in an array of two or three entries. Raises ValueError for anything else."""
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
    return Qualifiers((ta, tb, tc), (ca, cb, cc))


def three_distributions(given: Any) -> tuple[Distribution, ...]:
    """The distributions of a, b and the result. Raises ValueError."""
    given_three = tuple(given) if isinstance(given, Sequence) else ()
    if len(given_three) == 3 and all(isinstance(x, Distribution) for x in given_three):
        return given_three
    raise ValueError(
        f"distributions holds three Distribution objects, for a, b and the result, not {given!r}"
    )


def _epilog(given: Any) -> MatmulEpilog:
    """The epilog, the default for None. Raises ValueError."""
    if given is None:
        return MatmulEpilog.DEFAULT
    try:
        return MatmulEpilog(given)
    except ValueError:
        raise ValueError(f"epilog is a MatmulEpilog, not {given!r}") from None


def _inputs(
    arrays: Mapping[str, ArraySpec | None], names: Any
) -> tuple[tuple[str, ArraySpec | None], ...]:
    """The inputs of the epilog by name; None for a name that no epilog has."""
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


def _is_inplace(options: Any) -> bool:
    if options is None:
        return False
    named = options.get("inplace") if isinstance(options, Mapping) else None
    inplace = options.inplace if isinstance(options, MatmulOptions) else named
    return isinstance(inplace, (bool, np.bool_)) and bool(inplace)
