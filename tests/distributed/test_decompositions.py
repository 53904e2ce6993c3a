"""Decompositions of matrices split at random, against NumPy on the whole and the usual bounds."""

from __future__ import annotations

import hashlib
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from numpy.linalg import LinAlgError
from split_arrays import array_of, as_on_gpus, drawn_cases, placed, splits

import shardmath
from shardmath.distributed import qr, spectral
from shardmath.distribution import BlockCyclic, ProcessGrid, Replicated, Slab
from shardmath.errors import CollectiveMismatch
from shardmath.machine import CORES, H200

DTYPES = ("float32", "float64", "complex64", "complex128")
KINDS = ("random", "random", "deficient", "graded", "hilbert", "zero")
EXTENT = st.one_of(st.integers(0, 12), st.integers(0, 200))
BOUND = 40  # times the larger extent and the type's epsilon


def matrix(shape, dtype, kind, seed=0):
    """A matrix of that kind: of full rank, of a third of it, with columns of many sizes."""
    rng = np.random.default_rng(seed)
    m, n = shape
    if kind == "zero":
        made = np.zeros(shape)
    elif kind == "hilbert":
        made = 1 / (1 + np.arange(m)[:, None] + np.arange(n))
    else:
        made = rng.standard_normal(shape)
        if np.dtype(dtype).kind == "c":
            made = made + 1j * rng.standard_normal(shape)
        if kind == "deficient":
            made[:, n // 3 :] = made[:, : n - n // 3]
        if kind == "graded":
            made *= np.logspace(0, -12, n)
    return made.astype(dtype)


@st.composite
def matrices(draw, size):
    shape = draw(EXTENT), draw(EXTENT)
    library = draw(st.sampled_from(("numpy", "numpy", "torch")))
    kind, dtype = draw(st.sampled_from(KINDS)), draw(st.sampled_from(DTYPES))
    return matrix(shape, dtype, kind), draw(splits(shape, size)), library


def bound(a):
    return BOUND * max(*a.shape, 1) * np.finfo(a.dtype).eps


def require_orthonormal(q):
    assert np.linalg.norm(q.conj().T @ q - np.eye(q.shape[1])) <= bound(q)


def require_product(a, *factors):
    product = np.linalg.multi_dot(factors) if len(factors) > 2 else factors[0] @ factors[1]
    assert np.linalg.norm(product - a) <= bound(a) * np.linalg.norm(a)


def whole(x, like, shape):
    """The array as NumPy's, of the operand's library, and of this shape."""
    assert x.shape == shape
    assert type(x.local) is type(like.local)
    return x.numpy()


def take_apart(context, cases):
    for a, split, library in cases:
        x, before = placed(context, a, split, library), a.copy()
        m, n = a.shape
        count = min(m, n)
        for mode, rows in (("complete", m), ("economic", count)):
            q, r = shardmath.linalg.qr(x, mode)
            q, r = whole(q, x, (m, rows)), whole(r, x, (rows, n))
            assert q.dtype == r.dtype == a.dtype
            require_orthonormal(q)
            require_product(a, q, r)
            assert not np.tril(r, -1).any()
            diagonal = np.diagonal(r)
            assert not diagonal.imag.any()
            assert (diagonal.real >= 0).all()
        np.testing.assert_array_equal(shardmath.linalg.qr(x, "r").numpy(), r)
        expected = np.linalg.svd(a, compute_uv=False)
        largest = expected.max(initial=0)
        for full in (False, True):
            u, s, vh = shardmath.linalg.svd(x, full)
            u = whole(u, x, (m, m if full else count))
            vh = whole(vh, x, (n if full else count, n))
            values = whole(s, x, (count,))
            np.testing.assert_allclose(values, expected, atol=bound(a) * largest)
            require_orthonormal(u)
            require_orthonormal(vh.conj().T)
            require_product(a, u[:, :count] * values, vh[:count])
        np.testing.assert_allclose(
            shardmath.linalg.svdvals(x).numpy(), expected, atol=bound(a) * largest
        )
        np.testing.assert_array_equal(x.numpy(), before)


test_factors_of_any_matrix = drawn_cases(take_apart, matrices, 4, most=4, also_as_on_gpus=True)


@st.composite
def hermitian(draw, size):
    order = draw(st.integers(0, 60))
    a = matrix((order, order), draw(st.sampled_from(DTYPES)), draw(st.sampled_from(KINDS)))
    return a + a.conj().T, draw(splits(a.shape, size)), draw(st.sampled_from("LU"))


def eigenvalues(context, cases):
    for a, split, triangle in cases:
        x = placed(context, np.tril(a) if triangle == "L" else np.triu(a), split)
        values, vectors = shardmath.linalg.eigh(x, triangle)
        assert vectors.distribution == x.distribution
        v, w = vectors.numpy(), values.numpy()
        require_orthonormal(v)
        require_product(a, v * w, v.conj().T)
        expected, size = np.linalg.eigvalsh(a), bound(a) * np.linalg.norm(a)
        np.testing.assert_allclose(w, expected, atol=size)
        got = shardmath.linalg.eigvalsh(x, triangle).numpy()
        np.testing.assert_allclose(got, expected, atol=size)
        if triangle == "L":  # what is above it is not read
            u, s, vh = np.linalg.svd(x, hermitian=True)
            assert u.distribution == vh.distribution == x.distribution
            require_orthonormal(u.numpy())
            require_product(a, u.numpy() * s.numpy(), vh.numpy())
            values = np.linalg.svd(x, compute_uv=False, hermitian=True).numpy()
            np.testing.assert_allclose(values, np.sort(abs(expected))[::-1], atol=size)


def spectra(order, dtype):
    """Hermitian matrices by name: eigenvalues that are far apart, together, equal, or nearly so."""
    general = matrix((order, order), dtype, "random")
    q = np.linalg.qr(general)[0]
    star = np.zeros((order, order))
    star[0, 1:] = 1
    values = {
        "graded": np.logspace(0, -14, order),
        "in clusters": np.resize([1, 1, -1, 2], order),
        "one apart": np.r_[1e6, np.zeros(order - 1)],
    }
    made = {name: (q * numbers) @ q.conj().T for name, numbers in values.items()}
    made |= {"random": general + general.conj().T, "star": star + star.T}
    made["equal"] = np.eye(order) * 3
    made["large"] = made["random"] * (2.0**62 if dtype in ("float32", "complex64") else 2.0**510)
    return {name: ((x + x.conj().T) / 2).astype(dtype) for name, x in made.items()}


def divided(context, order, dtype, library):
    """How far divided eigenvalues and eigenvectors are off, in units of the usual bound."""
    found = {}
    too_large = spectral.Predicted(alone=0.0, shared=0.0, fits=False)
    shares = patch.multiple(spectral, prediction=lambda _: too_large, LEAF=order // 2)
    for name, a in spectra(order, dtype).items():
        with context, shares:
            x = shardmath.from_global(array_of(context, np.tril(a), library), Slab.Y)
            values, vectors = shardmath.linalg.eigh(x)
            alone = shardmath.linalg.eigvalsh(x).numpy() if name == "random" else values.numpy()
            w, v = values.numpy(), vectors.numpy()
            assert vectors.distribution == Slab.Y and w.dtype == alone.dtype == a.real.dtype
        unit, largest = order * np.finfo(dtype).eps, np.abs(a).max()
        whole, w, alone = (x / largest for x in (a, w, alone))  # so that squares are in range
        size = unit * np.linalg.norm(whole)
        found[name] = max(
            np.linalg.norm((v * w) @ v.conj().T - whole) / size,
            np.linalg.norm(v.conj().T @ v - np.eye(order)) / unit,
            np.abs(w - np.linalg.eigvalsh(whole)).max() / size,
            np.abs(w - alone).max() / size,
        )
    return found


def divided_as_on_gpus(context, *arguments):
    return as_on_gpus(context, divided.__module__, divided.__name__, *arguments)


@pytest.mark.parametrize(
    ("body", "ranks", "dtype", "library"),
    [(divided, 2, "float64", "numpy"), (divided_as_on_gpus, 2, "complex64", "torch")],
)
def test_eigenvalues_that_are_divided(contexts, body, ranks, dtype, library):
    for found in contexts.run(body, 13, dtype, library, ranks=ranks):
        assert {name: off for name, off in found.items() if not off < BOUND} == {}


@pytest.mark.parametrize(
    ("rates", "ranks", "order", "shares"),
    [
        (H200, 1, 60_000, False),  # nobody is there to share with
        (H200, 2, 16_384, False),  # 3.2 s alone
        (H200, 2, 40_000, True),  # 64 GB alone
        (H200, 4, 16_384, False),
        (H200, 8, 2_048, False),  # a block
        (H200, 8, 16_384, True),
        (CORES, 2, 16_384, False),
        (CORES, 2, 20_000, True),  # 16 GB alone
        (CORES, 8, 8_192, False),
        (CORES, 32, 4_096, True),
    ],
)
def test_ranks_share_eigenvalues_where_that_is_twice_as_fast(rates, ranks, order, shares):
    assert spectral.predicted(order, ranks, "float64", 8, rates).shares is shares


test_eigenvalues_of_any_hermitian_matrix = drawn_cases(
    eigenvalues, hermitian, 3, most=5, also_as_on_gpus=True
)


def hermitian_factors():
    """Singular values of Hermitian matrices and of stacks of them, as the general way has them."""
    for shape in ((0, 0), (1, 1), (5, 5), (3, 4, 4), (0, 3, 3), (2, 0, 0)):
        for dtype in ("int64", "float32", "complex128"):
            general = np.arange(np.prod(shape)).reshape(shape) % 7 - 3
            a = general.astype(dtype) * (1j if dtype == "complex128" else 1)
            a = a + np.swapaxes(a.conj(), -1, -2)  # of both signs, and of less than full rank
            expected = np.linalg.svd(a, compute_uv=False)
            close = {"atol": 1e-4 if dtype == "float32" else 1e-12}
            for full in (False, True):
                for x in (shardmath.from_global(a, how) for how in (Slab.X, Slab.Y, Replicated())):
                    u, s, vh = shardmath.linalg.svd(x, full, hermitian=True)
                    np.testing.assert_allclose(s.numpy(), expected, **close)
                    np.testing.assert_allclose(((u * s[..., None, :]) @ vh).numpy(), a, **close)
                    if x.ndim == 2:
                        assert u.distribution == vh.distribution == x.distribution
                        assert s.distribution == Replicated()
                    values = shardmath.linalg.svd(x, full, False, hermitian=True)
                    np.testing.assert_allclose(values.numpy(), expected, **close)


def in_context(context):
    with context:
        hermitian_factors()


@pytest.mark.parametrize("ranks", [1, 3])
def test_singular_values_of_hermitian_matrices(contexts, ranks):
    contexts.run(in_context, ranks=ranks)


@st.composite
def equations(draw, size):
    m, n, count = draw(st.integers(0, 80)), draw(st.integers(0, 80)), draw(st.integers(0, 4))
    dtype = draw(st.sampled_from(("float64", "complex128")))
    a = matrix((m, n), dtype, draw(st.sampled_from(("random", "deficient", "zero"))))
    b = matrix((m, count), dtype, "random", seed=1)
    if draw(st.booleans()):
        b = b[:, 0] if count else np.zeros(m, dtype)
    return a, b, draw(splits(a.shape, size)), draw(splits(b.shape, size))


def least_squares(context, cases):
    for a, b, split, other in cases:
        x, y = placed(context, a, split), placed(context, b, other)
        got, expected = shardmath.linalg.lstsq(x, y), np.linalg.lstsq(a, b, rcond=None)
        size = 1e-9 * (1 + np.linalg.norm(expected[0]))
        np.testing.assert_allclose(got.x.numpy(), expected[0], atol=size)
        np.testing.assert_allclose(got.residuals.numpy(), expected[1], atol=1e-9)
        assert got.rank == expected[2]
        np.testing.assert_allclose(got.singular_values.numpy(), expected[3], atol=1e-9)
        np.testing.assert_array_equal(y.numpy(), b)


test_least_squares_of_any_equations = drawn_cases(
    least_squares, equations, 3, most=5, also_as_on_gpus=True
)


def nearly_of_low_rank(context, dtype):
    """Of a matrix whose singular values fall, as good as the best but for a few per cent."""
    rng = np.random.default_rng(7)
    made = []
    for m, n in ((90, 40), (40, 90), (1, 5), (5, 0)):
        count = min(m, n)
        u, v = (np.linalg.qr(rng.standard_normal((k, count)))[0] for k in (m, n))
        a = ((u * 0.5 ** np.arange(count)) @ v.T * (1 + 0j)).astype(dtype)
        rank = min(6, count)
        with context:
            x = shardmath.from_global(a, Slab.Y)
            u, s, vh = shardmath.linalg.svd_lowrank(x, rank, seed=3)
            assert (u.shape, s.shape, vh.shape) == ((m, rank), (rank,), (rank, n))
            assert (u.distribution, vh.distribution) == (Slab.X, Slab.Y)
            u, s, vh = u.numpy(), s.numpy(), vh.numpy()
            require_orthonormal(u)
            require_orthonormal(vh.conj().T)
            np.testing.assert_allclose(s, 0.5 ** np.arange(rank), rtol=1e-3)
            error = np.linalg.norm((u * s) @ vh - a)
            assert error <= 1.02 * np.linalg.norm(0.5 ** np.arange(rank, count)) + bound(a)
            if m * n:
                made.append(u @ (s[:, None] * vh))
    with context, pytest.raises(ValueError, match="rank is 6, and the matrix is 5 x 8"):
        shardmath.linalg.svd_lowrank(shardmath.ones((5, 8), distribution=Slab.X), 6)
    return made


@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_low_rank_is_the_same_on_any_number_of_ranks(contexts, dtype):
    first = contexts.run(nearly_of_low_rank, dtype, ranks=1)[0]
    for result in contexts.run(nearly_of_low_rank, dtype, ranks=3):
        for one, other in zip(first, result, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4 if dtype == "complex64" else 1e-12)


def the_same_bits(context):
    """Of repeated calls; and, but for rounding, of any number of ranks."""
    a = matrix((250, 100), "float64", "random")
    with context:
        digests = set()
        for _ in range(3):
            x = shardmath.from_global(a, Slab.X)
            results = [*shardmath.linalg.qr(x), *shardmath.linalg.svd(x)]
            digests.add(hashlib.sha256(b"".join(z.numpy().tobytes() for z in results)).digest())
        assert len(digests) == 1
        q, r = np.linalg.qr(a)
        signs = np.sign(np.diagonal(r))
        np.testing.assert_allclose(results[1].numpy(), r * signs[:, None], atol=1e-11)
        np.testing.assert_allclose(results[0].numpy(), q * signs, atol=1e-12)
        assert results[0].distribution == Slab.X
        assert results[1].distribution == Replicated()
        cyclic = BlockCyclic(ProcessGrid(shape=(context.size, 1)), (3, 5))
        y = x.to(cyclic)
        assert shardmath.linalg.qr(y).Q.distribution == cyclic
        assert shardmath.linalg.eigh((x.T @ x).to(Slab.Y)).eigenvectors.distribution == Slab.Y
        left, _, right = shardmath.linalg.svd(x.T)
        assert (left.distribution, right.distribution) == (Replicated(), Slab.Y)


@pytest.mark.parametrize("ranks", [1, 3])
def test_repeated_runs_give_the_same_bits(contexts, ranks):
    contexts.run(the_same_bits, ranks=ranks)


def refused(context):
    linalg = shardmath.linalg
    with context:
        x = shardmath.ones((6, 4), distribution=Slab.X)
        square = shardmath.ones((4, 4), distribution=Slab.X)
        for wrong in (np.nan, np.inf):
            x[4, 2] = wrong
            for function in (linalg.qr, linalg.svd, linalg.svdvals):
                with pytest.raises(ValueError, match="NaN or infinite"):
                    function(x)
            with pytest.raises(ValueError, match="NaN or infinite"):
                linalg.lstsq(x, x[:, 0])
            square[3, 0] = wrong
            with pytest.raises(ValueError, match="NaN or infinite"):
                linalg.eigh(square)
        for call in (
            lambda: linalg.qr(x[:, 0]),
            lambda: linalg.svd(x[0]),
            lambda: linalg.svd(x[:3], hermitian=True),
            lambda: linalg.eigh(x),
            lambda: linalg.lstsq(x, square),
        ):
            with pytest.raises(LinAlgError):
                call()
        with pytest.raises(ValueError, match="takes one of economic"):
            linalg.qr(x, "raw")
        with pytest.raises(ValueError, match="takes one of L, U"):
            linalg.eigh(square, "x")
        with pytest.raises(TypeError, match="a has float16: convert it"):
            linalg.qr(x.astype("float16"))
        x[4, 2] = 1
        with pytest.raises(TypeError, match="rcond is a number"):
            linalg.lstsq(x, x[:, 0], rcond="a")
        with pytest.raises(ValueError, match="seed must be at least 0"):
            linalg.svd_lowrank(x, 1, seed=-1)
        mode = "r" if context.rank else "complete"
        with pytest.raises(CollectiveMismatch, match="arguments of qr"):
            linalg.qr(x, mode)
        # and the ranks are still in step
        assert linalg.qr(shardmath.ones((6, 4), distribution=Slab.X)).R.shape == (4, 4)


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_refused_is_refused_by_all_ranks(contexts, ranks):
    contexts.run(refused, ranks=ranks)


def fails_on_one_rank(context):
    def compute():
        if context.rank == 1:
            raise LinAlgError("it does not converge")
        return (np.zeros(3),)

    with context:
        x = shardmath.ones((4, 4), distribution=Slab.X)
        with pytest.raises(LinAlgError, match="rank 1: it does not converge"):
            qr.alike("svd", x, compute)
        assert shardmath.linalg.svdvals(x).numpy()[0] == pytest.approx(4)


def test_a_rank_that_fails_fails_on_all(contexts):
    contexts.run(fails_on_one_rank, ranks=3)


def of_parts(context):
    a = matrix((9, 5), "float64", "random")
    linalg, rank = shardmath.linalg, context.rank
    with context:
        rows = shardmath.from_global(a, Slab.X).local
        whole = Replicated()
        q, r = linalg.qr(rows, distributions=[Slab.X, whole, Slab.Y])
        assert isinstance(q, np.ndarray)
        assert (q.shape, r.shape[0]) == ((9, 5), 5)
        assert r.shape == Slab.Y.shape(rank, (5, 5))
        joined = shardmath.array(r, Slab.Y).numpy()
        np.testing.assert_allclose(q @ joined, a, atol=1e-13)
        u, s, _ = linalg.svd(torch.from_numpy(rows), distributions=[Slab.X])
        assert (type(u), tuple(u.shape)) == (torch.Tensor, rows.shape)
        np.testing.assert_allclose(s.numpy(), np.linalg.svd(a)[1])
        assert linalg.norm(rows, distributions=[Slab.X]) == pytest.approx(np.linalg.norm(a))
        b = a[:, 0] + 1
        x, _, full, _ = linalg.lstsq(
            rows, shardmath.from_global(b, Slab.X).local, distributions=[Slab.X, Slab.X]
        )
        np.testing.assert_allclose(x, np.linalg.lstsq(a, b, rcond=None)[0])
        assert full == 5
        r = linalg.qr(shardmath.from_global(a, Slab.X), "r", distributions=[Slab.X])
        assert r.distribution == Slab.X
        as_it_comes = linalg.qr(rows, distributions=[Slab.X, None, Slab.X])
        joined = shardmath.array(as_it_comes.Q, Slab.X).numpy()
        np.testing.assert_allclose(joined, q, atol=1e-13)
        for error, wrong, words in (
            (TypeError, None, "parts need distributions"),
            (ValueError, [], "holds one for each of a, and"),
            (TypeError, [None], "not None"),
            (TypeError, [3], "not 3"),
            (TypeError, 3, "not 3"),
            (ValueError, [Slab.X] * 4, "for 3 results were given; there are 2"),
        ):
            with pytest.raises(error, match=words):
                linalg.qr(rows, distributions=wrong)
        own = rank == context.size - 1
        for wrong in ([Slab.X] * 4, 3):  # on one rank
            with pytest.raises((ValueError, TypeError), match="distribution"):
                linalg.qr(rows, distributions=wrong if own else Slab.X)
        with pytest.raises(ValueError, match="for 2 results were given; there are 1"):
            linalg.qr(rows, "r", distributions=[Slab.X] * 3)
        split = shardmath.from_global(a, Slab.X)
        for error, wrong in ((ValueError, [whole] * 3), (TypeError, 3), (TypeError, [None, "x"])):
            with pytest.raises(error, match="distribution"):
                linalg.qr(split, distributions=wrong)
            with pytest.raises(error, match="distribution"):
                linalg.inv(split[:5], distributions=wrong)
        made = linalg.cholesky(np.eye(5), distributions=[whole, None])
        np.testing.assert_allclose(made, np.eye(5))
        with pytest.raises(TypeError, match="takes 2 array"):
            linalg.lstsq(rows, "b", distributions=[Slab.X, Slab.X])


@pytest.mark.parametrize("ranks", [1, 3])
def test_parts_with_distributions(contexts, ranks):
    contexts.run(of_parts, ranks=ranks)


def explained(context):
    with context:
        x = shardmath.ones((6, 4), distribution=Slab.X, package=torch)
        assert "qr of 6 x 4" in shardmath.explain(shardmath.linalg.qr, x)
        told = shardmath.explain(shardmath.linalg.eigh, x.T @ x)
        assert "every rank decomposes all of it alone: predicted" in told
        told = shardmath.explain(shardmath.linalg.eigvalsh, shardmath.ones((2, 3, 3)))
        assert "whole matrices to each rank" in told
        square = x @ x.T
        for name in ("cholesky", "lu_factor", "inv", "det", "solve"):
            operands = [square] * (1 + (name == "solve"))
            told = shardmath.explain(getattr(shardmath.linalg, name), *operands)
            assert f"{name} of 6 x 6 {square.element_type.name} on 2 ranks: a single panel" in told
        told = shardmath.explain(shardmath.linalg.solve, square, square, assume_a="pos")
        assert "solve, positive definite of 6 x 6" in told
        words = {"options": {"block_size": 2}}
        told = shardmath.explain(shardmath.linalg.lu_factor, square, **words)
        assert "3 panels of 2 columns" in told
        assert "look-ahead: " in told
        with pytest.raises(LinAlgError, match="must be square"):
            shardmath.explain(shardmath.linalg.inv, x)


def test_an_explanation_needs_no_other_rank(contexts):
    contexts.run(explained, ranks=2)
