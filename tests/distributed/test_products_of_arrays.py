"""Products and transforms of arrays split at random, against NumPy on the whole."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.fft
from hypothesis import strategies as st
from split_arrays import agree, drawn_cases, elements, placed, splits

import shardmath
from shardmath import distributed, fft
from shardmath.distribution import BlockCyclic, Box, ProcessGrid, Replicated, Slab

EXTENT = st.sampled_from([0, 1, 2, 3, 5, 8])


@st.composite
def factors(draw, size):
    """Two factors, matrices or vectors, their types and splits; the second may be unsplit."""
    m, n, k = draw(EXTENT), draw(EXTENT), draw(EXTENT)
    shapes = [draw(st.sampled_from([(m, k), (m, k), (k,)]))]
    shapes.append(draw(st.sampled_from([(k, n), (k, n), (k,)])))
    types = [draw(st.sampled_from(("float32", "float64", "complex64"))) for _ in shapes]
    library = draw(st.sampled_from(("numpy", "torch")))
    if library == "torch":
        types[1] = types[0]
    arrays = [(shape, kind, draw(splits(shape, size)))
              for shape, kind in zip(shapes, types, strict=True)]  # fmt: skip
    return library, arrays, draw(st.sampled_from(("split", "split", "plain")))


def multiply(context, cases):
    for library, (first, second), how in cases:
        a, b = elements(*first[:2]), elements(*second[:2], 1)
        x = placed(context, a, first[2], library)
        y = placed(context, b, second[2], library)
        agree(x @ y, a @ b, close=True)
        if how == "plain" and library == "numpy":
            agree(x @ b, a @ b, close=True)
            agree(a @ y, a @ b, close=True)
        if a.shape == b.shape and library == "numpy":
            agree(np.vecdot(x, y), np.vecdot(a, b), close=True)
            x, y, a, b = (z.real.astype("int8") for z in (x, y, a, b))  # in which the sums wrap
            agree(np.vecdot(x, y), np.vecdot(a, b))


test_products = drawn_cases(multiply, factors, 6, most=10)


@st.composite
def transforms(draw, size):
    """An array, its type and split, and the axes that are transformed."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 5, 8]), min_size=1, max_size=3)))
    axes = draw(st.permutations(range(len(shape))))[: draw(st.integers(1, len(shape)))]
    dtype = draw(st.sampled_from(("int16", "float32", "float64", "complex128")))
    return shape, dtype, draw(splits(shape, size)), axes, draw(st.sampled_from((None, "ortho")))


def transform(context, cases):
    for shape, dtype, split, axes, norm in cases:
        a = elements(shape, dtype)
        x = placed(context, a, split)
        words = {"axes": axes, "norm": norm}
        agree(np.fft.fftn(x, **words), np.fft.fftn(a, **words), close=True)
        agree(np.fft.ifftn(x, **words), np.fft.ifftn(a, **words), close=True)
        if dtype != "complex128":
            y = np.fft.rfftn(x, **words)
            agree(y, np.fft.rfftn(a, **words), close=True)
            s = [shape[axis] for axis in axes]
            agree(np.fft.irfftn(y, s, **words), a / 1.0, close=True, strict=False)


test_transforms = drawn_cases(transform, transforms, 4, most=6)


NAMES = {"dct": "dctn", "idct": "idctn", "dst": "dstn", "idst": "idstn"}


@st.composite
def series(draw, size):
    """An array, and the arguments of a cosine or sine transform that may pad or cut it."""
    shape = tuple(draw(st.lists(st.sampled_from([2, 3, 5, 8]), min_size=1, max_size=3)))
    axes = draw(st.permutations(range(len(shape))))[: draw(st.integers(1, len(shape)))]
    extents = draw(st.none() | st.tuples(*[st.integers(2, 9)] * len(axes)))
    dtype = draw(st.sampled_from(("int16", "float16", "float32", "float64", "complex128")))
    words = {
        "type": draw(st.sampled_from((1, 2, 3, 4))),
        "norm": draw(st.sampled_from((None, "ortho", "forward"))),
    }
    library = draw(st.sampled_from(("numpy", "torch")))
    return library, shape, dtype, draw(splits(shape, size)), axes, extents, words


