"""Arrays of indices in `[]`, and masks beside other indices: NumPy's advanced indexing.

    x (n, m, k)   x[[3, 1, 5]]              (3, m, k)
                  x[rows, columns]          (..., k): the shape that both broadcast to
                  x[mask, 0] = values       a mask is the arrays of the indices at which it holds

Together the arrays name a list of positions along the axes that they index. The result has the axes
of the arrays' shape: in place of the indexed axes if these are adjacent, else first. Slices and new
axes are applied first, as views. `gathering` reads the elements; when writing, each rank writes
those in its part, and the last value of a repeated index stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from shardmath.arrays.base import HostArray
from shardmath.distributed import gathering, indexing, masks, parts
from shardmath.distributed.elementwise import whole
from shardmath.distributed.indexing import Index
from shardmath.distributed.layouts import listed, selector
from shardmath.distributed.manipulation import broadcast_to, moveaxis, permute_dims, reshape
from shardmath.distributed.movement import brought, explanation, in_slabs, on_all_ranks, permit
from shardmath.distributed.state import Distributed
from shardmath.geometry import Layout

_READ, _WRITTEN = "an array of indices", "what is assigned"
_LISTS = (list, tuple, range)  # taken for arrays of indices


class Selection(NamedTuple):
    """What a key with arrays selects. `basic` is the key with a full slice in place of each array,
    `axes` are the axes of `x[basic]` that arrays index, and `numbers` the arrays, broadcast to one
    shape, whose axes begin at axis `place` of the result.
    """

    basic: tuple[Any, ...]
    axes: tuple[int, ...]
    numbers: tuple[HostArray, ...]
    place: int


def has_arrays(key: Any) -> bool:
    """Whether the key contains an array of indices, a mask or a list."""
    keys = key if type(key) is tuple else (key,)
    return any(isinstance(one, _LISTS) or getattr(one, "ndim", 0) for one in keys)


def get(x: Any, key: Any) -> Any:
    """`x[key]` for a key with arrays. Collective where an indexed axis is split, where the key is
    one mask, and where the arrays are distributed.

    Raises IndexError for an index out of range, and for arrays that do not broadcast.
    """
    key = _as_indices(key) if isinstance(key, list | range) else key
    if masks.is_mask(key):
        return masks.get(x, key)
    basic, axes, numbers, place = _read(key, x.shape)
    x = indexing.get(x, basic)
    first, count = axes[0], len(axes)
    if axes != tuple(range(first, first + count)):
        first = 0
        x = permute_dims(x, [*axes, *(axis for axis in range(x.ndim) if axis not in axes)])
    made = gathering.gathered(x, numbers, first, _READ)
    if first == place:
        return made
    new = range(numbers[0].ndim)
    return moveaxis(made, [first + n for n in new], [place + n for n in new])


def put(x: Any, key: Any, value: Any) -> None:
    """`x[key] = value` for a key with arrays. The value is broadcast, and the last value of a
    repeated index stays. Collective where the mask, the arrays or the value are distributed.

    Raises IndexError as `get`, ValueError where the value does not broadcast.
    """
    key = _as_indices(key) if isinstance(key, list | range) else key
    value = np.asarray(value) if isinstance(value, list | tuple) else value
    if masks.is_mask(key) and not getattr(value, "shape", ()):
        masks.put_one(x, key, value)
    elif masks.is_mask(key) and isinstance(key, Distributed):
        masks.put(x, key, value)
    else:
        _put(x, _read(key, x.shape), value)


# -- what a key selects ----------------------------------------------------------------------------


def _as_indices(given: Any) -> HostArray:
    """A list as an array; an empty list is of integers, as in NumPy."""
    made = np.asarray(given)
    return made if made.size else made.astype(np.intp)


def _read(key: Any, shape: tuple[int, ...]) -> Selection:
    """The key, split into arrays and the rest; an integer beside arrays counts as an array."""
    keys = [_plain(one) for one in (key if type(key) is tuple else (key,))]
    basic: list[Any] = []
    axes: list[int] = []
    numbers: list[HostArray] = []
    axis = 0  # of the array
    for one in indexing.of_all_axes(keys, len(shape), _axes_of):
        if _is_basic(one):
            basic.append(one)
            axis += one is not None
        else:
            lines = _numbers(one, shape, axis)
            axes.extend(range(len(basic), len(basic) + len(lines)))
            basic.extend([slice(None)] * len(lines))
            numbers.extend(lines)
            axis += len(lines)
    groups = sum(not basic for basic, _ in groupby(keys, _is_basic))
    try:
        together = np.broadcast_shapes(*(line.shape for line in numbers))
    except ValueError:
        shapes = ", ".join(str(line.shape) for line in numbers)
        raise IndexError(
            f"arrays of indices of shapes {shapes} do not broadcast together"
        ) from None
    alike = tuple(np.broadcast_to(line, together) for line in numbers)
    return Selection(tuple(basic), tuple(axes), alike, axes[0] if groups == 1 else 0)


def _plain(one: Any) -> Any:
    """One key, whose arrays are made NumPy's."""
    if isinstance(one, _LISTS):
        return _as_indices(one)
    if not getattr(one, "ndim", 0):
        return one
    if isinstance(one, Distributed):
        return on_all_ranks(one)
    return parts.on_host(one) if parts.is_array(one) else np.asarray(one)


