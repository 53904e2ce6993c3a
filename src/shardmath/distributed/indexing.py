"""Indexing: integers, slices with any step, an ellipsis and new axes.

Each rank takes from its part what the index selects there, as a view where NumPy's would be one. If
a rank cannot, because it selects irregular places of its blocks, all ranks take copies. The
distribution of the result follows:

    x (n, m) Slab.X    x[:, 3]      (n,) Slab.X            no exchange
                       x[2:7]       (5, m) boxes           no exchange: the ranks that have the rows
                       x[4]         (m,) boxes             no exchange: all on the rank that has it
                       x[4, 3]      ()  Replicated         one element, sent to all ranks

A slice along block-cyclic axes may have a layout that no distribution describes. Then the array is
first moved to one block for each rank of its grid, or the selection is moved to a distribution that
exists. Arrays of indices are in `index_arrays`, masks in `masks`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from shardmath.arrays import array_of
from shardmath.distributed import parts
from shardmath.distributed.elementwise import broadcasts, needed_layout
from shardmath.distributed.layouts import (
    Axes,
    Indices,
    distribution_of,
    distribution_of_axes,
    indices,
    interned,
    layout_of_axes,
    selector,
)
from shardmath.distributed.movement import brought, explanation, settled, split_by, whole_everywhere
from shardmath.distributed.state import Distributed
from shardmath.geometry import BlockCyclic, BlockNonCyclic, Distribution, Layout, Spans

Shape = tuple[int, ...]


class Index(NamedTuple):
    """What is selected: a range for each axis of the operand, and the axes of the result. An axis
    that an integer indexes has a range of one, and no axis in the result.
    """

    ranges: tuple[range, ...]
    axes: Axes

    @property
    def shape(self) -> Shape:
        """The shape of the result."""
        return tuple(1 if axis is None else len(self.ranges[axis]) for axis in self.axes)


class Picked(NamedTuple):
    """What a range selects of one rank's part of an axis: where that lies in the part, which
    indices of the selection it is, ascending, and these as `Spans`, or None if they are no regular
    blocks.
    """

    where: slice | Indices
    selected: Indices
    spans: Spans | None


def get(x: Distributed, key: Any) -> Any:
    """`x[key]`. Collective where no split axis is left, and for some slices of block-cyclic axes.

    Raises IndexError for an index out of range.
    """
    index = _of_number(key, x.shape) if type(key) is int else read(key, x.shape)
    plan = _reading(x.layout, x.distribution, index, x.context.rank)
    if plan is None:
        given = x.distribution
        assert isinstance(given, BlockCyclic), "all else is expressed"
        # Each rank of the grid gets one block, of which any slice has a layout.
        target = BlockNonCyclic(given.process_grid, first_process=given.first_process)
        return get(split_by(x, target, "a slice of block-cyclic axes"), key)
    descending = [axis for axis, along in enumerate(index.ranges) if along.step < 0]
    local = parts.flipped(x.local[plan.where], descending)
    if plan.copied:
        local = parts.copied(local)
    if plan.everywhere is not None:
        held = x.like(local, x.distribution, plan.selected)
        local = brought(held, plan.everywhere, "one element for all ranks")
    local = array_of(local.reshape(plan.shape))
    if plan.distribution is not None:
        return x.like(local, plan.distribution, plan.result)
    return settled(x, local, plan.result, plan.like)


class Reading(NamedTuple):
    """How a rank reads by an index. Its elements lie at `where` in its part, and are `copied` if
    another rank cannot take a view of its own. The elements of all ranks form the layout
    `selected`, with all axes, or `everywhere` where no axis is left. Then `result` is the layout of
    the result, `shape` this rank's part of it, `like` the distribution to prefer, and
    `distribution` the one that describes it, None if none does.
    """

    where: Any
    copied: bool
    selected: Layout
    everywhere: Layout | None
    result: Layout
    shape: Shape
    like: Distribution | None
    distribution: Distribution | None


@lru_cache(maxsize=1024)
def _reading(layout: Layout, distribution: Distribution, index: Index, rank: int) -> Reading | None:
    """How this rank reads by an index; None where the selection has no layout."""
    selected = selected_layout(layout, index.ranges)
    if selected is None:
        return None
    along = [[pick.where for pick in picks_of(part, index.ranges)] for part in layout.parts]
    views = [all(isinstance(one, slice) for one in of_rank) for of_rank in along]
    where, copied = selector(along[rank]), views[rank] and not all(views)
    everywhere = None
    if not index.axes and not selected.is_replicated:
        everywhere = Layout.replicated(selected.global_shape, selected.size)
    result = layout_of_axes(everywhere or selected, index.axes)
    like = distribution_of_axes(distribution, index.axes)
    shape, named = result.local_shape(rank), distribution_of(result, rank, like)
    return Reading(where, copied, selected, everywhere, result, shape, like, named)


def put(x: Distributed, key: Any, value: Any) -> None:
    """`x[key] = value`. Collective where a value that is split has to move.

    `value` is a number, an array that is the same on all ranks, or a distributed array, and is
    broadcast. Raises IndexError for an index out of range, ValueError where the value does not
    broadcast.
    """
    if isinstance(value, list | tuple):
        value = np.asarray(value)
    index = read(key, x.shape)
    require_value(value, index.shape)
    picks = picks_of(x.layout.spans(x.context.rank), index.ranges)
    part = _values(x, index, picks, value)
    # A single value is written even where a rank has nothing selected, so that all ranks raise if
    # the type cannot hold it.
    is_written = not getattr(part, "ndim", 0) or all(len(pick.selected) for pick in picks)
    if explanation.get() is None and is_written:
        parts.assign(x.local, selector([pick.where for pick in picks]), part)


def require_value(value: Any, shape: Shape) -> None:
    """Raise ValueError for a value that does not broadcast to a selection of that shape."""
    given = tuple(getattr(value, "shape", ()))
    if not broadcasts(given, shape):
        raise ValueError(f"a value of shape {given} does not broadcast to {shape}, the selection")


# -- what a key selects ----------------------------------------------------------------------------


def read(key: Any, shape: Shape) -> Index:
    """The key as a range for each axis.

    Raises IndexError for too many indices, an index out of range, and for other keys.
    """
    keys = key if isinstance(key, tuple) else (key,)
    ranges: list[range] = []
    axes: list[int | None] = []
    for along in of_all_axes(keys, len(shape)):
        axis = len(ranges)
        if along is None:
            axes.append(None)
        elif isinstance(along, slice):
            ranges.append(range(*along.indices(shape[axis])))
            axes.append(axis)
        else:
            ranges.append(one(along, shape[axis], axis))
    return Index(tuple(ranges), tuple(axes))


def of_all_axes(
    keys: Sequence[Any], ndim: int, axes_of: Callable[[Any], int] = lambda one: one is not None
) -> list[Any]:
    """The keys, with full slices for an ellipsis and for the axes that are left out. `axes_of` says
    how many axes a key indexes. Raises IndexError for too many keys.
    """
    consumed = sum(axes_of(one) for one in keys if one is not Ellipsis)
    dots = [place for place, one in enumerate(keys) if one is Ellipsis]
    if len(dots) > 1:
        raise IndexError("an index has more than one ellipsis")
    if consumed > ndim:
        raise IndexError(f"{consumed} indices are too many for an array of {ndim} axes")
    place = dots[0] if dots else len(keys)
    return [*keys[:place], *[slice(None)] * (ndim - consumed), *keys[place + 1 :]]


_of_number = lru_cache(maxsize=1024)(read)  # frequent in loops; slices cannot be hashed


def one(key: Any, extent: int, axis: int) -> range:
    """The range that one index of an axis selects. Raises IndexError for anything but an integer
    within the axis.
    """
    try:
        if isinstance(key, bool | np.bool_):
            raise TypeError
        number = operator.index(key)
    except TypeError:
        raise IndexError(
            f"{key!r} is no index for axis {axis}: give integers, slices, ..., None, or arrays of "
            "integers or bool"
        ) from None
    if not -extent <= number < extent:
        raise IndexError(f"index {number} is out of range for axis {axis}, of {extent} elements")
    number %= extent
    return range(number, number + 1)


@lru_cache(maxsize=1024)
def selected_layout(layout: Layout, ranges: tuple[range, ...]) -> Layout | None:
    """The layout of a selection with all its axes; None where it has none."""
    parts_ = []
    for part in layout.parts:
        chosen = [pick.spans for pick in picks_of(part, ranges)]
        if None in chosen:
            return None
        parts_.append(tuple(spans for spans in chosen if spans is not None))
    return interned(Layout(tuple(len(along) for along in ranges), tuple(parts_)))


@lru_cache(maxsize=4096)
def picks_of(part: tuple[Spans, ...], ranges: tuple[range, ...]) -> list[Picked]:
    """What the ranges select of one rank's part, along each axis."""
    return [_pick(spans, along) for spans, along in zip(part, ranges, strict=True)]


