"""Programs of products, performed by the interpreter: every strategy, all ranks in one process."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draws import drawn

sys.path.append(str(Path(__file__).parent.parent / "matmul"))

import matmul_cases as cases
import test_matmul_epilogs as epilogs
from interpreter import interpret

from arrangements import part_of
from shardmath.arrays.libraries.numpy import NumPy
from shardmath.distribution import Replicated, Slab
from shardmath.linalg.advanced import MatmulEpilog, MatmulOptions, matrix_qualifiers_dtype
from shardmath.machine import Machine
from shardmath.operators.matmul.description import arguments_of
from shardmath.operators.matmul.operation import MATMUL
from shardmath.operators.matmul.program import product_program
from shardmath.operators.matmul.strategy import candidates
from shardmath.program.analysis import fused
from shardmath.program.steps import Move, Synchronise

ANY = drawn(80)


def described(a, b, c, **named):
    """(arrays, spec, numbers) of one rank's call with new results."""
    arguments = arguments_of(a, b, c, **named)
    arrays = dict(zip(MATMUL.names.operands, arguments.operands, strict=True))
    specs = {name: None if x is None else NumPy().spec(x) for name, x in arrays.items()}
    specs |= dict.fromkeys(MATMUL.names.results)
    spec = MATMUL.describe(specs, arguments.words, arguments.options or MatmulOptions())
    numbers = dict(zip(MATMUL.names.numbers, arguments.numbers, strict=True))
    return {name: x for name, x in arrays.items() if x is not None}, spec, numbers


def every_strategy(calls, order):
    """The label and the results of all ranks, for each strategy of a call of all ranks."""
    arrays, specs, numbers = zip(*calls, strict=True)
    problem = MATMUL.check(specs)
    for strategy in candidates(problem.widened()):
        ranks = range(problem.size)
        programs = [product_program(problem, strategy, rank) for rank in ranks]
        yield strategy.label, interpret(programs, arrays, order, numbers)


def calls_of(case):
    """The calls of all ranks of a product; what D is to be, and how far it may be from that."""
    rng = np.random.default_rng(case.seed)
    a, b, c = (cases.random_matrix(rng, shape, case.dtype) for shape in case.shapes)
    if case.beta == 0:
        c[...] = np.nan
    qualifiers = np.zeros(3, matrix_qualifiers_dtype)
    qualifiers["is_transpose"][:2], qualifiers["is_conjugate"][:2] = case.transpose, case.conjugate
    ops = [x.T if t else x for x, t in zip((a, b), case.transpose, strict=True)]
    ops = [x.conj() if t else x for x, t in zip(ops, case.conjugate, strict=True)]
    addend = None if case.beta is None else c
    want, bound = cases.expected(*ops, addend, case.alpha, case.beta)
    calls = []
    for rank in range(case.size):
        given = cases.decoded(case, rank)
        parts = [
            np.array(part_of(x, d, rank, case.size)) for x, d in zip((a, b, c), given, strict=True)
        ]
        parts[2] = None if case.beta is None else parts[2]
        named = {"distributions": given, "alpha": case.alpha, "beta": case.beta}
        calls.append(described(*parts, **named, qualifiers=qualifiers))
    return calls, want, bound


@ANY
@given(data=st.data(), case=cases.cases())
def test_any_product(data, case):
    calls, want, bound = calls_of(case)
    order = data.draw(st.permutations(range(case.size)))
    for label, results in every_strategy(calls, order):
        for rank, result in enumerate(results):
            of_d = cases.decoded(case, rank)[2]
            mine, most = (part_of(x, of_d, rank, case.size) for x in (want, bound))
            assert (abs(cases.wide(result["d"]) - mine) <= most).all(), label


def calls_with_epilog(whole, name, kind, size, first=Slab.X, second=Slab.X):
    """The calls of all ranks."""
    calls = []
    for rank in range(size):
        d = epilogs.d_distribution(kind, rank, size)

        def mine(x, d=d, rank=rank):
            return np.array(part_of(x, d, rank, size))

        rows = mine(whole.bias.repeat(epilogs.N, 1))
        inputs = {}
        if "BIAS" in name:
            inputs["bias"] = np.array(rows[:, 0] if rows.shape[1] else whole.bias[: len(rows), 0])
        if name.startswith("DRELU"):
            inputs["relu_aux"] = np.asfortranarray(epilogs.packed(mine(whole.mask)))
        if name.startswith("DGELU"):
            slopes = epilogs.padded(mine(whole.slopes)).astype(whole.slopes.dtype)
            inputs["gelu_aux"] = np.asfortranarray(slopes)
        parts = ((whole.a, first), (whole.b, second))
        a, b = (np.array(part_of(x, slab, rank, size)) for x, slab in parts)
        calls.append(
            described(
                *(a, b, mine(whole.c)),
                distributions=[first, second, d],
                alpha=0.5,
                beta=2,
                epilog=MatmulEpilog[name],
                epilog_inputs=inputs or None,
            )
        )
    return calls