def transform_series(context, cases):
    for library, shape, dtype, split, axes, s, words in cases:
        a = elements(shape, dtype)
        x = placed(context, a, split, library)
        for name, of_several in NAMES.items():
            own, scipys = getattr(fft, of_several), getattr(scipy.fft, of_several)
            want = scipys(a, s=s, axes=axes, **words)
            agree(own(x, s=s, axes=axes, **words), want, close=True)
            own, scipys = getattr(fft, name), getattr(scipy.fft, name)
            n = None if s is None else s[0]
            agree(own(x=x, n=n, axis=axes[0], **words), scipys(a, n=n, axis=axes[0], **words),
                  close=True)  # fmt: skip


test_cosines_and_sines = drawn_cases(transform_series, series, 6, most=8)


def splits_of_series(context):
    with context:
        a = elements((4, 6), "f8")
        x = shardmath.from_global(a, Slab.X)
        y = fft.dctn(x, distribution=Slab.Y)
        assert y.distribution == Slab.Y
        agree(y, scipy.fft.dctn(a), close=True)
        out = shardmath.empty((4, 6), distribution=Slab.Y)
        assert fft.idct(x, 3, out=out, axis=0) is out
        agree(out, scipy.fft.idct(a, 3, axis=0), close=True)
        agree(fft.dst(x[1:], 4), scipy.fft.dst(a[1:], 4), close=True)
        assert "dctn of" in str(shardmath.explain(fft.dct, x))
        with pytest.raises(ValueError, match="each must be 1 at least"):
            fft.dct(x, n=0)
        with pytest.raises(ValueError, match="extents"):
            fft.dctn(x, s=(3,), axes=(0, 1))
        with pytest.raises(ValueError, match="norm is None"):
            fft.dct(x, norm="none")
        with pytest.raises(TypeError, match="make arrays of the parts"):
            fft.dct(x, out=x.local)


def test_cosines_and_sines_are_split_as_asked(contexts):
    contexts.run(splits_of_series, ranks=3)


def follows(context):
    with context:
        x = shardmath.ones((4, 6), distribution=Slab.X)
        y = shardmath.ones((6, 8), distribution=Slab.Y)
        assert (x @ y).distribution == Slab.X
        assert (x.to(Replicated()) @ y).distribution == Slab.Y
        assert (x.to(Slab.Y) @ y.to(Slab.X)).distribution == Slab.X
        assert (x @ y[:, 0]).distribution == Slab.X
        assert (x[0] @ y[:, 0]).distribution == Replicated()
        cyclic = BlockCyclic(ProcessGrid(shape=(2, 1)), (1, 2))
        assert (x.to(cyclic) @ y).distribution == cyclic
        assert np.fft.rfftn(x).distribution == Slab.X
        words = {"s": (-1, 3), "axes": (0, 1)}  # -1: the array's own
        agree(np.fft.rfftn(x, **words), np.fft.rfftn(np.ones((4, 6)), **words), close=True)
        rank = context.rank  # boxes without elements may overlap
        empty = shardmath.array(np.zeros((2 - rank, 3, 0)), Box((rank, 0, 0), (2, 3, 0)))
        agree(empty @ np.zeros((0, 4)), np.zeros((2, 3, 4)))
        out = shardmath.zeros((4, 8), distribution=Slab.Y)
        assert np.matmul(x, y, out=out) is out
        assert out.tolist() == [[6.0] * 8] * 4
        with pytest.raises(ValueError, match=r"shapes \(4, 6\) and \(4, 6\) cannot be mult"):
            x @ x
        with pytest.raises(ValueError, match=r"use x \* y"):
            x @ x.sum()
        with pytest.raises(NotImplementedError, match=r"multiply x\.astype"):
            x.astype(int) @ y.astype(int)
        with pytest.raises(ValueError, match="extents"):
            np.fft.fftn(x, (3,), (0, 1))
        with pytest.raises(TypeError):
            x @ "y"
        assert distributed.matmul(x, y).shape == (4, 8)


def test_the_distribution_that_follows(contexts):
    contexts.run(follows, ranks=2)
