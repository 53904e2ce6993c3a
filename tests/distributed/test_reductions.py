"""Reductions of arrays split at random, against NumPy on the whole."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import strategies as st
from split_arrays import agree, drawn_cases, elements, placed, shapes, splits

import shardmath
from shardmath.distribution import Replicated, Slab

FUNCTIONS = {
    name: getattr(np, name)
    for name in ("sum", "prod", "min", "max", "any", "all", "mean", "var", "std")
} | {"var, ddof": lambda x, **words: np.var(x, ddof=1, **words)}
FIRST = {"argmin": np.argmin, "argmax": np.argmax}
ORDERED = ("min", "max", "argmin", "argmax")
DTYPES = ("bool", "int8", "uint8", "int64", "float16", "float32", "float64", "complex128")
# torch lacks means and products of some types, and warns of freedoms below 0.
TORCH = ("sum", "min", "max", "any", "all", "mean", "var", "argmin", "argmax")


@st.composite
def reductions(draw, size):
    """A function, a library, an array, the axes, keepdims, and whether there are NaN."""
    shape = draw(shapes())
    library = draw(st.sampled_from(("numpy", "numpy", "torch")))
    names = TORCH if library == "torch" else [*FUNCTIONS, *FIRST]
    name = draw(st.sampled_from(names))
    axis = None
    if shape and draw(st.booleans()):
        axis = draw(st.integers(-len(shape), len(shape) - 1))
        if name not in FIRST and draw(st.booleans()):
            axis = tuple(draw(st.sets(st.integers(0, len(shape) - 1))))
    dtype = draw(st.sampled_from(DTYPES[3:] if library == "torch" else DTYPES))
    if dtype == "complex128" and name in ORDERED:
        dtype = "float64"
    spoiled = draw(st.booleans()) and dtype == "float64"
    return (
        name,
        library,
        shape,
        dtype,
        draw(splits(shape, size)),
        axis,
        draw(st.booleans()),
        spoiled,
    )


def body(context, cases):
    for name, library, shape, dtype, split, axis, keepdims, spoiled in cases:
        function = (FUNCTIONS | FIRST)[name]
        a = elements(shape, dtype)
        if spoiled:
            a.reshape(-1)[a.size // 2 :: 7] = np.nan
        x = placed(context, a, split, library)
        words = {"axis": axis, "keepdims": keepdims}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                expected = function(a, **words)
            except ValueError:  # no elements
                with pytest.raises(ValueError, match="no elements"):
                    function(x, **words)
                continue
            agree(function(x, **words), expected, close=True, strict=library == "numpy")


test_reductions = drawn_cases(body, reductions, 8)


def distributions(context):
    """Which distributions results have, and what is not communicated."""
    with context:
        x = shardmath.ones((4, 6), distribution=Slab.X)
        assert x.sum(axis=1).distribution == Slab.X
        assert x.sum(axis=1, keepdims=True).distribution == Slab.X
        assert x.sum(axis=0).distribution == Replicated()
        assert float(x.sum()) == int(x.sum()) == 24
        assert f"{x.mean():.2f}" == "1.00"
        out = shardmath.zeros(6, distribution=Slab.X)
        assert np.sum(x, axis=0, out=out) is out
        assert out.tolist() == [4.0] * 6
        assert np.add.reduce(x).tolist() == [4.0] * 6
        y = shardmath.arange(4.0, distribution=Slab.X)
        agree(y.mean(dtype="int64"), np.int64(1))
        agree(np.var(y, ddof=4), np.inf)
    if context.rank == 0:  # alone: it would wait for ever if it exchanged anything
        x.sum(axis=1)
        x + x


def test_what_is_along_whole_axes_is_local(contexts):
    contexts.run(distributions, ranks=2)


def mistakes(context):
    with context:
        x = shardmath.ones((4, 6), distribution=Slab.X)
        for axis, error in ((7, ValueError), ((0, 0), ValueError), ("0", TypeError)):
            with pytest.raises(error, match=r"every rank: "):
                x.sum(axis=axis)
        with pytest.raises(ValueError, match="rank 1: axis 2 is out of range"):
            x.sum(axis=0 if context.rank == 0 else 2)  # rank 0 hears of it
        assert x.sum(axis=0).tolist() == [4.0] * 6
        with pytest.raises(TypeError, match="complex numbers have no order"):
            (x + 1j).max()
        with pytest.raises(NotImplementedError, match=r"np\.where"):
            np.sum(x, where=x > 0)
        with pytest.raises(ValueError, match="out has shape"):
            np.sum(x, axis=1, out=x)


def test_mistakes(contexts):
    contexts.run(mistakes, ranks=2)