def _is_basic(one: Any) -> bool:
    """Whether a key is a slice, an ellipsis or a new axis: neither an integer nor an array."""
    return one is None or one is Ellipsis or isinstance(one, slice)


def _axes_of(one: Any) -> int:
    """The number of axes that a key indexes."""
    if one is None:
        return 0
    return one.ndim if isinstance(one, np.ndarray) and one.dtype.kind == "b" else 1


def _numbers(one: Any, shape: tuple[int, ...], axis: int) -> Sequence[HostArray]:
    """An integer, an array of integers or a mask, as indices along each axis from `axis` on."""
    if not getattr(one, "ndim", 0):
        return [np.asarray(indexing.one(one, shape[axis], axis).start)]
    if one.dtype.kind != "b":
        return [gathering.checked(one, shape[axis], axis)]
    if one.shape != shape[axis : axis + one.ndim]:
        raise IndexError(
            f"a mask of shape {one.shape} for axis {axis} and so on of an array of shape {shape}"
        )
    return np.nonzero(one)


# -- writing ---------------------------------------------------------------------------------------


def _put(x: Any, selection: Selection, value: Any) -> None:
    basic, axes, numbers, place = selection
    index = indexing.read(basic, x.shape)
    rest = [extent for axis, extent in enumerate(index.shape) if axis not in axes]
    shape = (*rest[:place], *numbers[0].shape, *rest[place:])
    indexing.require_value(value, shape)
    indexed = [axis for axis in map(index.axes.__getitem__, axes) if axis is not None]
    kept = [axis for axis in range(x.ndim) if axis not in indexed]
    lines, extents = [line.reshape(-1) for line in numbers], [x.shape[axis] for axis in indexed]
    last = _last_of_each(lines, extents)

    def of_rank(rank: int) -> HostArray:
        """The numbers of the lines that a rank writes."""
        part = [x.layout.spans(rank)[axis] for axis in indexed]
        return np.flatnonzero(gathering.owned(part, extents, lines) & last)

    picks = indexing.picks_of(x.layout.spans(x.context.rank), index.ranges)
    picks_kept = [picks[axis] for axis in kept]
    mine = of_rank(x.context.rank)
    is_number = not hasattr(value, "shape")
    if not is_number:
        value = broadcast_to(whole(value, x), shape)
        value = moveaxis(value, [place + n for n in range(numbers[0].ndim)],
                         range(numbers[0].ndim))  # fmt: skip
        value = reshape(value, (len(lines[0]), *(len(index.ranges[axis]) for axis in kept)))
        value = _part(x, value, index, kept, [of_rank(rank) for rank in range(x.context.size)])
    is_written = len(mine) and all(len(pick.selected) for pick in picks_kept)
    if explanation.get() is not None or not (is_written or is_number):
        return
    held = [x.layout.spans(x.context.rank)[axis] for axis in indexed]
    places = gathering.local_places(held, [line[mine] for line in lines])
    local = parts.permuted(x.local, [*indexed, *kept])
    parts.assign(local, _places(places, [pick.where for pick in picks_kept]), value)


def _last_of_each(lines: Sequence[HostArray], extents: Sequence[int]) -> HostArray:
    """For each position, whether no later one is the same."""
    count = len(lines[0])
    last: HostArray = np.zeros(count, bool)
    if count:
        flat = np.ravel_multi_index(tuple(lines), tuple(extents))
        last[count - 1 - np.unique(flat[::-1], return_index=True)[1]] = True
    return last


def _part(
    x: Any, value: Any, index: Index, kept: Sequence[int], wanted: Sequence[HostArray]
) -> Any:
    """What this rank writes of `value`, whose first axis counts the positions and whose others are
    the axes `kept` of x; `wanted` has the numbers of the positions that each rank writes.
    """
    rank, split = x.context.rank, set(x.layout.partitioned_axes)
    descending = [place for place, axis in enumerate(kept, 1) if index.ranges[axis].step < 0]
    if split and split.isdisjoint(kept) and not value.layout.is_replicated:
        permit(lambda: f"{_WRITTEN}: {value.layout}, of which each rank gets the lines that it has")
        slabs = in_slabs(value, 0, _WRITTEN)
        local = gathering.exchanged(slabs, [np.arange(value.shape[0])], 0, wanted)
        return parts.flipped(local, descending)
    selected = indexing.selected_layout(x.layout, index.ranges)
    columns = [None if selected is None else selected.column(axis) for axis in kept]
    layout = Layout.product(value.shape, [None, *columns], size=x.context.size)
    local = brought(value, layout, _WRITTEN)
    if selected is None:
        picks = indexing.picks_of(x.layout.spans(rank), index.ranges)
        local = local[selector([slice(0, len(local)), *(picks[axis].selected for axis in kept)])]
    return parts.flipped(parts.taken(local, wanted[rank], 0), descending)


def _places(lines: Sequence[HostArray], beside: Sequence[slice | HostArray]) -> tuple[Any, ...]:
    """The key of positions along the first axes, and of what is selected along the others."""
    if all(isinstance(one, slice) for one in beside):
        return (*lines, *beside)
    first, *others = np.ix_(np.arange(len(lines[0])), *map(listed, beside))
    return (*(line[first] for line in lines), *others)