def check_epilog(whole, name, kind, results, near):
    """D and what the epilog makes beside it, of all ranks."""
    want, vector = whole.result(name)
    for rank, result in enumerate(results):
        d, size = epilogs.d_distribution(kind, rank, len(results)), len(results)
        x = part_of(whole.biased if "BIAS" in name else whole.sums, d, rank, size)
        np.testing.assert_allclose(result["d"], part_of(want, d, rank, size), **near)
        aux = {key.split()[-1]: array for key, array in result.items() if key != "d"}
        mine = vector
        if name.endswith("_BGRAD") or name == "BGRADA":
            mine = part_of(vector[:, None].repeat(epilogs.N, 1), d, rank, size)
        epilogs.check_aux(name, aux, x, mine, lambda got, want: np.allclose(got, want, **near))


@pytest.mark.parametrize("kind", epilogs.KINDS)
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", epilogs.EPILOGS)
def test_every_epilog(name, size, kind):
    whole = epilogs.Whole(5, "float64")
    calls = calls_with_epilog(whole, name, kind, size)
    for _, results in every_strategy(calls, range(size)[::-1]):
        check_epilog(whole, name, kind, results, {"rtol": 0, "atol": 1e-11})


def test_every_rank_s_c_is_added():
    a, b = np.ones((4, 6)), np.ones((6, 5))
    named = {"distributions": [Slab.Y, Slab.X, Replicated()], "beta": 2.0}
    named["epilog"] = MatmulEpilog.ALLREDUCE
    calls = [
        described(
            *(np.array(part_of(x, d, rank, 3)) for x, d in ((a, Slab.Y), (b, Slab.X))),
            np.full((4, 5), rank + 1.0),
            **named,
        )
        for rank in range(3)
    ]
    for _, results in every_strategy(calls, [2, 0, 1]):
        assert all((result["d"] == 6 + 2 * 6).all() for result in results)


def test_eight_bit_floats():
    """Scales by rows, columns, blocks and matrices; a narrow C; the greatest value of all ranks."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rng, size = np.random.default_rng(1), 3
    a, b, c = (
        rng.integers(-4, 5, s).astype(ml_dtypes.float8_e4m3fn) for s in ((7, 8), (8, 5), (7, 5))
    )
    of_rows, of_columns = rng.integers(1, 4, 7).astype("f4"), rng.integers(1, 4, 5).astype("f4")
    numbers = (a.astype("f4") * of_rows[:, None]) @ (b.astype("f4") * of_columns)
    want = (2 * numbers + 3 * c.astype("f4")) * 0.25
    calls = []
    for rank in range(size):
        a_, b_, c_, d_ = Slab.X, Slab.Y, Slab.X, Slab.X
        parts = [np.array(part_of(x, d, rank, size)) for x, d in ((a, a_), (b, b_), (c, c_))]
        rows = np.array(part_of(of_rows[:, None], a_, rank, size))[:, 0]
        columns = np.array(part_of(of_columns[None], b_, rank, size))[0]
        scales = {"a": rows, "b": columns, "c": 3.0, "d": 0.25}
        arrays, spec, told = described(
            *parts, distributions=[a_, b_, d_], alpha=2.0, beta=1.0, quantization_scales=scales
        )
        calls.append((arrays, spec, told))
    want = np.clip(want, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    for label, results in every_strategy(calls, [1, 2, 0]):
        for rank, result in enumerate(results):
            mine = part_of(want, Slab.X, rank, size).astype("f4")
            assert (result["d"].astype("f4") == mine).all(), label


def test_moves_of_factors_are_parts_of_products():
    """On cores; and what crosses no rank waits for none."""
    a = np.ones((4, 6))
    calls = [
        described(
            *(np.array(part_of(x, Slab.X, rank, 2)) for x in (a, a.T)),
            None,
            distributions=[Slab.X, Slab.X, Slab.X],
        )
        for rank in range(2)
    ]
    program = MATMUL.program(MATMUL.check([call[1] for call in calls]), Machine("cpu", (0, 0)), 0)
    assert sum(isinstance(step, Move) for step in program.steps) == 1
    lowered = fused(program)
    assert not any(isinstance(step, Move) for step in lowered.steps)
    assert lowered.workspace == {} and list(lowered.published) == ["b"]
    whole = [described(a, a.T, None, distributions=[Replicated()] * 3) for _ in range(2)]
    program = MATMUL.program(MATMUL.check([call[1] for call in whole]), Machine("cpu", (0, 0)), 0)
    assert not any(isinstance(step, Synchronise) for step in program.steps)
