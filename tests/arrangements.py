"""Random distributions of an array over ranks, and the parts that they give: cut from the whole."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import strategies as st

from shardmath.geometry import BlockCyclic, BlockNonCyclic, Box, ProcessGrid, Replicated, Slab

__all__ = ["SEEDS", "distributions", "part_of", "tilings"]


def part_of(array, distribution, rank, size):
    """What `rank` owns, by index ranges."""
    if isinstance(distribution, Box):
        ranges = [[pair] for pair in zip(distribution.lower, distribution.upper, strict=True)]
    else:
        ranges = distribution.index_ranges(rank, array.shape, size=size)
    nothing = np.arange(0)
    indices = [np.concatenate([nothing, *(np.arange(*r) for r in axis)]) for axis in ranges]
    return array[np.ix_(*indices)]


def chosen_grid(rng, size, ndim):
    extents = [1] * ndim
    rest = size
    for prime in (2, 3, 5):
        while rest % prime == 0:
            rest //= prime
            extents[rng.randrange(ndim)] *= prime
    if rng.random() < 0.5:
        return ProcessGrid(shape=extents, layout=rng.choice(list(ProcessGrid.Layout)))
    order = rng.sample(range(size), size)
    return ProcessGrid(process_array=np.array(order).reshape(extents))


def tiling(rng, shape, size):
    """(lower, upper) of `size` boxes that tile `shape`: one is cut in two again and again."""
    boxes = [((0,) * len(shape), tuple(shape))]
    while len(boxes) < size:
        lower, upper = boxes.pop(rng.randrange(len(boxes)))
        axis = rng.randrange(len(shape))
        cut = rng.randint(lower[axis], upper[axis])
        boxes.append((lower, (*upper[:axis], cut, *upper[axis + 1 :])))
        boxes.append(((*lower[:axis], cut, *lower[axis + 1 :]), upper))
    return rng.sample(boxes, size)


def chosen_distribution(rng, kind, shape, size):
    """What each rank gives, encoded."""
    ndim = len(shape)
    if kind == "box":
        return [Box(*box).encode() for box in tiling(rng, shape, size)]
    if kind == "slab":
        made = Slab(rng.randrange(ndim))
    elif kind == "replicated":
        made = Replicated()
    else:
        grid = chosen_grid(rng, size, ndim)
        first = [rng.randrange(extent) for extent in grid.shape]
        if kind == "cyclic":
            blocks = [rng.randint(1, 9) for _ in shape]
            made = BlockCyclic(grid, blocks, first_process=first)
        else:
            made = BlockNonCyclic(grid, first_process=first)
    return [made.encode()] * size


# Hypothesis takes longer for a draw than it takes to make a distribution: it chooses what a case is
# about, which it then simplifies, and a number from which Python's generator goes on.
SEEDS = st.integers(0, 2**64 - 1)
_KINDS = st.sampled_from(["slab", "box", "cyclic", "noncyclic", "replicated"])


@st.composite
def tilings(draw, shape, size):
    """Boxes of `size` ranks that tile `shape`."""
    return tiling(Random(draw(SEEDS)), shape, size)


@st.composite
def distributions(draw, shape, size):
    """What each rank gives, encoded."""
    kind = draw(_KINDS)
    return chosen_distribution(Random(draw(SEEDS)), kind, shape, size)
