"""What is to be computed, as every rank sees it: D = F(alpha op(A) @ op(B) + beta C).

`describe` turns one rank's call into plain data, and raises for what that rank can see is wrong.
`check` turns all ranks' descriptions into one `Problem`, and raises, the same on every rank, for
what does not fit together. Both are pure: neither touches an element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from shardmath.arrays import ArraySpec, dtypes
from shardmath.arrays.dtypes import FLOAT8
from shardmath.base.immutable import Immutable
from shardmath.context.agreement import require_equal
from shardmath.geometry import Distribution, Layout
from shardmath.local.epilog import MatmulEpilog, requirements
from shardmath.operators.layouts import bind_layout, infer_layout
from shardmath.operators.matmul.options import (
    FROM_FLOAT8,
    MULTIPLIED,
    MatmulOptions,
    extras_dtype,
    result_dtype,
)
from shardmath.operators.matmul.scaling import (
    Given,
    Scaling,
    agree_granularities,
    check_scales,
    readings,
)

_NAMES = ("a", "b", "c")


class Call(NamedTuple):
    """One rank's call, with the arrays reduced to their specs, and alpha and beta to their kind."""

    operands: tuple[ArraySpec | None, ...]  # a, b, c
    distributions: tuple[Distribution, ...]
    complex_scalars: tuple[bool, bool]  # alpha, beta
    has_beta: bool
    transpose: tuple[bool, bool, bool]
    conjugate: tuple[bool, bool, bool]
    options: MatmulOptions
    epilog: MatmulEpilog
    inputs: tuple[tuple[str, ArraySpec | None], ...]  # None for one that no epilog has
    scales: tuple[Given, ...] = (None, None, None, None)  # of a, b, c and the result


class Problem(Immutable):
    """The product that all ranks have agreed on.

    `a` (m, k), `b` (k, n) and `d` (m, n) are the layouts of op(A), op(B) and D; a transpose in the
    qualifiers is resolved in them. `sums_c`: every rank's C is added, rather than one distributed
    C.
    """

    a: Layout
    b: Layout
    d: Layout
    dtype: str
    result: str
    transpose: tuple[bool, bool]
    conjugate: tuple[bool, bool]
    has_c: bool
    sums_c: bool
    epilog: MatmulEpilog
    strategy: str | None
    scaling: Scaling | None = None  # of a product of eight-bit floats
    compute: int | None = None  # a MatmulComputeType
    blocking: bool = False

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.d.size

    @property
    def shape(self) -> tuple[int, int, int]:
        """(m, n, k)."""
        (m, k), n = self.a.global_shape, self.b.global_shape[1]
        return m, n, k

    def __str__(self) -> str:
        m, n, k = self.shape
        extra = f", epilog {self.epilog.name}" if self.epilog else ""
        plus = " + beta c" if self.has_c else ""
        given = (self.dtype,) if self.scaling is None else tuple(dict.fromkeys(self.scaling.given))
        kinds = (
            " x ".join(given)
            if given == (self.result,)
            else f"{' x '.join(given)} -> {self.result}"
        )
        scales = f", {self.scaling}" if self.scaling else ""
        return (
            f"matmul ({m} x {k}) @ ({k} x {n}){plus}, {kinds} on {self.size} ranks{extra}{scales}"
        )

    @property
    def extras(self) -> str:
        """The type of what an epilog reads and makes beside D."""
        return self.result if self.scaling is None else self.scaling.extras

    def widened(self) -> Problem:
        """The product of the numbers that scaled elements stand for: its operands are float32."""
        return self if self.scaling is None else replace(self, dtype="float32")


