"""Layouts of global arrays, and the distributions that describe them. Pure.

A `Layout` says what every rank owns. Operations that drop, add or reorder axes compute a new one.
Users think in distributions, so this module also finds a distribution that describes a layout: if
possible, that of the operand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from shardmath.distributed.state import Distributed
from shardmath.errors import BindDistributionError
from shardmath.geometry import (
    BlockCyclic,
    BlockNonCyclic,
    Box,
    Distribution,
    Layout,
    ProcessGrid,
    Replicated,
    Slab,
    Spans,
    unbound,
)

Indices = np.ndarray[Any, np.dtype[np.intp]]


@lru_cache(maxsize=4096)
def layout_of(distribution: Distribution, shape: tuple[int, ...], size: int) -> Layout:
    """The layout of a distribution that is the same on all ranks.

    Raises BindDistributionError where the shape or the number of ranks does not fit.
    """
    return interned(Layout.bind([distribution] * size, shape))


@lru_cache(maxsize=4096)
def interned(layout: Layout) -> Layout:
    """The first layout that was equal to this one. Caches recognise it by its identity: to compare
    equal layouts would take longer than a small operation does.
    """
    return layout


def distribution_of(
    layout: Layout, rank: int, like: Distribution | None = None
) -> Distribution | None:
    """A distribution that describes `layout`: `like` if it does, otherwise the simplest, or None. A
    `Box` is the one of `rank`.
    """
    return like if like is not None and fits(like, layout) else _simplest(layout, rank)


@lru_cache(maxsize=4096)
def _simplest(layout: Layout, rank: int) -> Distribution | None:
    if layout.is_replicated:
        return Replicated()
    for axis in range(layout.ndim):
        if layout == Layout.slab(layout.global_shape, layout.size, axis=axis):
            return Slab(axis)
    is_whole = all(spans.period == 0 for part in layout.parts for spans in part)
    if not (is_whole and layout.ndim and layout.disjoint()):
        return None
    part = layout.spans(rank)
    return Box([spans.start for spans in part], [spans.stop for spans in part])


def with_axis(x: Distributed, axis: int, extent: int) -> tuple[Distribution, Layout]:
    """The distribution and the layout that `x` would have if `axis` had another extent and were
    whole on each rank. Other axes stay split as they are.
    """
    return _with_axis(x.layout, x.distribution, axis, extent, x.context.rank)


@lru_cache(maxsize=1024)
def _with_axis(
    held: Layout, like: Distribution, axis: int, extent: int, rank: int
) -> tuple[Distribution, Layout]:
    layout = interned(held.with_column(axis, extent, None))
    distribution = distribution_of(layout, rank, unbound(like))
    assert distribution is not None, "an axis that is whole has any extent"
    return distribution, layout


@lru_cache(maxsize=1024)
def with_new_axis(
    held: Layout, like: Distribution, axis: int, extent: int, rank: int
) -> tuple[Distribution, Layout] | None:
    """The distribution and the layout with a new axis before `axis`, whole on each rank; None where
    no distribution describes it.
    """
    columns = [held.column(number) for number in range(held.ndim)]
    shape = (*held.global_shape[:axis], extent, *held.global_shape[axis:])
    layout = Layout.product(shape, [*columns[:axis], None, *columns[axis:]], size=held.size)
    names = (*range(axis), None, *range(axis, held.ndim))
    distribution = distribution_of(layout, rank, distribution_of_axes(unbound(like), names))
    return None if distribution is None else (distribution, interned(layout))


def fits(distribution: Distribution, layout: Layout) -> bool:
    """Whether a distribution that is the same on all ranks describes `layout`."""
    if distribution.per_rank or distribution.ndim not in (None, layout.ndim):
        return False
    try:
        return layout_of(distribution, layout.global_shape, layout.size) == layout
    except BindDistributionError:
        return False


# -- axes that go, come, or change places ----------------------------------------------------------

Axes = tuple[int | None, ...]  # for each axis of a result that of the operand, None for a new one


@lru_cache(maxsize=4096)
def layout_of_axes(layout: Layout, axes: Axes) -> Layout:
    """The layout with the axes `axes` of the operand; None stands for a new axis of extent 1.

    A rank whose part is empty along a dropped axis has an empty part.
    """
    gone = [axis for axis in range(layout.ndim) if axis not in axes]
    one = Spans.interval(0, 1)
    parts = []
    for part in layout.parts:
        kept = tuple(one if axis is None else part[axis] for axis in axes)
        is_empty = any(not part[axis].block and layout.global_shape[axis] for axis in gone)
        parts.append(tuple(Spans(0, 0, 0, 0) for _ in kept) if is_empty else kept)
    shape = tuple(1 if axis is None else layout.global_shape[axis] for axis in axes)
    return interned(Layout(shape, tuple(parts)))


def distribution_of_axes(distribution: Distribution, axes: Axes) -> Distribution | None:
    """The distribution with the axes `axes` of the operand; None where it splits a dropped one."""
    match distribution:
        case Slab(partition_dim=dim):
            return Slab(axes.index(dim)) if dim in axes else None
        case BlockNonCyclic(process_grid=grid, first_process=first):
            wide = _grid_of_axes(grid, axes)
            if wide is not None:
                return BlockNonCyclic(wide, first_process=_picked(first, axes, 0))
        case BlockCyclic(process_grid=grid, block_sizes=blocks, first_process=first):
            wide = _grid_of_axes(grid, axes)
            if wide is not None:
                sizes, first = _picked(blocks, axes, 1), _picked(first, axes, 0)
                return BlockCyclic(wide, sizes, first_process=first)
        case Replicated():
            return Replicated()
    return None


def of_axes(x: Distributed, part: Any, axes: Axes) -> Distributed | None:
    """The array whose part is `part`, with the axes `axes` of `x`; None if no distribution fits."""
    found = _of_axes(x.layout, x.distribution, axes, x.context.rank)
    return None if found is None else x.like(part, *found)


@lru_cache(maxsize=1024)
def _of_axes(
    held: Layout, like: Distribution, axes: Axes, rank: int
) -> tuple[Distribution, Layout] | None:
    layout = layout_of_axes(held, axes)
    distribution = distribution_of(layout, rank, distribution_of_axes(like, axes))
    return None if distribution is None else (distribution, layout)


def _grid_of_axes(grid: ProcessGrid, axes: Axes) -> ProcessGrid | None:
    gone = tuple(axis for axis in range(grid.ndim) if axis not in axes)
    if not axes or any(grid.shape[axis] != 1 for axis in gone):
        return None
    ranks = np.reshape(grid.ranks, grid.shape).squeeze(gone)
    order = [sum(axis > other for other in axes if other is not None)
             for axis in axes if axis is not None]  # fmt: skip
    places = ranks.transpose(order).reshape([1 if a is None else grid.shape[a] for a in axes])
    return ProcessGrid(process_array=places)


def _picked(values: Sequence[int], axes: Axes, new: int) -> tuple[int, ...]:
    return tuple(new if axis is None else values[axis] for axis in axes)


# -- where indices lie -----------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def indices(spans: Spans) -> Indices:
    """The global indices that a rank owns along an axis, ascending; read-only."""
    blocks = [np.arange(lo, hi) for lo, hi in spans.ranges()]
    made = np.concatenate([np.arange(0), *blocks]).astype(np.intp)
    made.flags.writeable = False
    return made


def places(held: Spans, needed: Spans) -> slice | Indices:
    """Where the indices of `needed`, a subset of `held`, lie among those of `held`."""
    runs = held.intersect(needed)
    if not runs:
        return slice(0, 0)
    run = runs[0]
    if len(runs) == 1 and 1 in (run.count, run.length):
        return slice(run.src_start, run.src_stop, None if run.count == 1 else run.src_step)
    return np.searchsorted(indices(held), indices(needed))


def placed_part(spans: Spans) -> slice | Indices:
    """Where a rank's part lies along an axis of the global array."""
    return spans.slice() or indices(spans)


