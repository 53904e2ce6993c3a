"""Parts with their neighbours' rims, against numpy.pad of the whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from split_arrays import drawn_cases, elements, host, placed, shapes, splits

import shardmath
from shardmath.distribution import BlockCyclic, Box, ProcessGrid, Slab
from shardmath.errors import CollectiveMismatch


@st.composite
def halos(draw, size, libraries=("numpy", "numpy", "torch")):
    """An array in blocks, one for each rank: its shape, split, widths, periodic axes, library."""
    shape = draw(shapes(1))
    split = draw(splits(shape, size).filter(lambda split: split[0][0] != "BlockCyclic"))
    widths = draw(st.integers(0, 4) | st.tuples(*[st.integers(0, 9)] * len(shape)))
    periodic = draw(st.booleans() | st.tuples(*[st.booleans()] * len(shape)))
    library = draw(st.sampled_from(libraries))
    return shape, split, widths, periodic, library, draw(st.sampled_from(("new", "out", "strided")))


def wide_whole(a, widths, periodic, fill):
    """The whole array with rims."""
    for axis, (width, wraps) in enumerate(zip(widths, periodic, strict=True)):
        around = [(width * (other == axis),) * 2 for other in range(a.ndim)]
        a = np.pad(a, around, "wrap") if wraps else np.pad(a, around, constant_values=fill)
    return a


def expected_of(a, x, width, periodic, fill):
    ndim, part = a.ndim, x.layout.spans(x.context.rank)
    widths = (width,) * ndim if isinstance(width, int) else width
    wraps = (periodic,) * ndim if isinstance(periodic, bool) else periodic
    shape = [spans.length + 2 * width for spans, width in zip(part, widths, strict=True)]
    if not all(spans.block for spans in part):
        return np.full(shape, fill, a.dtype)
    starts = [spans.start for spans in part]
    around = wide_whole(a, widths, wraps, fill)
    return around[tuple(slice(at, at + n) for at, n in zip(starts, shape, strict=True))]


def body(context, cases):
    for shape, split, width, periodic, library, where in cases:
        a = elements(shape, "float64")
        x = placed(context, a, split, library)
        expected = expected_of(a, x, width, periodic, -7)
        out = None
        if where != "new":
            wide = np.full((*expected.shape[:-1], 2 * expected.shape[-1]), 99.0)
            room = wide[..., ::2] if where == "strided" else wide[..., : expected.shape[-1]]
            out = x.library.from_host(room)
        for _ in range(2):
            got = x.halo(width, periodic=periodic, fill=-7, out=out)
            assert out is None or got is out
            np.testing.assert_array_equal(x.library.host_view(got), expected)
        np.testing.assert_array_equal(host(x), elements(shape, "float64")[cut(x)])


def cut(x):
    return tuple(spans.slice() for spans in x.layout.spans(x.context.rank))


test_halos = drawn_cases(body, halos, 4)


def mistakes(context):
    with context:
        x = shardmath.zeros((6, 4), distribution=Slab.X)
        for width, periodic in (
            (-1, False),
            ((1, 2, 3), False),
            (1, (True,)),
            (1, 1),
            (1.5, False),
        ):
            with pytest.raises(ValueError, match="width"):
                x.halo(width, periodic=periodic)
        with pytest.raises(ValueError, match="no axes has no rims"):
            x[0, 0].halo(1)
        with pytest.raises(CollectiveMismatch, match="the widths of rims"):
            x.halo(1 + context.rank)
        with pytest.raises(CollectiveMismatch, match=r"rank 0: out has shape \(3, 4\), .*\(5, 6\)"):
            x.halo(1, out=np.zeros((3, 4)))
        cyclic = BlockCyclic(ProcessGrid(shape=(2, 1)), (1, 4))
        with pytest.raises(ValueError, match="rank 0 has several blocks, which have no rims"):
            x.to(cyclic).halo(1)
        with pytest.raises(ValueError, match="rank 1: could not convert"):
            x.halo(1, fill=0 if context.rank == 0 else "a")
        columns = Box((0, 2 * context.rank), (6, 2 * context.rank + 2))
        assert x.to(columns).halo((0, 1)).shape == (6, 4)


def test_mistakes(contexts):
    contexts.run(mistakes, ranks=2)