def gradient_layouts(problem: Problem) -> tuple[Layout, Layout, Layout]:
    """The layouts of the gradient of a bias: of the matrix that is summed along one axis; of the
    elements, as a column, of which each rank has sums; and of those that it is to get: the rows
    that it has of D, or, of columns of op(B), all.
    """
    layout, axis = {
        MatmulEpilog.BGRADA: (problem.a, 0),
        MatmulEpilog.BGRADB: (problem.b, 1),
    }.get(problem.epilog, (problem.d, 0))
    extent = layout.global_shape[axis]
    held = Layout.product((extent, 1), [layout.column(axis), None], size=layout.size)
    if problem.epilog is MatmulEpilog.BGRADB:
        return layout, held, Layout.replicated((extent, 1), layout.size)
    rows = Layout.product((extent, 1), [problem.d.column(0), None], size=layout.size)
    return layout, held, rows


class Facts(NamedTuple):
    """What ranks tell each other of a call: plain, hashable data."""

    operands: tuple[Any, ...]  # (library and memory, dtype, shape) of a, b, c, or None
    distributions: tuple[Any, ...]
    has_c: bool
    transpose: tuple[bool, bool, bool]
    conjugate: tuple[bool, bool, bool]
    options: tuple[Any, ...]  # (name, value)
    result: str
    epilog: int
    inputs: tuple[Any, ...]  # (name, (library and memory, dtype, shape, strides)) of epilog inputs
    scales: tuple[Any, ...]  # the granularities that those of a, of b can mean; or nothing


@lru_cache(maxsize=256)
def describe(call: Call) -> Facts:
    """The call in plain data. Raises ValueError or TypeError for what is wrong on this rank."""
    a = call.operands[0]
    assert a is not None
    for name, spec in zip(_NAMES, call.operands, strict=True):
        if spec is not None:
            _check_operand(name, spec)
            if place_of(spec) != place_of(a):
                raise ValueError(
                    f"a is {place_of(a)}, and {name} is {place_of(spec)}; operands are arrays of "
                    "one library, in one kind of memory"
                )
    if a.space == "cpu":
        dtypes.to_numpy(a.dtype)  # raises where bfloat16 lacks the library that has it
    for name, spec in call.inputs:
        if spec is not None and spec.library != a.library:
            raise TypeError(f"{name} is a {spec.library} array, and a is of {a.library}")
    _check_scalars(call, a.dtype)
    call.options.check(a.dtype)
    c = call.operands[2]
    result = result_dtype(call.options, a.dtype, None if c is None else c.dtype)
    if call.options.result_amax and result not in FLOAT8:
        raise ValueError(f"result_amax wants a float8 result, and this one is {result}")
    if call.options.inplace and c is None:
        raise ValueError("options.inplace=True overwrites c, and no c is given")
    return Facts(
        operands=tuple(None if spec is None else _fact(spec) for spec in call.operands),
        distributions=tuple(each.encode() for each in call.distributions),
        has_c=c is not None,
        transpose=call.transpose,
        conjugate=call.conjugate,
        options=call.options.compared,
        result=result,
        epilog=int(call.epilog),
        inputs=tuple(
            (name, () if spec is None else (*_fact(spec), spec.strides))
            for name, spec in call.inputs
        ),
        scales=_readings(call, result),
    )


def _readings(call: Call, result: str) -> tuple[Any, ...]:
    """What this rank's scales can mean. Raises ValueError or TypeError for what does not fit."""
    a, b, c = call.operands
    assert a is not None and b is not None
    if a.dtype not in FLOAT8:
        if any(call.scales):
            raise ValueError(f"quantization_scales want float8 operands, not {a.dtype}")
        return ()
    narrow_c = c is not None and c.dtype in FLOAT8
    needed = {"a": True, "b": True, "c": narrow_c, "d": result in FLOAT8}
    check_scales(call.scales, needed, a)
    found = []
    for index, (spec, transposed) in enumerate(zip((a, b), call.transpose, strict=False)):
        rows, columns = spec.shape[::-1] if transposed else spec.shape
        found.append(readings(call.scales[index], index, (rows, columns), transposed))
    return tuple(found)


def check_operands(specs: Sequence[Sequence[Any]]) -> None:
    """Raise what can be known of descriptions that do not fit before an epilog is known."""
    _check_factors([Facts(*spec) for spec in specs])