def selector(along: Sequence[slice | Indices]) -> Any:
    """A key that selects by a slice or an array of indices along each axis, in any library."""
    if all(isinstance(one, slice) for one in along):
        return (*along, Ellipsis)  # so that an array of no axes gives an array
    return np.ix_(*map(listed, along))


def listed(along: slice | Indices) -> Indices:
    """What a slice or an array of indices selects along an axis, as an array of indices."""
    return np.arange(along.start, along.stop, along.step) if isinstance(along, slice) else along


# -- where elements lie in C order -----------------------------------------------------------------


def runs(part: tuple[Spans, ...], shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """The part as runs of elements that are contiguous in the global array: first, count."""
    if any(not spans.block for spans in part):
        return
    axis = _whole_from(part, shape)
    if not axis:
        yield 0, prod(shape)
        return
    unit = prod(shape[axis:])
    starts = np.zeros(1, np.int64)
    for extent, spans in zip(shape[: axis - 1], part[: axis - 1], strict=True):
        starts = (starts[:, None] * extent + indices(spans)).reshape(-1)
    blocks = [(low * unit, (high - low) * unit) for low, high in part[axis - 1].ranges()]
    for start in (starts * shape[axis - 1] * unit).tolist():
        for low, count in blocks:
            yield start + low, count


def run_length(part: tuple[Spans, ...], shape: tuple[int, ...]) -> int:
    """The number of elements of the runs of a part; the last one along an axis may be shorter."""
    axis = _whole_from(part, shape)
    return prod(shape[axis:]) * (part[axis - 1].block if axis else 1)


def _whole_from(part: tuple[Spans, ...], shape: tuple[int, ...]) -> int:
    """The first axis from which on the part has all axes whole."""
    axis = len(shape)
    while axis and part[axis - 1].length == shape[axis - 1]:
        axis -= 1
    return axis
