"""Strategies as data, without ranks: what is chosen, what each covers, what each costs."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import matmul_cases as cases
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arrangements import distributions
from copying import copy_moves
from draws import drawn
from shardmath.geometry import BlockCyclic, Layout, ProcessGrid, Replicated, Slab, decode
from shardmath.local.epilog import MatmulEpilog
from shardmath.machine import CORES, H200, H200_MULTI_HOST
from shardmath.operators.matmul.problem import Problem
from shardmath.operators.matmul.strategy import candidates, choose
from shardmath.program import factors
from shardmath.program.factors import Source, intervals
from shardmath.redistribution import TransferPlan

X, Y, R = Slab.X, Slab.Y, Replicated()
GRID = ProcessGrid(shape=(2, 2), layout=ProcessGrid.Layout.ROW_MAJOR)
CYCLIC = BlockCyclic(GRID, (64, 64))


def problem(shape, a, b, d, *, dtype="float64", strategy=None):
    """`a`, `b`, `d`: what each rank holds of op(A), op(B) and D."""
    m, n, k = shape
    return Problem(
        a=Layout.bind(a, (m, k)),
        b=Layout.bind(b, (k, n)),
        d=Layout.bind(d, (m, n)),
        dtype=dtype,
        result=dtype,
        transpose=(False, False),
        conjugate=(False, False),
        has_c=False,
        sums_c=False,
        epilog=MatmulEpilog.DEFAULT,
        strategy=strategy,
    )


def alike(shape, a, b, d, size, **more):
    return problem(shape, [a] * size, [b] * size, [d] * size, **more)


CHOICES = [
    ("X X X", X, X, X, (4096, 4096, 4096), "all-gather"),
    ("Y Y Y", Y, Y, Y, (4096, 4096, 4096), "all-gather"),
    ("X Y X: b is smaller", X, Y, X, (8192, 512, 512), "all-gather"),
    ("k split, rows wanted", Y, X, X, (512, 512, 65536), "reduce-scatter"),
    ("k split, columns wanted", Y, X, Y, (512, 512, 65536), "reduce-scatter"),
    ("k split, blocks wanted", Y, X, CYCLIC, (512, 512, 65536), "reduce-scatter"),
    ("k split, all wanted", Y, X, R, (512, 512, 65536), "all-reduce"),
    ("rows with all of b", X, R, X, (4096, 4096, 4096), "local"),
    ("columns with all of a", R, Y, Y, (4096, 4096, 4096), "local"),
    ("all everywhere", R, R, CYCLIC, (4096, 4096, 4096), "local"),
    ("tiny, all wanted", X, X, R, (8, 8, 8), "replicate"),
    ("blocks", CYCLIC, CYCLIC, CYCLIC, (4096, 4096, 4096), "stationary-c"),
    ("large, all wanted", X, X, R, (4096, 4096, 4096), "redistribute"),
    ("long sums of whole operands", Y, Y, R, (64, 64, 1 << 20), "redistribute"),
    ("nothing", X, X, X, (0, 0, 0), "local"),
]


@pytest.mark.parametrize(
    ("a", "b", "d", "shape", "kind"), [row[1:] for row in CHOICES], ids=[r[0] for r in CHOICES]
)
def test_what_is_chosen(a, b, d, shape, kind):
    chosen, _ = choose(alike(shape, a, b, d, 4), CORES)
    assert chosen.kind == kind, str(chosen)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_one_rank_multiplies_where_it_is(dtype):
    chosen, compared = choose(alike((7, 8, 9), X, Y, X, 1, dtype=dtype), CORES)
    assert (chosen.kind, len(compared)) == ("local", 1)


@st.composite
def problems(draw, dtypes=("float64",)):
    size = draw(st.integers(1, 6))
    m, n, k = (draw(st.integers(0, 9)) for _ in range(3))
    a, b, d = (
        [decode(each) for each in draw(distributions(shape, size))]
        for shape in ((m, k), (k, n), (m, n))
    )
    return problem((m, n, k), a, b, d, dtype=draw(st.sampled_from(dtypes)))


def indices(spans):
    return [i for lo, hi in spans.ranges() for i in range(lo, hi)]


def marked(shape, parts):
    """An array of `shape` that is True on the product of the index sets `parts`."""
    table = np.zeros(shape, bool)
    table[np.ix_(*parts)] = True
    return table


def held(layout, rank):
    return marked(layout.global_shape, [indices(s) for s in layout.spans(rank)])


@drawn(80)
@given(problem=problems())
def test_the_work_covers_the_product(problem):
    m, n, k = problem.shape
    for strategy in candidates(problem):
        done = np.zeros((m, n, k), int)
        for rank in range(problem.size):
            axes = (strategy.rows[rank], strategy.columns[rank], strategy.depth[rank])
            done += marked((m, n, k), [indices(axis) for axis in axes])
            whole = strategy.depth[rank].length == k
            assert strategy.reduces or whole or 0 in strategy.sums.local_shape(rank)
        assert (done == 1).all() if strategy.reduces else (done >= 1).all(), str(strategy)


def counted(strategy):
    """(operations, bytes touched by the product and after it, bytes received) of each rank, element
    by element.
    """
    problem = strategy.problem
    narrow = {"float16": 2, "float64": 8, "complex64": 8}[problem.dtype]
    wide = max(narrow, 4)
    result = []
    for rank in range(problem.size):
        received = after = 0
        m, n, k = (len(indices(x[rank])) for x in (strategy.rows, strategy.columns, strategy.depth))
        product = narrow * (m * k + k * n) + wide * m * n if m and n else 0
        for have, need in ((problem.a, strategy.a), (problem.b, strategy.b)):
            received += narrow * int((held(need, rank) & ~held(have, rank)).sum())
        wanted, reduced = held(problem.d, rank), held(strategy.reduced, rank)
        if strategy.reduces:
            after += 2 * wide * int(reduced.sum())  # the own part, or zeros
            for src in range(problem.size):
                if src != rank and strategy.depth[src].length:
                    shared = int((reduced & held(strategy.sums, src)).sum())
                    received += wide * shared
                    after += 2 * wide * shared  # a sum is read, and written
        if strategy.moves_result:
            after += 2 * wide * int((wanted & reduced).sum())
        if strategy.moves_result or strategy.reduces:
            after += (wide + narrow) * int(wanted.sum())  # D is rounded from it
        received += wide * int((wanted & ~reduced).sum())
        result.append(((m, n, k), product, after, received))
    return result


@drawn(60)
@given(problem=problems(("float16", "float64", "complex64")))
def test_costs_are_counted(problem):
    rates = replace(CORES, cache=100)  # bytes
    for strategy in candidates(problem):
        cost, by_rank = strategy.cost(rates), counted(strategy)
        assert cost.flops == max(2 * m * n * k for (m, n, k), *_ in by_rank)
        assert cost.touched == max(product + after for _, product, after, _ in by_rank)
        assert cost.received == max(nbytes for *_, nbytes in by_rank)
        slowest = 0.0
        for (m, n, k), product, after, received in by_rank:
            seconds = 2 * m * n * k / rates.product(problem.dtype)
            if min(m, n) > 1:
                seconds += product / rates.packing
            own = [rates.cached if x < 100 else rates.memory for x in (product, after)]
            seconds = max(seconds, product / own[0])
            slowest = max(slowest, seconds + after / own[1] + received / rates.link)
        begun = rates.gathering * any(strategy.moves_inputs)
        begun += rates.finishing * (strategy.reduces + strategy.moves_result)
        assert cost.seconds == pytest.approx(slowest + begun)


@pytest.mark.parametrize("rates", [CORES, H200, H200_MULTI_HOST])
def test_products_with_vectors_are_bound_by_memory(rates):
    """They take no less than reading the matrix does, and many columns take less than so many
    products with one.
    """
    dtype = "float64"
    (one, cost), *_ = choose(alike((1 << 14, 1, 1 << 12), X, R, X, 4, dtype=dtype), rates)[1]
    assert (one.kind, cost.touched) == ("local", 8 * ((1 << 24) + (1 << 12) + (1 << 12)))
    assert cost.seconds >= cost.touched / rates.memory
    for columns in (4, 16, 64):
        shape = (1 << 14, columns, 1 << 12)
        (_, several), *_ = choose(alike(shape, X, R, X, 4, dtype=dtype), rates)[1]
        assert cost.touched < several.touched < 2 * cost.touched
        assert cost.seconds < several.seconds < columns * cost.seconds


@drawn(60)
@given(problem=problems())
def test_the_choice_is_predicted_best_and_any_other_can_be_asked_for(problem):
    chosen, compared = choose(problem, CORES)
    assert compared[0][0] is chosen
    assert all(compared[0][1].seconds <= cost.seconds for _, cost in compared)
    assert len({strategy.label for strategy, _ in compared}) == len(compared)
    for other, _ in compared:
        assert choose(replace(problem, strategy=other.label), CORES)[0].label == other.label
        assert choose(replace(problem, strategy=other.kind), CORES)[0].kind == other.kind


def test_a_strategy_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(ValueError, match=r"no strategy 'reduce-scatter'.*there are") as caught:
        choose(alike((64, 64, 64), X, R, X, 4, strategy="reduce-scatter"), CORES)
    assert "local (stationary c)" in str(caught.value)


def test_steps_say_what_moves():
    def steps(a, b, d, strategy):
        return choose(alike((8, 8, 8), a, b, d, 4, strategy=strategy), CORES)[0].steps()

    assert steps(X, R, X, "local") == ["multiply 2 x 8 x 8 on rank 0"]
    assert steps(X, X, X, "all-gather") == [
        "take all of b from peers: (8, 8) on rank 0",
        "multiply 2 x 8 x 8 on rank 0",
    ]
    found = steps(Y, X, R, "all-reduce")
    assert found[0] == "multiply 8 x 8 x 2 on rank 0"
    assert re.match(r"add the ranks' products, each rank its part: 8 x 8 on 4 ranks", found[1])
    assert found[2].startswith("move the result to where it is wanted: 8 x 8 on 4 ranks, repl")


@pytest.mark.parametrize("panel", [1, 7, 1000])
@drawn(60)
@given(problem=problems(), thin=st.sampled_from([1, 3, 100]))
def test_a_rank_reads_its_operands_interval_by_interval(problem, thin, panel):
    rng = np.random.default_rng(0)
    m, n, k = problem.shape
    whole = rng.random((m, k)), rng.random((k, n))
    patch = pytest.MonkeyPatch()
    patch.setattr(factors, "_THIN", thin)
    try:
        for strategy in candidates(problem):
            for rank in range(problem.size):
                sources = [
                    Source.plan(transfer, rank, axis=1 - i, panel_elements=panel)
                    for i, transfer in enumerate(strategy.transfers)
                ]
                if 0 in strategy.sums.local_shape(rank) or not strategy.depth[rank].length:
                    continue
                cuts = intervals(*sources)
                assert [lo for lo, _ in cuts] == [0] + [hi for _, hi in cuts[:-1]]
                assert cuts[-1][1] == strategy.depth[rank].length
                for source, transfer, x in zip(sources, strategy.transfers, whole, strict=True):
                    check_reading(source, transfer, x, rank, cuts)
    finally:
        patch.undo()


def check_reading(source: Source, transfer: TransferPlan, x, rank, cuts):
    parts = [
        x[np.ix_(*(indices(s) for s in transfer.src.spans(src)))]
        for src in range(transfer.src.size)
    ]
    want = x[np.ix_(*(indices(s) for s in transfer.dst.spans(rank)))]
    if source.axis == 1:
        parts, want = [part.T for part in parts], want.T
    assert (source.extent, source.width) == want.shape
    if source.pieces:
        assert [p.lo for p in source.pieces] == [0] + [p.hi for p in source.pieces[:-1]]
        for p in source.pieces:
            read = parts[p.src][p.k : p.k + p.hi - p.lo, p.other : p.other + source.width]
            assert (read == want[p.lo : p.hi]).all()
        return
    assert {lo // source.panel for lo, _ in cuts} == {(hi - 1) // source.panel for _, hi in cuts}
    for lo in range(0, source.extent, source.panel):
        hi = min(lo + source.panel, source.extent)
        got = np.full((hi - lo, source.width), np.nan)
        into = got.T if source.axis == 1 else got
        of = [part.T for part in parts] if source.axis == 1 else parts
        copy_moves(source.gather_moves(lo, hi), of.__getitem__, into)
        assert (got == want[lo:hi]).all()


@pytest.mark.parametrize("given", [(X, X, X), (X, Y, X), (Y, X, X), (Y, X, R)])
def test_many_ranks_are_not_asked_two_by_two(given, monkeypatch):
    # The table of all pairs is for layouts in which elements have several owners, or none.
    for name in ("shardmath.geometry.moves", "shardmath.operators.matmul.strategy"):
        monkeypatch.setattr(sys.modules[name], "common_elements", lambda *_: pytest.fail("a table"))
    _, compared = choose(alike((4096, 4096, 4096), *given, 64), CORES)
    assert len(compared) > 20