def check(specs: Sequence[Sequence[Any]]) -> Problem:
    """The problem that all ranks' descriptions make. Raises ValueError where they do not fit."""
    facts = [Facts(*spec) for spec in specs]
    first = facts[0]
    options = dict(first.options)
    a, b = _check_factors(facts)
    names = [MatmulEpilog(each.epilog).name for each in facts]
    epilog = MatmulEpilog[require_equal("epilog", names)]
    require_equal("the names of epilog_inputs", [[n for n, _ in each.inputs] for each in facts])
    shape = (a.global_shape[0], b.global_shape[1])
    sums_c = epilog is MatmulEpilog.ALLREDUCE
    d = bind_layout(f"the result, {_by(shape)}", [each.distributions[2] for each in facts], shape)
    if sums_c:
        d = Layout.replicated(shape, len(facts))
    _check_c(facts, d)
    _check_inputs(facts, d, epilog)
    return Problem(
        a=a,
        b=b,
        d=d,
        dtype=first.operands[0][1],
        result=first.result,
        transpose=first.transpose[:2],
        conjugate=first.conjugate[:2],
        has_c=first.has_c,
        sums_c=sums_c,
        epilog=epilog,
        strategy=options["strategy"],
        compute=options["compute_type"],
        blocking=options["blocking"] is True,
        scaling=_scaling(facts, a, b),
    )


def _scaling(facts: Sequence[Facts], a: Layout, b: Layout) -> Scaling | None:
    first = facts[0]
    if not first.scales:
        return None
    c = first.operands[2]
    for_a, for_b = agree_granularities([each.scales for each in facts], (a, b))
    return Scaling(
        given=(first.operands[0][1], first.operands[1][1]),
        extras=_extras(first),
        a=for_a,
        b=for_b,
        c=c is not None and c[1] in FLOAT8,
        d=first.result in FLOAT8,
        amax=dict(first.options)["result_amax"],
    )


def _extras(facts: Facts) -> str:
    """The type of what an epilog reads and makes beside D."""
    c = facts.operands[2]
    return extras_dtype(facts.result, None if c is None else c[1])


def _check_factors(facts: Sequence[Facts]) -> tuple[Layout, Layout]:
    """The layouts of op(A) and op(B). Raises ValueError where operands or options do not fit."""
    for index, name in enumerate(_NAMES):
        _check_same_kind(name, [each.operands[index] for each in facts])
    for entries in zip(*(each.options for each in facts), strict=True):
        require_equal(f"options.{entries[0][0]}", [value for _, value in entries])
    for field in ("transpose", "conjugate", "result"):
        require_equal(_SAID.get(field, field), [getattr(each, field) for each in facts])
    transpose = facts[0].transpose
    a, b = (_layout(facts, index, transposed=transpose[index]) for index in (0, 1))
    if a.global_shape[1] != b.global_shape[0]:
        raise ValueError(
            f"op(a) is {_by(a.global_shape)} and op(b) is {_by(b.global_shape)}: the inner extents "
            f"{a.global_shape[1]} and {b.global_shape[0]} differ"
        )
    return a, b


_SAID = {"transpose": "is_transpose", "conjugate": "is_conjugate"}


def _check_operand(name: str, spec: ArraySpec) -> None:
    if spec.ndim != 2:
        column = f": as a column a vector is {name}[:, None]" if spec.ndim == 1 else ""
        raise ValueError(f"{name} has shape {spec.shape}; matmul takes matrices{column}")
    on_gpu = spec.space == "cuda" and spec.dtype in MULTIPLIED
    if on_gpu and dtypes.of(spec.dtype).number is None:
        raise ValueError(f"{name} has dtype {spec.dtype}, which GPUs do not multiply")
    if spec.dtype not in MULTIPLIED:
        raise ValueError(
            f"{name} has dtype {spec.dtype}; supported are {', '.join(MULTIPLIED)}"
            f"{dtypes.advice(spec.dtype)}"
        )


