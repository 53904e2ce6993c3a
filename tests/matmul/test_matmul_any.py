"""Any product, of operands distributed in any way, in any memory, against NumPy in double."""

from __future__ import annotations

import matmul_cases as cases
import numpy as np
from hypothesis import given

from arrangements import part_of
from draws import drawn
from shardmath.linalg.advanced import Matmul, MatmulOptions, matmul, matrix_qualifiers_dtype


def qualifiers_of(case):
    made = np.zeros(3, matrix_qualifiers_dtype)
    for index in (0, 1):
        made[index]["is_transpose"] = case.transpose[index]
        made[index]["is_conjugate"] = case.conjugate[index]
    return made


def globals_of(case):
    """The global a, b and c; c holds NaN where it must not be read."""
    rng = np.random.default_rng(case.seed)
    a, b, c = (cases.random_matrix(rng, shape, case.dtype) for shape in case.shapes)
    if case.beta == 0:
        c[...] = np.nan
    return a, b, c


def op(array, transpose, conjugate):
    array = array.T if transpose else array
    return array.conj() if conjugate else array


def run_case(context, plain):
    case = cases.Case(**plain)
    rank, size = context.rank, case.size
    dists = cases.decoded(case, rank)
    whole = globals_of(case)
    with context:
        a, b, c = (
            cases.Stored(part_of(x, d, rank, size), stores[rank], case.library)
            for x, d, stores in zip(whole, dists, case.stores, strict=True)
        )
        named = {
            "distributions": dists,
            "alpha": case.alpha,
            "beta": case.beta,
            "qualifiers": qualifiers_of(case),
        }
        operands = [a.array, b.array] + ([] if case.beta is None else [c.array])
        strategy, kind = None, "auto"
        if case.force is not None:
            with Matmul(*operands, **named) as planned:
                planned.plan()
                listed = cases.strategies_of(planned.explain())
                kinds = sorted({kind for _, kind in listed})
                kind = kinds[case.force % len(kinds)]
                of_kind = [label for label, each in listed if each == kind]
                strategy = of_kind[case.force // len(kinds) % len(of_kind)]
        options = MatmulOptions(inplace=case.inplace, strategy=strategy)
        got = matmul(*operands, **named, options=options)
    result = c if case.inplace else None
    assert (got is c.array) == case.inplace
    ops = [op(x, t, j) for x, t, j in zip(whole, case.transpose, case.conjugate, strict=False)]
    want, bound = (
        part_of(x, dists[2], rank, size)
        for x in cases.expected(
            *ops, None if case.beta is None else whole[2], case.alpha, case.beta
        )
    )
    host = result.host if result else a._library.host_view(got)
    assert type(got) is type(a.array)
    assert host.shape == want.shape and host.dtype == a.part.dtype
    assert (abs(cases.wide(host) - want) <= bound).all(), kind
    assert a.untouched() and b.untouched()
    assert c.untouched_around() if case.inplace else c.untouched()
    return kind


SETTINGS = drawn(130)


@SETTINGS
@given(case=cases.cases())
def test_any_product(contexts, case):
    kinds = contexts.run(run_case, case.plain(), ranks=case.size)
    assert len(set(kinds)) == 1


@SETTINGS
@given(case=cases.cases())
def test_any_product_in_thin_panels(thin_contexts, case):
    kinds = thin_contexts.run(run_case, case.plain(), ranks=case.size)
    assert len(set(kinds)) == 1
