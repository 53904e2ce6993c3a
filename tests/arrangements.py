"""Random distributions of an array over ranks, and the parts that they give: cut from the whole."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from shardmath.geometry import BlockCyclic, BlockNonCyclic, Box, ProcessGrid, Replicated, Slab

__all__ = ["distributions", "part_of"]


def part_of(array, distribution, rank, size):
    """What `rank` owns, by index ranges."""
    if isinstance(distribution, Box):
        ranges = [[pair] for pair in zip(distribution.lower, distribution.upper, strict=True)]
    else:
        ranges = distribution.index_ranges(rank, array.shape, size=size)
    nothing = np.arange(0)
    indices = [np.concatenate([nothing, *(np.arange(*r) for r in axis)]) for axis in ranges]
    return array[np.ix_(*indices)]


@st.composite
def grids(draw, size, ndim):
    extents = [1] * ndim
    rest = size
    for prime in (2, 3, 5):
        while rest % prime == 0:
            rest //= prime
            extents[draw(st.integers(0, ndim - 1))] *= prime
    if draw(st.booleans()):
        return ProcessGrid(shape=extents, layout=draw(st.sampled_from(list(ProcessGrid.Layout))))
    order = draw(st.permutations(range(size)))
    return ProcessGrid(process_array=np.array(order).reshape(extents))


@st.composite
def tilings(draw, shape, size):
    """(lower, upper) of `size` boxes that tile `shape`: one is cut in two again and again."""
    boxes = [((0,) * len(shape), tuple(shape))]
    while len(boxes) < size:
        lower, upper = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(lower[axis], upper[axis]))
        boxes.append((lower, (*upper[:axis], cut, *upper[axis + 1 :])))
        boxes.append(((*lower[:axis], cut, *lower[axis + 1 :]), upper))
    return draw(st.permutations(boxes))


@st.composite
def distributions(draw, shape, size):
    """What each rank gives, encoded."""
    ndim = len(shape)
    kind = draw(st.sampled_from(["slab", "box", "cyclic", "noncyclic", "replicated"]))
    if kind == "box":
        return [Box(*box).encode() for box in draw(tilings(shape, size))]
    if kind == "slab":
        made = Slab(draw(st.integers(0, ndim - 1)))
    elif kind == "replicated":
        made = Replicated()
    else:
        grid = draw(grids(size, ndim))
        first = [draw(st.integers(0, extent - 1)) for extent in grid.shape]
        if kind == "cyclic":
            blocks = [draw(st.integers(1, 9)) for _ in shape]
            made = BlockCyclic(grid, blocks, first_process=first)
        else:
            made = BlockNonCyclic(grid, first_process=first)
    return [made.encode()] * size
