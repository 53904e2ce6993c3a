"""Sorting, searching and sets: functions whose results depend on the values of elements.

Along an axis that every rank has whole each rank works by itself; arrays of several axes are moved
to such a layout, and back. A line is sorted by samples: each rank sorts its part, all agree on
bounds that they take from a few elements of each part, every element goes to the rank whose bounds
enclose it, and the ranks sort again.

    rank 0   3 1 2 9    sorted   1 2 3 | 9      bounds: 4     1 2 2 3 3
    rank 1   7 2 8 3             2 3 | 7 8      ------->      7 8 9

How many elements a rank has is known only then: such lines are split in boxes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from shardmath.collectives import all_gather, all_to_all
from shardmath.distributed import masks, parts, reductions
from shardmath.distributed.elementwise import all_distributed, applied
from shardmath.distributed.layouts import indices, layout_of, with_axis
from shardmath.distributed.manipulation import (
    broadcast_to,
    concat,
    flat_or_along,
    flip,
    reshape,
    take,
)
from shardmath.distributed.masks import in_boxes, in_rows, of_rows
from shardmath.distributed.movement import brought, in_slabs, on_all_ranks, part_in, permit
from shardmath.distributed.scans import diff
from shardmath.geometry import Slab

# -- in order --------------------------------------------------------------------------------------


def sort(
    x: Any,
    axis: int | None = -1,
    kind: str | None = None,
    *,
    descending: bool = False,
    stable: bool | None = None,
) -> Any:
    """The elements in order along an axis, as numpy.sort; with None, of the flattened array.

    Collective where the axis is split. NaN come last, or first with `descending`. Every `kind` is
    stable. Raises TypeError for complex numbers.
    """
    return _in_order(x, axis, descending, _VALUES)[0]


def argsort(
    x: Any,
    axis: int | None = -1,
    kind: str | None = None,
    *,
    descending: bool = False,
    stable: bool | None = None,
) -> Any:
    """The indices that sort an axis; equal elements keep their order. Otherwise as `sort`."""
    return _in_order(x, axis, descending, _NUMBERS)[0]


_VALUES, _NUMBERS = 0, 1


def _in_order(x: Any, axis: int | None, descending: bool, *which: int) -> list[Any]:
    """What `which` asks for, split as x is: the elements in order, or their indices."""
    x, axis = flat_or_along(x, axis)
    if descending:  # reversed, so that equal elements keep their order
        back = [flip(line, axis) for line in _in_order(flip(x, axis), axis, False, *which)]
        last = x.shape[axis] - 1
        return [last - line if n == _NUMBERS else line for n, line in zip(which, back, strict=True)]
    lines = in_order(x, axis)
    return [x.with_part(brought(lines[n], x.layout, "sort")) for n in which]


def in_order(x: Any, axis: int) -> tuple[Any, Any]:
    """The elements in order along an axis, and the index of each before, both split as sorting
    leaves them. Collective where the axis is split. Raises TypeError for complex numbers.
    """
    reductions.require_ordered(x, "sort")
    if x.ndim == 1 and x.layout.partitioned_axes:
        return _sorted_line(x)
    held = whole_along(x, axis)
    order = parts.order(held.local, axis)
    values = parts.taken_along(held.local, order, axis)
    return held.with_part(values), held.with_part(order)


def whole_along(x: Any, axis: int) -> Any:
    """The array itself if each rank has the axis whole, else in slabs along another axis."""
    if axis not in x.layout.partitioned_axes:
        return x
    others = [-1 if number == axis else extent for number, extent in enumerate(x.shape)]
    return in_slabs(x, int(np.argmax(others)), f"axis {axis}, whole on each rank")


def _sorted_line(x: Any) -> tuple[Any, Any]:
    """The elements of a line in order, and the index of each before, both in boxes."""
    context, size = x.context, x.context.size
    permit(lambda: f"sort: {x.layout}, of which elements go where their place is")
    slab = layout_of(Slab(0), x.shape, size)
    part = part_in(x, slab)
    own = indices(slab.spans(context.rank)[0])

    def ordered(*lines: Any) -> list[Any]:
        order = parts.order(lines[0], 0)
        return [parts.taken_along(line, order, 0) for line in lines]

    lines = ordered(part, parts.converted(own.copy(), part))
    host = parts.on_host(lines[0])
    samples = host[np.arange(size if len(host) else 0) * len(host) // size]
    everywhere = np.sort(all_gather(samples.copy(), context=context))
    bounds = everywhere[np.arange(1, size) * len(everywhere) // size]
    counts = np.diff([0, *np.searchsorted(host, bounds, side="right"), len(host)]).tolist()
    lines = ordered(*(all_to_all(line, send_counts=counts, context=context) for line in lines))
    values, numbers = (in_boxes(x, line) for line in lines)
    return values, numbers


def take_along_axis(x: Any, indices: Any, axis: int | None = -1) -> Any:
    """The elements at indices along an axis, different ones for each line, as
    numpy.take_along_axis.

    Collective: both arrays are brought to parts that have the axis whole; those of
    one axis go to `take`. Raises IndexError for an index out of range.
    """
    x, numbers = all_distributed((x, indices))
    x, axis = flat_or_along(x, axis)
    if x.ndim != numbers.ndim:
        raise ValueError(
            f"the indices have {numbers.ndim} axes, and the array {x.ndim}: give them as many"
        )
    if x.ndim == 1:
        return take(x, numbers, 0)
    extent = x.shape[axis]
    others = [(*z.shape[:axis], *z.shape[axis + 1 :]) for z in (x, numbers)]
    shape = np.broadcast_shapes(*others)
    x = whole_along(broadcast_to(x, [*shape[:axis], extent, *shape[axis:]]), axis)
    numbers = broadcast_to(numbers, [*shape[:axis], numbers.shape[axis], *shape[axis:]])
    if reductions.any((numbers < -extent) | (numbers >= extent)).item():
        raise IndexError(f"an index is out of range for axis {axis}, of {extent} elements")
    distribution, layout = with_axis(x, axis, numbers.shape[axis])
    line = brought(numbers, layout, "the indices")
    line = parts.chosen(line < 0, line + extent, line)
    return x.like(parts.taken_along(x.local, line, axis), distribution, layout)


# -- what is where ---------------------------------------------------------------------------------


def nonzero(x: Any) -> tuple[Any, ...]:
    """The indices of the elements that are not 0, an array for each axis, as numpy.nonzero.

    Collective: each rank has those of its rows, in boxes. Raises ValueError for an array of no
    axes.
    """
    if not x.ndim:
        raise ValueError("nonzero takes arrays of one axis or more: use x[None]")
    held = in_rows(x)
    places = np.nonzero(parts.on_host(held.local))
    spans = held.layout.spans(x.context.rank)
    return tuple(
        of_rows(held, parts.converted(indices(along)[chosen], x.local))
        for along, chosen in zip(spans, places, strict=True)
    )


def count_nonzero(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
    """How many elements are not 0, as numpy.count_nonzero. Collective where `axis` is split."""
    return reductions.sum(x != 0, axis, None, keepdims)


def searchsorted(x1: Any, x2: Any, side: str = "left", sorter: Any = None) -> Any:
    """Where elements of `x2` belong in the sorted line `x1`, as numpy.searchsorted.

    Every rank gets all of `x1`, and looks up its part of `x2`.
    """
    if side not in ("left", "right"):
        raise ValueError(f"side is 'left' or 'right', not {side!r}")
    x1, x2 = all_distributed((x1, x2))
    known = on_all_ranks(x1 if sorter is None else take(x1, sorter))

    def placed(part: Any) -> Any:
        places = np.searchsorted(known, parts.on_host(part), side=side)  # type: ignore[call-overload]
        return parts.converted(np.asarray(places), part)

    return applied(placed, (x2,))


# -- sets ------------------------------------------------------------------------------------------


class UniqueCounts(NamedTuple):
    """The different elements, and the number of each."""

    values: Any
    counts: Any


class UniqueInverse(NamedTuple):
    """The different elements, and the place among them of each element."""

    values: Any
    inverse_indices: Any


class UniqueAll(NamedTuple):
    """The different elements, the first index of each, the place among them of each element, and
    the number of each.
    """

    values: Any
    indices: Any
    inverse_indices: Any
    counts: Any


def unique_values(x: Any) -> Any:
    """The different elements, ascending, as numpy.unique_values; each NaN counts as different.
    Collective.
    """
    return unique_all(x, "values").values


def unique_counts(x: Any) -> UniqueCounts:
    """The different elements, ascending, and the number of each, as numpy.unique_counts."""
    values, _, _, counts = unique_all(x, "counts")
    return UniqueCounts(values, counts)


def unique_inverse(x: Any) -> UniqueInverse:
    """The different elements, which every rank gets, and the place among them of each element, as
    numpy.unique_inverse; for NaN, of the first.
    """
    values, _, inverse, _ = unique_all(x, "inverse")
    return UniqueInverse(values, inverse)


def unique_all(x: Any, only: str = "") -> UniqueAll:
    """All results of numpy.unique_all, or `only` "values", "indices", "inverse" or "counts"."""
    asked = [_VALUES, _NUMBERS] if only in ("", "indices") else [_VALUES]
    line, *order = _in_order(reshape(x, (-1,)), 0, False, *asked)
    changes = concat([np.ones(min(x.size, 1), bool), line[1:] != line[:-1]])
    values = masks.get(line, changes)
    first = masks.get(order[0], changes) if order else None
    inverse = searchsorted(values, x) if only in ("", "inverse") else None
    counts = diff(nonzero(changes)[0], append=x.size) if only in ("", "counts") else None
    return UniqueAll(values, first, inverse, counts)