def _check_scalars(call: Call, dtype: str) -> None:
    _, b, c = call.operands
    if b is not None and b.dtype != dtype and not {b.dtype, dtype} <= FLOAT8:
        raise ValueError(f"a has dtype {dtype} and b has {b.dtype}; they must be equal")
    if b is not None and b.dtype == dtype == "float8_e5m2":
        raise ValueError("a and b are both float8_e5m2; one of them is to be float8_e4m3fn")
    if c is None and call.has_beta:
        raise ValueError("beta is given without c; pass c, or leave beta out")
    if c is not None:
        if not call.has_beta:
            raise ValueError("c is given without beta; pass beta too, for example beta=1")
        expected = result_dtype(call.options, dtype, c.dtype)
        fits = c.dtype in (FROM_FLOAT8 if dtype in FLOAT8 else (dtype, expected))
        if not fits or (call.options.inplace and c.dtype != expected):
            raise ValueError(f"c has dtype {c.dtype}; the result has {expected}")
        if call.transpose[2] or call.conjugate[2]:
            raise ValueError("c can be neither transposed nor conjugated by its qualifiers")
    real = dtypes.of(dtype).kind != "c"
    if real and (call.conjugate[0] or call.conjugate[1]):
        raise ValueError(f"a qualifier conjugates an operand of {dtype}, which is real")
    for name, is_complex in zip(("alpha", "beta"), call.complex_scalars, strict=True):
        if real and is_complex:
            raise ValueError(f"{name} is complex, and the operands are {dtype}")


def _fact(spec: ArraySpec) -> tuple[str, str, tuple[int, ...]]:
    """What all layers compare of an array: its library and memory, dtype, and shape."""
    return place_of(spec), spec.dtype, spec.shape


def place_of(spec: ArraySpec) -> str:
    """The library of an array and the kind of its memory, in words."""
    return f"{spec.library} on {spec.space}"


def _check_same_kind(name: str, facts: list[Any]) -> None:
    given = require_equal(f"whether {name} is given", [fact is not None for fact in facts])
    if given:
        require_equal(f"the library and memory of {name}", [fact[0] for fact in facts])
        require_equal(f"the dtype of {name}", [fact[1] for fact in facts])


def _layout(facts: Sequence[Facts], index: int, *, transposed: bool) -> Layout:
    """The layout of op(X), its global shape inferred from all local shapes."""
    distributions = [each.distributions[index] for each in facts]
    layout = infer_layout(_NAMES[index], distributions, [each.operands[index][2] for each in facts])
    return layout.transposed() if transposed else layout


def _check_c(facts: Sequence[Facts], d: Layout) -> None:
    for rank, each in enumerate(facts):
        c = each.operands[2]
        if c is not None and tuple(c[2]) != d.local_shape(rank):
            raise ValueError(
                f"rank {rank}: c has local shape {tuple(c[2])}; the result's distribution gives "
                f"{d.local_shape(rank)}"
            )


def _check_inputs(facts: Sequence[Facts], d: Layout, epilog: MatmulEpilog) -> None:
    dtype = _extras(facts[0])
    for rank, each in enumerate(facts):
        m, n = d.local_shape(rank)
        needed = {e.name: e for e in requirements(epilog, m, n, dtype).inputs}
        given = dict(each.inputs)
        if set(needed) != set(given):
            raise ValueError(
                f"rank {rank}: epilog {epilog.name} takes {_list(needed)} in epilog_inputs; "
                f"got {_list(given)}"
            )
        for name, extra in needed.items():
            _, kind, shape, strides = given[name]
            mismatch = extra.mismatch(kind, tuple(shape), tuple(strides))
            if mismatch:
                raise ValueError(f"rank {rank}: {mismatch}")


def _by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _list(names: Mapping[str, Any]) -> str:
    return ", ".join(sorted(names)) or "nothing"
