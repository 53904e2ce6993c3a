"""Products of eight-bit floats, of every granularity of scales, against numbers in double."""

from __future__ import annotations

import itertools

import float8_cases as cases
import numpy as np
import pytest
from float8_cases import E4, E5, MODES, NUMBERS

from arrangements import part_of
from shardmath.arrays import library_named
from shardmath.arrays.dtypes import to_numpy
from shardmath.linalg.advanced import (
    Matmul,
    MatmulEpilog,
    MatmulQuantizationScales,
    matmul,
    matrix_qualifiers_dtype,
)

SHAPES = {
    "small": (19, 13, 33),
    "blocks": (300, 272, 420),
    "panels": (300, 272, 150),
    "thin": (1, 5, 300),
    "none": (6, 4, 0),
}


def arrays(library, x, order="C"):
    return x if np.ndim(x) == 0 else library.from_host(np.array(x, order=order))


def qualifiers(transposed):
    made = np.zeros(3, matrix_qualifiers_dtype)
    for index, flag in enumerate(transposed):
        made[index]["is_transpose"] = flag
    return made


def one_product(context, library, layout, shape, case, sums, *, force=None, through=Matmul):
    """One product of a table, `through` the class or the function.

    Returns (what the class explains, the worst error in units of what is allowed).
    """
    mode_a, mode_b, dtype_a, dtype_b, result, transposed, order = case
    m, n, k = shape
    rank, size = context.rank, context.size
    a, b = cases.factors_of(7, shape, (dtype_a, dtype_b))
    stored = [(k, m) if transposed[0] else (m, k), (n, k) if transposed[1] else (k, n), (m, n)]
    dists = [cases.layout(layout, stored, r, size) for r in range(size)]
    factors = [
        cases.Factor(i, x, mode, [each[i] for each in dists], rank, 3 + i, transposed[i])
        for i, (x, mode) in enumerate(((a, mode_a), (b, mode_b)))
    ]
    scales = {"a": arrays(library, factors[0].scales)}
    scales["b"] = arrays(library, np.atleast_1d(factors[1].scales), "F")
    if result in cases.LARGEST:
        scales["d"] = 40.0 if result == E4 else 3000.0
    scale_d = scales.get("d", 1.0)
    operands = [arrays(library, factor.part, order) for factor in factors]
    given = {
        "distributions": dists[rank],
        "qualifiers": qualifiers(transposed),
        "quantization_scales": MatmulQuantizationScales(**scales),
        "options": {
            "result_type": NUMBERS[result],
            "result_amax": result in cases.LARGEST,
            "strategy": force,
        },
        "alpha": -0.75,
    }
    explained = ""
    if through is matmul:
        got = matmul(*operands, **given)
    else:
        with Matmul(*operands, **given) as mm:
            mm.plan()
            got = mm.execute()
            explained = mm.explain()
    got, aux = got if isinstance(got, tuple) else (got, {})
    one, two = (factor.numbers for factor in factors)
    exact = -0.75 * (one @ two) * scale_d
    limit = cases.bound(exact, one, two, result, scale_d=0.75 * scale_d, sums=sums)
    want, limit = (
        part_of(x, dists[rank][2], rank, size) for x in (cases.clipped(exact, result), limit)
    )
    host = library.host_view(got)
    assert host.shape == want.shape and host.dtype == to_numpy(result), (host.dtype, result)
    if aux:
        most = abs(exact / scale_d).max(initial=0.0)
        assert abs(library.host_view(aux["result_amax"])[0] - most) <= 2e-3 * most
    wrong = abs(host.astype(np.float64) - want) / limit
    worst = float(wrong.max(initial=0.0))
    return explained, worst if not np.isnan(wrong).any() else np.inf