def _pick(spans: Spans, along: range) -> Picked:
    """What `along`, ascending or descending, selects of `spans`; `where` ascends in any case."""
    count = len(along)
    up = along if along.step > 0 else along[::-1]
    if not count:
        return Picked(slice(0, 0), np.arange(0), Spans(0, 0, 0, 0))
    if spans.period == 0:
        low, high = (
            min(max(-((up.start - end) // up.step), 0), count) for end in (spans.start, spans.stop)
        )
        high = max(high, low)
        begin = up.start + low * up.step - spans.start
        end = begin + (high - low - 1) * up.step + 1
        where: slice | Indices = slice(begin, end, up.step) if high > low else slice(0, 0)
        selected = np.arange(low, high)
    else:
        held = indices(spans)
        steps, rest = np.divmod(held - up.start, up.step)
        fits = (rest == 0) & (steps >= 0) & (steps < count)
        where, selected = _as_slice(np.flatnonzero(fits)), steps[fits]
    if along.step < 0:
        selected = np.ascontiguousarray((count - 1 - selected)[::-1])  # for torch
    return Picked(where, selected, _expressed(selected))


def _as_slice(where: Indices) -> slice | Indices:
    """Ascending places as a slice, which selects a view, if they are at a constant distance."""
    if not len(where):
        return slice(0, 0)
    first, last = int(where[0]), int(where[-1])
    step = int(where[1]) - first if len(where) > 1 else 1
    return slice(first, last + 1, step) if np.all(np.diff(where) == step) else where


def _expressed(selected: Indices) -> Spans | None:
    """Ascending indices as `Spans`; None unless they are equal blocks at a constant period."""
    if not len(selected):
        return Spans(0, 0, 0, 0)
    start, stop = int(selected[0]), int(selected[-1]) + 1
    gaps = np.flatnonzero(np.diff(selected) > 1)
    if not len(gaps):
        return Spans.interval(start, stop)
    block = int(gaps[0]) + 1
    made = Spans(start, block, int(selected[block]) - start, stop)
    return made if np.array_equal(indices(made), selected) else None


# -- writing ---------------------------------------------------------------------------------------


def _values(x: Distributed, index: Index, picks: Sequence[Picked], value: Any) -> Any:
    """The values for this rank's part of the selection, in the axes and the order of the part."""
    if not isinstance(value, Distributed):
        if not hasattr(value, "shape"):
            return value
        whole = parts.converted(value, x.local)
    elif value.layout.is_replicated:
        whole = value.local
    else:
        layout = selected_layout(x.layout, index.ranges)
        if layout is not None:
            needed = needed_layout(layout_of_axes(layout, index.axes), value.shape)
            part = brought(value, needed, "what is assigned")
            return _aligned(x, index, part) if all(len(p.selected) for p in picks) else part
        whole = whole_everywhere(value, "what is assigned").local
    if not whole.ndim:
        return whole
    new = len(index.axes) - whole.ndim
    along: list[slice | Indices] = []
    for extent, axis in zip(whole.shape, index.axes[new:], strict=True):
        is_broadcast = axis is None or extent == 1
        along.append(slice(0, 1) if is_broadcast else picks[axis or 0].selected)
    return _aligned(x, index, whole[selector(along)])


def _aligned(x: Distributed, index: Index, part: Any) -> Any:
    """`part` of the value, with the axes of the operand, in ascending order."""
    new = len(index.axes) - part.ndim
    ascending = [
        place
        for place, axis in enumerate(index.axes[new:])
        if axis is not None and index.ranges[axis].step < 0
    ]
    part = parts.flipped(part, ascending)
    extents = dict(zip(index.axes[new:], part.shape, strict=True))
    return part.reshape([extents.get(axis, 1) for axis in range(x.ndim)])
