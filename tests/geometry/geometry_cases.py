"""Random distributions, each with the trivial oracle: a table of the owners of every element."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import prod

from hypothesis import strategies as st

from arrangements import tilings
from shardmath.geometry import (
    BlockCyclic,
    BlockNonCyclic,
    Box,
    Distribution,
    ProcessGrid,
    Replicated,
    Slab,
    Spans,
)

LONGEST = {1: 40, 2: 40, 3: 11, 4: 6}


@dataclass(frozen=True)
class Case:
    """What each rank holds, and `table[index]`: the ranks that own the element."""

    distributions: tuple[Distribution, ...]
    shape: tuple[int, ...]
    table: dict[tuple[int, ...], tuple[int, ...]]

    @property
    def size(self) -> int:
        return len(self.distributions)


def indices(shape):
    return itertools.product(*map(range, shape))


def owned(case, rank):
    """The indices of `rank` in the order of its local array."""
    return [index for index in indices(case.shape) if rank in case.table[index]]


def elements(spans):
    """The indices of a `Spans`, one by one, from its four fields."""
    if spans.block == 0:
        return []
    step = spans.period or spans.stop
    return [i for i in range(spans.start, spans.stop) if (i - spans.start) % step < spans.block]


def even_counts(extent, parts):
    return [extent // parts + (k < extent % parts) for k in range(parts)]


def dealt_even(extent, parts):
    """The part of each index when the first `extent % parts` parts hold one more."""
    return [k for k, n in enumerate(even_counts(extent, parts)) for _ in range(n)]


def dealt_cyclic(extent, parts, block):
    return [i // block % parts for i in range(extent)]


@st.composite
def spans(draw, extent):
    kind = draw(st.sampled_from(["interval", "cyclic", "any"]))
    if kind == "interval":
        lo, hi = draw(st.integers(0, extent)), draw(st.integers(0, extent))
        return Spans.interval(lo, hi)
    block, parts = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    if kind == "cyclic":
        return Spans.cyclic(extent, block, parts, draw(st.integers(0, parts - 1)))
    period = draw(st.integers(block, 12))
    return Spans(draw(st.integers(0, 9)), block, period, draw(st.integers(0, extent)))


@st.composite
def shapes(draw, ndim=None):
    ndim = draw(st.integers(1, 4)) if ndim is None else ndim
    return tuple(draw(st.integers(0, LONGEST[ndim])) for _ in range(ndim))


@st.composite
def grids(draw, ndim, size):
    """A grid of `size` ranks: by layout or by an arbitrary process array."""
    shape, left = [], size
    for _ in range(ndim - 1):
        extent = draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0]))
        shape.append(extent)
        left //= extent
    shape = tuple(draw(st.permutations([*shape, left])))
    kind = draw(st.sampled_from(["row", "column", "array"]))
    if kind == "row":
        return ProcessGrid(shape=shape, layout=ProcessGrid.Layout.ROW_MAJOR)
    if kind == "column":
        return ProcessGrid(shape=shape, layout=ProcessGrid.Layout.COL_MAJOR)
    rows = draw(st.permutations(range(size)))
    for extent in reversed(shape[1:]):
        rows = [rows[i : i + extent] for i in range(0, len(rows), extent)]
    return ProcessGrid(process_array=rows)


@st.composite
def cases(draw, shape=None, size=None):
    shape = draw(shapes()) if shape is None else shape
    size = draw(st.integers(1, 6)) if size is None else size
    ndim = len(shape)
    kind = draw(st.sampled_from(["slab", "box", "cyclic", "noncyclic", "replicated"]))
    if kind == "slab":
        axis = draw(st.integers(0, ndim - 1))
        dealt = dealt_even(shape[axis], size)
        table = {index: (dealt[index[axis]],) for index in indices(shape)}
        return Case((Slab(axis, draw(st.sampled_from([None, ndim]))),) * size, shape, table)
    if kind == "replicated":
        table = dict.fromkeys(indices(shape), tuple(range(size)))
        return Case((Replicated(draw(st.sampled_from([None, ndim]))),) * size, shape, table)
    if kind == "box":
        boxes = draw(tilings(shape, size))
        table = {
            index: (rank,)
            for rank, (lower, upper) in enumerate(boxes)
            for index in itertools.product(*map(range, lower, upper))
        }
        assert len(table) == prod(shape)
        return Case(tuple(Box(*box) for box in boxes), shape, table)
    grid = draw(grids(ndim, size))
    first = tuple(draw(st.integers(0, p - 1)) for p in grid.shape)
    if kind == "noncyclic":
        made = BlockNonCyclic(grid, first_process=first)
        dealt = [dealt_even(n, p) for n, p in zip(shape, grid.shape, strict=True)]
    else:
        blocks = tuple(draw(st.integers(1, 7)) for _ in shape)
        made = BlockCyclic(grid, blocks, first_process=first)
        dealt = [dealt_cyclic(n, p, b) for n, p, b in zip(shape, grid.shape, blocks, strict=True)]
    table = {}
    for index in indices(shape):
        rank = grid.process_array
        for axis, i in enumerate(index):
            rank = rank[(dealt[axis][i] + first[axis]) % grid.shape[axis]]
        table[index] = (rank,)
    return Case((made,) * size, shape, table)


@st.composite
def case_pairs(draw):
    shape, size = draw(shapes()), draw(st.integers(1, 6))
    return draw(cases(shape, size)), draw(cases(shape, size))
