"""What a product promises beside its value: bits, NaN, memory, contexts, plans that are kept."""

from __future__ import annotations

import hashlib

import matmul_cases as cases
import numpy as np
import pytest
import torch

from arrangements import part_of
from mistakes import heard, no_memory
from shardmath.arrays import library_named, library_of
from shardmath.distribution import BlockCyclic, BlockNonCyclic, ProcessGrid, Replicated, Slab
from shardmath.handles.allocation import allocate_symmetric_memory, is_symmetric
from shardmath.linalg.advanced import Matmul, MatmulEpilog, matmul, matrix_qualifiers_dtype
from shardmath.operators.workspace import Workspace

X, Y, R = Slab.X, Slab.Y, Replicated()


def cyclic(size):
    rows = 2 if size % 2 == 0 else 1
    return BlockCyclic(
        ProcessGrid(shape=(rows, size // rows), layout=ProcessGrid.Layout.COL_MAJOR), (5, 3)
    )


def layouts(size):
    """Distributions of a, b and the result under which every kind of strategy occurs."""
    blocks = cyclic(size)
    return [(X, X, X), (Y, X, X), (Y, X, R), (blocks, blocks, blocks), (X, Y, R), (X, R, X)]


def labels(mm):
    """The (label, kind) of the strategies that explain() lists."""
    return cases.strategies_of(mm.explain())


def part(x, d, context):
    return np.array(part_of(x, d, context.rank, context.size))


def every_strategy(context, shape, dtype):
    """Run every strategy of every layout; return the kinds that there were."""
    m, n, k = shape
    rng = np.random.default_rng(2)
    a, b = (cases.random_matrix(rng, s, dtype) for s in ((m, k), (k, n)))
    want, bound = cases.expected(a, b, None, None, None)
    kinds = set()
    with context:
        for dists in layouts(context.size):
            operands = part(a, dists[0], context), part(b, dists[1], context)
            with Matmul(*operands, distributions=dists) as mm:
                mm.plan()
                found = labels(mm)
            for label, kind in found:
                got = matmul(*operands, distributions=dists, options={"strategy": label})
                error = abs(cases.wide(got) - part(want, dists[2], context))
                assert (error <= part(bound, dists[2], context)).all(), (label, kind)
                kinds.add(kind)
    return sorted(kinds)


# Shapes for panels of the usual size, and for those of three indices of k: some 35 of them.
SHAPES = {"deep": ((33, 20, 700), (33, 20, 105)), "small": ((9, 8, 7), (9, 8, 7))}


@pytest.mark.parametrize("size", [2, 4, 5])
@pytest.mark.parametrize("name", SHAPES)
def test_every_kind_of_strategy(contexts, thin_contexts, size, name):
    """One type has panels of the usual size and the other thin ones; the reverse for the other
    shape, and for 2 ranks.
    """
    dtypes = ["float64", "float16"]
    if (size // 2 + list(SHAPES).index(name)) % 2:
        dtypes.reverse()
    for pool, shape, dtype in zip((contexts, thin_contexts), SHAPES[name], dtypes, strict=True):
        kinds = set(pool.run(every_strategy, shape, dtype, ranks=size)[0])
        assert kinds >= {"local", "all-gather", "reduce-scatter", "all-reduce", "redistribute"}
        assert "replicate" in kinds and (size == 5 or "stationary-c" in kinds)


def repeat(context, dists_index, repeats):
    """The hashes of repeated results; ranks arrive at different times."""
    m, n, k = 37, 29, 410
    rng = np.random.default_rng(4)
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    dists = layouts(context.size)[dists_index]
    operands = part(a, dists[0], context), part(b, dists[1], context)
    noise = np.random.default_rng(context.rank)
    hashes = set()
    with context, Matmul(*operands, distributions=dists) as mm:
        mm.plan()
        found = {label: set() for label, _ in labels(mm)}
        for label, hashes in found.items():
            for _ in range(repeats):
                sum(range(int(noise.integers(1, 30_000))))
                d = matmul(*operands, distributions=dists, options={"strategy": label})
                hashes.add(hashlib.sha256(np.ascontiguousarray(d)).hexdigest())
    return [len(hashes) for hashes in found.values()]


@pytest.mark.parametrize("index", range(6))
def test_the_same_bits_every_time(contexts, index):
    for counts in contexts.run(repeat, index, 10, ranks=4):
        assert set(counts) == {1}


def replicas(context):
    """The hashes of a replicated result of every strategy, on this rank."""
    rng = np.random.default_rng(4)
    a, b = rng.standard_normal((37, 90)), rng.standard_normal((90, 29))
    found = []
    with context:
        for dists in ((X, X, R), (Y, X, R), (R, R, R)):
            operands = part(a, dists[0], context), part(b, dists[1], context)
            d = matmul(*operands, distributions=dists)
            found.append(hashlib.sha256(d).hexdigest())
    return found


def test_replicas_hold_the_same_bits(contexts):
    first, *others = contexts.run(replicas, ranks=3)
    assert all(other == first for other in others)


def spread(context, dtype):
    """NaN and infinity in single elements, through every strategy."""
    rng = np.random.default_rng(6)
    a, b = (cases.random_matrix(rng, s, dtype) for s in ((11, 24), (24, 10)))
    a[3, 5], a[7, 20], b[2, 8], b[21, 1] = np.nan, np.inf, -np.inf, np.nan
    a[9, 2] = 0  # meets the infinity: NaN
    with np.errstate(invalid="ignore"), context:
        want = cases.wide(a) @ cases.wide(b)
        for dists in layouts(context.size):
            operands = part(a, dists[0], context), part(b, dists[1], context)
            mine = part(want, dists[2], context)
            with Matmul(*operands, distributions=dists) as mm:
                mm.plan()
                found = labels(mm)
            for label, _ in found:
                d = matmul(*operands, distributions=dists, options={"strategy": label})
                got = cases.wide(d)
                assert (np.isnan(got) == np.isnan(mine)).all(), label
                assert (np.isinf(got) == np.isinf(mine)).all(), label
                same = np.isinf(mine) & ~np.isnan(mine)
                assert (got[same] == mine[same]).all(), label


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_nan_and_infinity_spread_as_in_numpy(contexts, dtype):
    contexts.run(spread, dtype, ranks=4)


def read_c_or_not(context):
    a, b = np.ones((4, 3)), np.ones((3, 5))
    mine = [part(x, X, context) for x in (a, b, np.full((4, 5), np.nan))]
    with context:
        named = {"distributions": (X, X, X)}
        assert (matmul(*mine, beta=0, **named) == 3).all()
        assert np.isnan(matmul(*mine, beta=1, **named)).all()
        assert np.isnan(matmul(*mine[:2], alpha=np.nan, **named)).all()
        mine[0][...] = np.nan
        assert np.isnan(matmul(*mine[:2], alpha=0, **named)).all()  # as 0 * (a @ b) in NumPy
        whole = np.full((4, 5), np.nan)
        d = matmul(*mine[:2], whole, beta=0.0, epilog=MatmulEpilog.ALLREDUCE, **named)
        assert np.isnan(d).all()


def test_beta_0_does_not_read_c(contexts):
    contexts.run(read_c_or_not, ranks=2)


def where_results_lie(context):
    rank, size = context.rank, context.size
    a, b = np.ones((7, 6)), np.ones((6, 9))
    said = []
    with context:
        for library in ("numpy", "torch"):
            for stores in (("C", "C"), ("F", "F"), ("heap C", "C"), ("heap C", "heap F"),
                           ("heap F", "heap F"), ("C", "strided")):  # fmt: skip
                held = [
                    cases.Stored(part_of(x, Y, rank, size), store, library)
                    for x, store in zip((a, b), stores, strict=True)
                ]
                d = matmul(held[0].array, held[1].array, distributions=[Y, Y, Y])
                said.append((is_symmetric(d), library_of(d).spec(d).order, type(d).__name__))
                assert (np.asarray(d) == 6).all()
    return said


def test_where_results_lie(contexts):
    for said in contexts.run(where_results_lie, ranks=2):
        for kind, rows in (("ndarray", said[:6]), ("Tensor", said[6:])):
            assert rows == [
                (False, "C", kind),
                (False, "F", kind),
                (False, "C", kind),
                (True, "C", kind),
                (True, "F", kind),
                (False, "C", kind),
            ]


def lazy_tensors(context):
    """A conjugate view of a tensor on the heap is read as what it says, not as what lies there."""
    rng = np.random.default_rng(8)
    a, b = (cases.random_matrix(rng, s, "complex128") for s in ((6, 8), (8, 5)))
    with context:
        held = allocate_symmetric_memory(
            part(a, Y, context).T.shape, torch, dtype=torch.complex128, skip_symmetric_check=True
        )
        held[...] = torch.from_numpy(part(a, Y, context).conj().T.copy())
        other = torch.from_numpy(part(b, X, context))
        for layout in ((Y, X, X), (Y, X, R)):
            d = matmul(held.mH, other, distributions=layout)
            np.testing.assert_allclose(d.numpy(), part(a @ b, layout[2], context), atol=1e-12)
        held.requires_grad_()
        with torch.no_grad():
            assert not matmul(held.mH, other, distributions=(Y, X, X)).requires_grad


def test_lazily_conjugated_tensors(contexts):
    contexts.run(lazy_tensors, ranks=3)


def wide_results(context):
    float32 = 0
    a, b = np.full((4, 4096), 1.001), np.full((4096, 4), 1.0)
    with context:
        for name in ("float16", "bfloat16"):
            kind = library_named("numpy").empty((), name).dtype
            mine = part(a, Y, context).astype(kind), part(b, X, context).astype(kind)
            for strategy in (None, "reduce-scatter" if context.size > 1 else "local"):
                d = matmul(
                    *mine,
                    distributions=(Y, X, X),
                    options={"result_type": float32, "strategy": strategy},
                )
                want = 4096 * float(np.asarray(1.001).astype(kind))
                assert d.dtype == np.float32
                np.testing.assert_allclose(d, want, rtol=1e-6)


@pytest.mark.parametrize("size", [1, 2])
def test_halves_are_summed_in_float32_and_can_be_returned_so(contexts, size):
    contexts.run(wide_results, ranks=size)


def memory_ends_on_one_rank(context):
    ones = np.ones((1024, 1024))  # of which parts are so large that they have to be staged
    mine = part(ones, Y, context), part(ones, X, context)
    c = part(ones, X, context).copy()
    with context:
        Workspace.of(context).release()  # what earlier calls have left would do
        options = {"inplace": True}
        with no_memory(context):
            said = heard(lambda: matmul(*mine, c, beta=1, distributions=(Y, X, X), options=options))
        assert (c == 1).all()
        assert (matmul(*mine, distributions=(Y, X, X)) == 1024).all()  # the context lives
    return said


def test_want_of_memory_on_one_rank_is_an_error_on_all(contexts):
    said = contexts.run(memory_ends_on_one_rank, ranks=3)
    assert said == [("MemoryError", "rank 1: no memory today")] * 3


def grid_of_contexts(context):
    """A data x tensor grid of 2 x 3: a product along each, and over all, in turn."""
    rng = np.random.default_rng(9)
    a, b = rng.standard_normal((14, 10)), rng.standard_normal((10, 12))
    row, column = divmod(context.rank, 3)
    tensor = context.split(row)
    data = context.split(column)
    none = context.split(0 if context.rank else None)
    assert (none is None) == (context.rank == 0)
    for turn in range(3):
        for number, each in enumerate((tensor, context, data, tensor)):
            shift = turn + (row if each is tensor else column if each is data else 0)
            with each:
                layout = layouts(each.size)[(turn + number) % 6]
                d = matmul(
                    part(a + shift, layout[0], each),
                    part(b, layout[1], each),
                    distributions=layout,
                )
                np.testing.assert_allclose(d, part((a + shift) @ b, layout[2], each), atol=1e-11)
    with tensor, data:  # the innermost is current
        d = matmul(part(a, X, data), part(b, X, data), distributions=(X, X, X))
        np.testing.assert_allclose(d, part(a @ b, X, data), atol=1e-11)
    held = Matmul
    with tensor:
        held = Matmul(part(a, X, tensor), part(b, X, tensor), distributions=(X, X, X))
    held.plan()  # an object keeps the context that it was made in
    np.testing.assert_allclose(held.execute(), part(a @ b, X, tensor), atol=1e-11)
    context.barrier()
    for each in (tensor, data, none):
        if each is not None:
            each.close()
    return tensor.size, data.size


def test_a_grid_of_contexts(contexts):
    assert contexts.run(grid_of_contexts, ranks=6) == [(3, 2)] * 6


def alternate(context):
    """How many plans are made for calls that alternate between three shapes and two epilogs."""
    made = []
    with context:
        book = None
        for turn in range(8):
            for n in (3, 8, 0):
                for epilog in (None, MatmulEpilog.RELU):
                    a, b = np.full((5, 4), turn - 2.0), np.ones((4, n))
                    d = matmul(
                        part(a, X, context),
                        part(b, X, context),
                        distributions=(X, X, X),
                        alpha=turn + 1,
                        epilog=epilog,
                    )
                    want = 4 * (turn - 2) * (turn + 1)
                    assert (d == (max(want, 0) if epilog else want)).all()
                    assert d.shape == (X.shape(context.rank, (5, n))[0], n)
            book = context.cache("plans", None)
            made.append(book._count)
    return made


def test_plans_are_kept(contexts):
    for made in contexts.run(alternate, ranks=2):
        assert made[0] >= 6 and set(made) == {made[0]}


def plain_views(context):
    """Transposes as strided views, and by qualifiers, mean the same."""
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((6, 9)), rng.standard_normal((9, 7))
    grid = BlockNonCyclic(ProcessGrid(shape=(1, context.size)))
    qualifiers = np.zeros(2, matrix_qualifiers_dtype)
    qualifiers["is_transpose"] = True
    with context:
        d = matmul(part(a, Y, context), part(b, X, context), distributions=(Y, X, X))
        views = matmul(part(a.T, X, context).T, part(b.T, grid, context).T, distributions=(Y, X, X))
        asked = matmul(
            part(a.T, X, context),
            part(b.T, grid, context),
            distributions=(X, grid, X),
            qualifiers=qualifiers,
        )
    np.testing.assert_allclose(views, d, atol=1e-13)
    np.testing.assert_allclose(asked, d, atol=1e-13)
    assert qualifiers["is_transpose"].all()  # the user's object is as it was


def test_transposes_by_view_and_by_qualifier(contexts):
    contexts.run(plain_views, ranks=3)
