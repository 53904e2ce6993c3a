"""The product that all ranks have agreed on: D = F(alpha op(A) @ op(B) + beta C).

`check` turns all ranks' descriptions into one `Problem`, or raises the same error on every rank
where they do not fit together. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardmath.arrays.dtypes import FLOAT8
from shardmath.base.immutable import Immutable
from shardmath.context.agreement import require_equal
from shardmath.geometry import Layout
from shardmath.local.epilog import MatmulEpilog, requirements
from shardmath.operators.layouts import bind_layout, infer_layout
from shardmath.operators.matmul.description import MATRICES, Description
from shardmath.operators.matmul.options import extras_dtype
from shardmath.operators.matmul.scaling import Scaling, agree_granularities


class Problem(Immutable):
    """The product that all ranks have agreed on.

    `a` (m, k), `b` (k, n) and `d` (m, n) are the layouts of op(A), op(B) and D: transposed already,
    where the qualifiers say so. `sums_c`: every rank has a C of its own, and all are added.
    `compute` is a MatmulComputeType. `scaling` is that of eight-bit floats, None for other types.
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
    scaling: Scaling | None = None
    compute: int | None = None
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
        """The type of an epilog's inputs and outputs beside D."""
        return self.result if self.scaling is None else self.scaling.extras

    def widened(self) -> Problem:
        """This product with float32 operands instead of scaled eight-bit ones."""
        return self if self.scaling is None else replace(self, dtype="float32")


def gradient_layouts(problem: Problem) -> tuple[Layout, Layout, Layout]:
    """Three layouts of the gradient of a bias: of the matrix whose lines are summed; of the sums
    that each rank has, as a column; and of those that each rank gets, which are its rows of D, or,
    for the columns of op(B), all.
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


def check_operands(specs: Sequence[Sequence[Any]]) -> None:
    """Raise ValueError where operands or options do not fit, whatever the epilog."""
    _check_factors([Description(*spec) for spec in specs])


def check(specs: Sequence[Sequence[Any]]) -> Problem:
    """The problem that all ranks' descriptions make. Raises ValueError where they do not fit."""
    descriptions = [Description(*spec) for spec in specs]
    first = descriptions[0]
    options = dict(first.options)
    a, b = _check_factors(descriptions)
    names = [MatmulEpilog(own.epilog).name for own in descriptions]
    epilog = MatmulEpilog[require_equal("epilog", names)]
    require_equal(
        "the names of epilog_inputs", [[n for n, _ in own.inputs] for own in descriptions]
    )
    shape = (a.global_shape[0], b.global_shape[1])
    sums_c = epilog is MatmulEpilog.ALLREDUCE
    d = bind_layout(
        f"the result, {_by(shape)}", [own.distributions[2] for own in descriptions], shape
    )
    if sums_c:
        d = Layout.replicated(shape, len(descriptions))
    _check_c(descriptions, d)
    _check_inputs(descriptions, d, epilog)
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
        scaling=_scaling(descriptions, a, b),
    )


def _scaling(descriptions: Sequence[Description], a: Layout, b: Layout) -> Scaling | None:
    first = descriptions[0]
    if not first.scales:
        return None
    c = first.operands[2]
    for_a, for_b = agree_granularities([own.scales for own in descriptions], (a, b))
    return Scaling(
        given=(first.operands[0][1], first.operands[1][1]),
        extras=_extras(first),
        a=for_a,
        b=for_b,
        c=c is not None and c[1] in FLOAT8,
        d=first.result in FLOAT8,
        amax=dict(first.options)["result_amax"],
    )


def _extras(description: Description) -> str:
    """The type of an epilog's inputs and outputs beside D."""
    c = description.operands[2]
    return extras_dtype(description.result, None if c is None else c[1])


def _check_factors(descriptions: Sequence[Description]) -> tuple[Layout, Layout]:
    """The layouts of op(A) and op(B). Raises ValueError where operands or options do not fit."""
    for index, name in enumerate(MATRICES):
        _check_same_kind(name, [own.operands[index] for own in descriptions])
    for entries in zip(*(own.options for own in descriptions), strict=True):
        require_equal(f"options.{entries[0][0]}", [value for _, value in entries])
    for field in ("transpose", "conjugate", "result"):
        require_equal(
            _NAMES_OF_FLAGS.get(field, field), [getattr(own, field) for own in descriptions]
        )
    transpose = descriptions[0].transpose
    a, b = (_layout(descriptions, index, transposed=transpose[index]) for index in (0, 1))
    if a.global_shape[1] != b.global_shape[0]:
        raise ValueError(
            f"op(a) is {_by(a.global_shape)} and op(b) is {_by(b.global_shape)}: the inner extents "
            f"{a.global_shape[1]} and {b.global_shape[0]} differ"
        )
    return a, b


_NAMES_OF_FLAGS = {"transpose": "is_transpose", "conjugate": "is_conjugate"}


def _check_same_kind(name: str, facts: list[Any]) -> None:
    given = require_equal(f"whether {name} is given", [fact is not None for fact in facts])
    if given:
        require_equal(f"the library and memory of {name}", [fact[0] for fact in facts])
        require_equal(f"the dtype of {name}", [fact[1] for fact in facts])


def _layout(descriptions: Sequence[Description], index: int, *, transposed: bool) -> Layout:
    """The layout of op(X), its global shape inferred from all local shapes."""
    distributions = [own.distributions[index] for own in descriptions]
    layout = infer_layout(
        MATRICES[index], distributions, [own.operands[index][2] for own in descriptions]
    )
    return layout.transposed() if transposed else layout


def _check_c(descriptions: Sequence[Description], d: Layout) -> None:
    for rank, own in enumerate(descriptions):
        c = own.operands[2]
        if c is not None and tuple(c[2]) != d.local_shape(rank):
            raise ValueError(
                f"rank {rank}: c has local shape {tuple(c[2])}; the result's distribution gives "
                f"{d.local_shape(rank)}"
            )


def _check_inputs(descriptions: Sequence[Description], d: Layout, epilog: MatmulEpilog) -> None:
    dtype = _extras(descriptions[0])
    for rank, own in enumerate(descriptions):
        m, n = d.local_shape(rank)
        needed = {e.name: e for e in requirements(epilog, m, n, dtype).inputs}
        given = dict(own.inputs)
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