def table(context, library_name, layout, shape, cases_, sums=cases.SUMS):
    """The cases of a table that are wrong.

    The class does one of four, another for each number of ranks, and the function the others.
    """
    library, wrong = library_named(library_name), []
    with context:
        for number, case in enumerate(cases_):
            through = matmul if (number + context.size) % 4 else Matmul
            explained, worst = one_product(
                context, library, layout, shape, tuple(case), sums, through=through
            )
            if worst > 1:
                wrong.append((*case, worst))
            assert through is matmul or "scales: a by" in explained
    return wrong


PAIRS = list(itertools.product(MODES, MODES))
KINDS = [(E4, E4, "bfloat16"), (E4, E5, E5), (E5, E4, "float32"), (E4, E4, E4), (E4, E4, "float16")]
TURNS = [(False, False), (True, False), (False, True), (True, True)]


def all_cases():
    """Every pair of granularities, with types, transposes and orders in turn."""
    return [
        (*pair, *KINDS[i % 5], TURNS[i // 2 % 4], "CF"[i // 3 % 2]) for i, pair in enumerate(PAIRS)
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", list(cases.LAYOUTS))
def test_every_granularity(contexts, size, layout):
    """Each shape has half of the pairs of granularities; in the next layout, or on one rank more,
    it has the others.
    """
    library = ("numpy", "torch")[size % 2]
    turn = (list(cases.LAYOUTS).index(layout) + size) % 2
    for number, name in enumerate(("small", "thin")):
        some = [case for i, case in enumerate(all_cases()) if (i + i // 4 + number + turn) % 2]
        found = contexts.run(table, library, layout, SHAPES[name], some, ranks=size)
        assert found == [[]] * size


@pytest.mark.parametrize("layout", list(cases.LAYOUTS))
def test_blocks_that_ranks_share_out(contexts, thin_contexts, layout):
    """Each shape has half of the cases, and in the next layout the others."""
    some, turn = all_cases()[5::3], list(cases.LAYOUTS).index(layout) % 2
    for pool, name, first in ((contexts, "blocks", turn), (thin_contexts, "panels", 1 - turn)):
        found = pool.run(table, "torch", layout, SHAPES[name], some[first::2], ranks=4)
        assert found == [[]] * 4


def test_nothing_to_add(contexts):
    some = all_cases()[::2]
    assert contexts.run(table, "numpy", "rows", SHAPES["none"], some, ranks=3) == [[]] * 3


def every_strategy(context, library_name, layout, shape, sums=cases.SUMS):
    """Each strategy that explain() lists: those that are wrong, and their kinds."""
    from matmul_cases import strategies_of

    library, wrong, kinds = library_named(library_name), [], set()
    case = ("vectors", "squares", E4, E5, "float32", (False, True), "C")
    with context:
        explained, _ = one_product(context, library, layout, shape, case, sums)
        for label, kind in strategies_of(explained):
            _, worst = one_product(
                context, library, layout, shape, case, sums, force=label, through=matmul
            )
            kinds.add(kind)
            if worst > 1:
                wrong.append((label, kind, worst))
    return wrong, sorted(kinds)


@pytest.mark.parametrize("layout", ["rows", "reduce", "everywhere", "blocks"])
def test_every_strategy(contexts, layout):
    for wrong, kinds in contexts.run(every_strategy, "numpy", layout, SHAPES["blocks"], ranks=4):
        assert not wrong and len(kinds) > 1


EPILOGS = ["RELU", "RELU_BIAS", "GELU_BIAS", "GELU_AUX_BIAS", "RELU_AUX", "DGELU", "DRELU_BGRAD",
           "BGRADA", "BGRADB"]  # fmt: skip


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def after(name, x, bias, slope):
    """D of the sums x, in double; `slope` is what an epilog with a derivative reads."""
    x = x + bias if "BIAS" in name else x
    if name.startswith("RELU"):
        return np.maximum(x, 0)
    if name.startswith("GELU"):
        return gelu(x)
    if name == "DGELU":
        step = 1e-5
        return x * (gelu(slope + step) - gelu(slope - step)) / (2 * step)
    if name.startswith("DRELU"):
        return np.where(slope > 0, x, 0)
    return x


def check_sums(got, want):
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=0.1)


def run_epilogs(context, library_name, result, addend, sums=cases.SUMS):
    """Names of epilogs that are wrong: with c, its scale, a bias and amax, where they go."""
    library, wrong = library_named(library_name), []
    rank, size, (m, n, k) = context.rank, context.size, (24, 40, 48)
    rng = np.random.default_rng(5)
    a, b = cases.elements(rng, (m, k), E4), cases.elements(rng, (k, n), E5)
    c = cases.elements(rng, (m, n), addend)
    extras = addend if addend not in cases.LARGEST else "float16"
    extras = result if result not in cases.LARGEST else extras
    bias, slope = (cases.elements(rng, shape, extras) for shape in ((m, 1), (m, n)))
    dists = cases.layout("rows", [(m, k), (k, n), (m, n)], rank, size)
    parts = [
        np.array(part_of(x, dist, rank, size)) for x, dist in zip((a, b, c), dists, strict=True)
    ]
    mine = [np.array(part_of(x, dists[2], rank, size)) for x in (bias.repeat(n, 1), slope)]
    scales = {"a": 0.5, "b": 0.25}
    scales |= {"c": 2.0} if addend in cases.LARGEST else {}
    scale_d = 8.0 if result in cases.LARGEST else 1.0
    one, two = a.astype(float) * 0.5, b.astype(float) * 0.25
    sums_ = 1.5 * one @ two + 0.5 * c.astype(float) * scales.get("c", 1.0)
    with context:
        scales |= {"d": library.from_host(np.array([8.0], "f4"))} if scale_d > 1 else {}
        for name in EPILOGS:
            inputs = {}
            if "BIAS" in name:
                inputs["bias"] = library.from_host(mine[0][:, :1].copy())
            if name == "DGELU":
                padded = np.vstack([mine[1], np.zeros((-len(mine[1]) % 8, n), mine[1].dtype)])
                inputs["gelu_aux"] = library.from_host(np.asfortranarray(padded))
            if name.startswith("DRELU"):
                rows = (len(mine[1]) + 127) // 128 * 16
                mask = np.zeros((rows, n), np.uint8)
                bits = np.packbits((mine[1].astype(float) > 0).T, axis=1, bitorder="little").T
                mask[: len(bits)] = bits
                inputs["relu_aux"] = library.from_host(np.asfortranarray(mask))
            amax = result in cases.LARGEST
            got = matmul(
                *(library.from_host(x) for x in parts),
                distributions=dists,
                alpha=1.5,
                beta=0.5,
                epilog=MatmulEpilog[name],
                epilog_inputs=inputs or None,
                quantization_scales=scales,
                options={"result_type": NUMBERS[result], "result_amax": amax},
            )
            got, aux = got if isinstance(got, tuple) else (got, {})
            exact = after(name, sums_, bias.astype(float), slope.astype(float))
            limit = cases.bound(exact * scale_d, one, two, result, scale_d=3 * scale_d, sums=sums)
            want = part_of(cases.clipped(exact * scale_d, result), dists[2], rank, size)
            error = abs(library.host_view(got).astype(float) - want)
            if not (error <= part_of(limit, dists[2], rank, size) + 1e-5).all():
                wrong.append((name, float(error.max())))
            if amax:
                most = library.host_view(aux.pop("result_amax"))
                assert most.shape == (1,) and most.dtype == np.float32
                assert abs(most[0] - abs(exact).max()) <= 2e-3 * abs(exact).max(), name
            for key, x in aux.items():
                wanted = "uint8" if key == "relu_aux" else extras
                assert library.host_view(x).dtype == to_numpy(wanted), (key, wanted)
                if name in ("BGRADA", "BGRADB"):
                    rows = part_of(one, dists[2], rank, size).sum(1)
                    check_sums(
                        library.host_view(x).astype(float), {"A": rows, "B": two.sum(0)}[name[-1]]
                    )
    return wrong


@pytest.mark.parametrize(
    ("result", "addend"),
    [("bfloat16", "bfloat16"), (E4, "float16"), (E5, E5), ("float32", E4), (E4, "float32")],
)
@pytest.mark.parametrize("size", [1, 3])
def test_epilogs(contexts, size, result, addend):
    for library in ("numpy", "torch"):
        assert contexts.run(run_epilogs, library, result, addend, ranks=size) == [[]] * size


def saturate(context, library_name):
    """Too large a number, infinity and NaN, and the scale of D."""
    library = library_named(library_name)
    size, rank = context.size, context.rank
    a = np.full((size, 4), 2.0 + 6.0 * (rank == 0), to_numpy(E4))[rank : rank + 1]
    b = np.eye(4, 4 * size, 4 * rank).T[4 * rank : 4 * rank + 4].astype(to_numpy(E4))
    b[0, 0], b[1, 1], b[2, 2] = 100, -100, np.nan
    with context:
        for result, most in cases.LARGEST.items():
            got, aux = matmul(
                library.from_host(np.array(a)),
                library.from_host(np.array(b)),
                distributions=[cases.Slab.X, cases.Replicated(), cases.Slab.X],
                quantization_scales={"a": 1e3, "b": 1, "d": 0.5},
                options={"result_type": NUMBERS[result], "result_amax": True},
            )
            row = library.host_view(got).astype(float)[0]
            assert row[0] == most and row[1] == -most and np.isnan(row[2])
            assert np.isnan(library.host_view(aux["result_amax"])[0])


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_too_large_a_number_is_the_greatest(contexts, library):
    contexts.run(saturate, library, ranks=2)


def reset_scales(context, library_name):
    """The class sees other scales, keeps those that are not reset, and refuses other kinds."""
    library, rank, size = library_named(library_name), context.rank, context.size
    rng = np.random.default_rng(1)
    whole = [cases.elements(rng, shape, E4) for shape in ((8 * size, 16), (16, 8))]
    a, b = (np.array(part_of(x, cases.Slab.X, rank, size)) for x in whole)
    with context:
        rows = library.from_host(np.full((8, 1), 0.5, "f4"))
    exact = whole[0].astype(float) @ whole[1].astype(float)
    with context, Matmul(
        library.from_host(a),
        library.from_host(b),
        distributions=[cases.Slab.X] * 3,
        quantization_scales={"a": rows, "b": 2.0},
        options={"result_type": NUMBERS["float32"]},
    ) as mm:  # fmt: skip
        mm.plan()
        seen = []

        def factor():
            got = library.host_view(mm.execute()).astype(float)
            seen.append(float(np.median(got / part_of(exact, cases.Slab.X, rank, size))))

        factor()
        mm.reset_operands(quantization_scales={"b": 3.0})
        factor()
        mm.reset_operands(quantization_scales={"a": library.from_host(np.ones((8, 1), "f4"))})
        factor()
        with pytest.raises(ValueError, match="quantization_scales are"):
            mm.reset_operands(quantization_scales={"a": 1.0})
        mm.release_operands()
        with pytest.raises(ValueError, match="needs quantization_scales too"):
            mm.reset_operands(a=library.from_host(a), b=library.from_host(b))
        mm.reset_operands(
            a=library.from_host(a),
            b=library.from_host(b),
            quantization_scales={"a": rows, "b": 4},
        )
        factor()
        explained = mm.explain()
    assert "scales: a by row, b by tensor" in explained
    return [round(each, 3) for each in seen]


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_resetting_scales(contexts, library):
    assert contexts.run(reset_scales, library, ranks=2) == [[1.0, 1.5, 3.0, 2.0]] * 2
