"""Norms and small functions of matrices split at random, against NumPy's on the whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.linalg import LinAlgError
from split_arrays import agree, array_of, drawn_cases, elements, placed, shapes, splits

import shardmath
from shardmath import distributed
from shardmath.distribution import Slab

linalg = np.linalg
EXTENT = st.sampled_from([1, 2, 3, 5, 8])
VECTORS = (None, 0, 1, 2, 3, 0.5, np.inf, -np.inf)
LIBRARIES = st.sampled_from(("numpy", "torch"))
MATRICES = (None, "fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf)


@st.composite
def normed(draw, size):
    shape = draw(st.lists(EXTENT | st.just(0), min_size=1, max_size=3).map(tuple))
    dtype = draw(st.sampled_from(("int16", "float32", "float64", "complex128")))
    axes = draw(st.permutations(range(len(shape))))
    split = draw(splits(shape, size))
    return (
        shape,
        dtype,
        split,
        axes[:2],
        draw(st.booleans()),
        draw(st.sampled_from(VECTORS)),
        draw(st.sampled_from(MATRICES)),
        draw(LIBRARIES),
    )


def norms_of(context, cases):
    for shape, dtype, split, axes, kept, of_vectors, of_matrices, library in cases:
        a = elements(shape, dtype)
        x = placed(context, a, split, library)
        words = {"keepdims": kept}
        calls = [
            ("norm", {}),
            ("norm", {"ord": of_vectors, "axis": axes[0]} | words),
            ("vector_norm", {"ord": 2 if of_vectors is None else of_vectors} | words),
        ]
        if len(shape) > 1:
            calls.append(("norm", {"ord": of_matrices, "axis": tuple(axes)} | words))
        if len(shape) > 1 and of_matrices is not None:
            calls.append(("matrix_norm", {"ord": of_matrices} | words))
        for name, words in calls:
            function = getattr(linalg, name)
            try:
                expected = function(a, **words)
            except ValueError:  # the least of no elements
                with pytest.raises(ValueError, match="no elements"):
                    function(x, **words)
                continue
            agree(function(x, **words), expected, close=True)


test_norms = drawn_cases(norms_of, normed, 5, most=8, also_as_on_gpus=True)


@st.composite
def stacks(draw, size):
    shape = (*draw(shapes(0, 1)), draw(EXTENT), draw(EXTENT))
    dtype = draw(st.sampled_from(("int16", "float32", "float64", "complex128")))
    return shape, dtype, draw(splits(shape, size)), draw(st.integers(-4, 4)), draw(LIBRARIES)


def systems(context, x, a, library):
    """Factors and solutions of well-conditioned matrices, in stacks and alone."""
    names, one = distributed.linalg, np.eye(a.shape[-1], dtype=a.dtype)
    a = a / (1 + np.abs(a).sum(axis=(-2, -1), keepdims=True)).astype(a.dtype) + one
    with context:
        y = shardmath.from_global(array_of(context, a, library), Slab(0))
    if not x.distribution.per_rank:
        y = y.to(x.distribution)
    for name in ("inv", "det", "slogdet"):
        got, expected = getattr(names, name)(y), getattr(linalg, name)(a)
        pairs = zip(got, expected, strict=True) if name == "slogdet" else [(got, expected)]
        for mine, numpys in pairs:
            agree(mine, numpys, close=True)
    right = np.ones((*a.shape[:-1], 2), a.dtype)
    agree(names.solve(y, y @ right), right, close=True)
    agree(names.solve(y, a @ right), right, close=True)
    agree(linalg.matrix_power(y, -2), linalg.matrix_power(a, -2), close=True)
    agree(linalg.cond(y, 1), linalg.cond(a, 1), close=True)
    square = a @ np.swapaxes(a.conj(), -1, -2)
    z = y @ np.swapaxes(a.conj(), -1, -2)
    agree(names.cholesky(z), linalg.cholesky(square), close=True)


def small_functions(context, cases):
    names = distributed.linalg
    for shape, dtype, split, number, library in cases:
        a = elements(shape, dtype)
        x = placed(context, a, split, library)
        agree(names.diagonal(x, offset=number), linalg.diagonal(a, offset=number), close=True)
        agree(linalg.trace(x, offset=number), linalg.trace(a, offset=number), close=True)
        agree(np.trace(x, number), np.trace(a, number), close=True)
        agree(names.matrix_transpose(x), linalg.matrix_transpose(a))
        agree(linalg.matrix_rank(x), linalg.matrix_rank(a))
        values = linalg.svdvals(a.astype(np.result_type(a, np.float32)))
        if values.size and values.min() > 1e-3:
            agree(linalg.cond(x), linalg.cond(a), close=True)
            agree(linalg.cond(x, -2), linalg.cond(a, -2), close=True)
            agree(names.pinv(x), linalg.pinv(a), close=True)
        if shape[-1] == shape[-2] and a.dtype.kind in "fc":
            power = abs(number) % 4
            agree(linalg.matrix_power(x, power), linalg.matrix_power(a, power), close=True)
            systems(context, x, a, library)
        q, r = linalg.qr(x)
        agree(q @ r, a, close=True, strict=False)
        u, s, vh = names.svd(x, full_matrices=False)
        made = (u * s[..., None, :].astype(u.dtype)) @ vh
        agree(made, a, close=True, strict=False)
        assert linalg.svd(x).U.shape == linalg.svd(a).U.shape


test_functions_of_matrices_and_stacks = drawn_cases(
    small_functions, stacks, 3, most=5, also_as_on_gpus=True
)


def vectors(context):
    rng = np.random.default_rng(0)
    with context:
        a, b = rng.standard_normal((2, 5, 3))
        for split in (Slab.X, Slab.Y):
            x, y = (shardmath.from_global(z, split) for z in (a, b))
            agree(linalg.cross(x, y), np.cross(a, b), close=True)
            agree(linalg.cross(x.T, y.T, axis=0), np.cross(a, b).T, close=True)
            agree(linalg.cross(x, b[0]), np.cross(a, b[0]), close=True)
            agree(linalg.cross(x[0], y[0]), np.cross(a[0], b[0]), close=True)
            agree(linalg.outer(x[:, 0], y[:, 1]), np.outer(a[:, 0], b[:, 1]))
        assert linalg.outer(x[:, 0].to(Slab.X), y[0]).distribution == Slab.X
        assert x.__array_namespace__().linalg is distributed.linalg
        deficient = shardmath.from_global(np.outer(a[:, 0], b[0]), Slab.X)
        assert int(linalg.matrix_rank(deficient)) == 1
        stack, limits = np.stack([np.diag([3.0, 2.0, 1.0])] * 3), np.array([0.9, 0.5, 0.1])
        ranks = linalg.matrix_rank(shardmath.from_global(stack, Slab.X), rtol=limits)
        agree(ranks, linalg.matrix_rank(stack, rtol=limits))
        assert float(linalg.cond(0 * x)) == np.inf
        assert float(linalg.cond(0 * x[:3], 1)) == np.inf
        assert linalg.cond(shardmath.zeros((0, 3, 3), distribution=Slab.X), 1).shape == (0,)
        for call in (
            lambda: linalg.norm(x, "x"),
            lambda: linalg.norm(x, 3),
            lambda: linalg.norm(x, "fro", axis=0),
            lambda: linalg.norm(x, axis=(0, 0)),
            lambda: linalg.matrix_norm(x, ord=3),
            lambda: linalg.vector_norm(x, ord=[1]),
            lambda: linalg.matrix_rank(x, rtol=[1, 2]),
            lambda: linalg.norm(x.to(Slab.X)[:, :0], -1),
            lambda: linalg.cross(x.T, y.T),
            lambda: linalg.cross(x, y[:2]),
            lambda: linalg.outer(x, y),
        ):
            with pytest.raises(ValueError):
                call()
        with pytest.raises(TypeError, match="cross of bool"):
            linalg.cross(x > 0, y > 0)
        with pytest.raises(TypeError, match="rtol is a number"):
            distributed.linalg.pinv(x, rtol="a")
        for call in (
            lambda: linalg.matrix_norm(x[0]),
            lambda: linalg.matrix_power(x, 2),
            lambda: linalg.cond(x, 1),
            lambda: linalg.cond(x[:0]),
            lambda: distributed.linalg.pinv(x[0]),
        ):
            with pytest.raises(LinAlgError):
                call()
        assert float(linalg.norm(x)) == pytest.approx(np.linalg.norm(a))  # ranks go on after errors


def test_vectors_and_what_is_refused(contexts):
    contexts.run(vectors, ranks=2)
