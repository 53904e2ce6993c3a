"""Functions that give an array another shape, or join arrays.

Axes that are whole on each rank are handled part by part. Where split axes are cut, joined or
reshaped, elements move between ranks, by layouts; no rank needs more memory than for its part of
the result.

    x (n, m) Slab.X   reshape (n, a, b)    Slab.X    no exchange
                      reshape (n m,)       Slab.X    no exchange, if n is a multiple of the ranks
                      roll by k, axis 0    Slab.X    k rows of each rank move
    x, y Slab.X       concat, axis 1       Slab.X    no exchange
                      concat, axis 0       Slab.X    rows move
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from shardmath.arrays import dtypes
from shardmath.arrays.base import HostArray
from shardmath.base.integers import integers
from shardmath.distributed import gathering, indexing, parts
from shardmath.distributed.elementwise import all_distributed, applied, broadcast_shape, broadcasts
from shardmath.distributed.layouts import (
    distribution_of,
    indices,
    layout_of,
    with_axis,
    with_new_axis,
)
from shardmath.distributed.movement import (
    brought,
    in_slabs,
    on_all_ranks,
    received,
    settled,
    whole_everywhere,
)
from shardmath.distributed.reductions import axes_of
from shardmath.distributed.state import Distributed
from shardmath.geometry import (
    BlockCyclic,
    BlockNonCyclic,
    Distribution,
    Layout,
    Slab,
    Spans,
    unbound,
)

Shape = tuple[int, ...]
Axis = int | Sequence[int] | None

# -- the order of axes, and axes of one element ----------------------------------------------------


def permute_dims(x: Any, axes: Sequence[int] | None = None) -> Any:
    """The axes in another order, by default reversed; a view, as numpy.transpose. Local."""
    return x.transpose(*(() if axes is None else (tuple(axes),)))


def matrix_transpose(x: Any) -> Any:
    """The last two axes exchanged; a view. Local. Raises ValueError for fewer than two."""
    if x.ndim < 2:
        raise ValueError(f"matrix_transpose takes arrays of two axes or more, not {x.ndim}")
    return swapaxes(x, -1, -2)


def swapaxes(x: Any, axis1: int, axis2: int) -> Any:
    """Two axes exchanged; a view, as numpy.swapaxes. Local."""
    order = list(range(x.ndim))
    one, two = (one_axis(axis, x.ndim) for axis in (axis1, axis2))
    order[one], order[two] = two, one
    return permute_dims(x, order)


def moveaxis(x: Any, source: Axis, destination: Axis) -> Any:
    """Axes moved to other places, the others in their order; a view, as numpy.moveaxis. Local."""
    given = [
        (axes,) if isinstance(axes, int) else tuple(axes or ()) for axes in (source, destination)
    ]
    taken, put = ([one_axis(axis, x.ndim) for axis in axes] for axes in given)
    if len(taken) != len(put) or len({*taken}) < len(taken) or len({*put}) < len(put):
        raise ValueError(
            f"moveaxis from {source!r} to {destination!r}: name as many axes, each once"
        )
    order = [axis for axis in range(x.ndim) if axis not in taken]
    for place, axis in sorted(zip(put, taken, strict=True)):
        order.insert(place, axis)
    return permute_dims(x, order)


def expand_dims(x: Any, axis: int | Sequence[int] = 0) -> Any:
    """New axes of one element, at these places of the result, as numpy.expand_dims. Local."""
    given = (axis,) if isinstance(axis, int) else tuple(axis)
    new = axes_of(given, x.ndim + len(given))
    return x[tuple(None if place in new else slice(None) for place in range(x.ndim + len(new)))]


def squeeze(x: Any, axis: Axis = None) -> Any:
    """The array without axes of one element, by default without all of them, as numpy.squeeze.

    Raises ValueError for a longer axis. Collective where one element of a split array is left.
    """
    gone = [n for n, extent in enumerate(x.shape) if extent == 1] if axis is None else axis
    numbers = axes_of(gone, x.ndim)
    for number in numbers:
        if x.shape[number] != 1:
            raise ValueError(
                f"axis {number} has {x.shape[number]} elements: squeeze removes axes of one"
            )
    return x[tuple(0 if number in numbers else slice(None) for number in range(x.ndim))]


def flip(x: Any, axis: Axis = None) -> Any:
    """The elements in reverse order along axes, by default all, as numpy.flip."""
    numbers = axes_of(axis, x.ndim)
    back, all_ = slice(None, None, -1), slice(None)
    return x[tuple(back if number in numbers else all_ for number in range(x.ndim))]


# -- more elements ---------------------------------------------------------------------------------


def broadcast_to(x: Any, shape: int | Sequence[int]) -> Any:
    """The array broadcast to a shape, as numpy.broadcast_to.

    Parts are views. Raises ValueError where the shape does not fit.
    """
    target = integers((shape,) if isinstance(shape, int) else shape, "shape", least=0)
    if not broadcasts(x.shape, target):
        raise ValueError(f"an array of shape {x.shape} does not broadcast to {target}")
    module, plain = parts.module_of(x.local), parts.converted(np.zeros((), bool), x.local)
    wide = module.broadcast_to(plain, target)
    return applied(lambda part, like: module.broadcast_to(part, like.shape), (x, wide))


def broadcast_arrays(*arrays: Any) -> tuple[Any, ...]:
    """The arrays, broadcast to their common shape, as numpy.broadcast_arrays."""
    shape = broadcast_shape(arrays)
    return tuple(broadcast_to(x, shape) for x in all_distributed(arrays))


def meshgrid(*arrays: Any, indexing: str = "xy") -> tuple[Any, ...]:
    """The coordinates of a grid, an array for each of the one-dimensional `arrays`, as
    numpy.meshgrid.
    """
    if indexing not in ("xy", "ij"):
        raise ValueError(f"indexing is 'xy' or 'ij', not {indexing!r}")
    lines = all_distributed(arrays)
    if any(x.ndim > 1 for x in lines):
        raise ValueError("meshgrid takes arrays of one axis")
    order = list(range(len(lines)))
    if indexing == "xy":
        order[:2] = order[:2][::-1]
    wide = [reshape(x, [-1 if place == n else 1 for place in order]) for n, x in enumerate(lines)]
    return broadcast_arrays(*wide)


def repeat(x: Any, repeats: Any, axis: int | None = None) -> Any:
    """Each element repeated, as numpy.repeat; without an axis, of the flattened array.

    Local for one number. Different numbers for the indices along the axis, the same on all ranks,
    are taken as by `take`.
    """
    x, axis = flat_or_along(x, axis)
    times = on_all_ranks(repeats)
    if times.size != 1:
        return take(x, np.repeat(np.arange(x.shape[axis]), times), axis)
    factor = operator.index(times.reshape(())[()])
    if factor < 0:
        raise ValueError(f"repeats is {factor}, and must not be negative")
    column = [_scaled(spans, factor) for spans in x.layout.column(axis)]
    layout = x.layout.with_column(axis, x.shape[axis] * factor, column)
    like = unbound(x.distribution)
    if type(like) is BlockCyclic and factor:
        blocks = [b * factor if number == axis else b for number, b in enumerate(like.block_sizes)]
        like = BlockCyclic(like.process_grid, blocks, first_process=like.first_process)
    return settled(x, parts.repeated(x.local, factor, axis), layout, like)


def tile(x: Any, repetitions: int | Sequence[int]) -> Any:
    """The array repeated along each axis, as numpy.tile."""
    given = (repetitions,) if isinstance(repetitions, int) else repetitions
    times = integers(given, "repetitions", least=0)
    times = (1,) * (x.ndim - len(times)) + times
    x = x[(None,) * (len(times) - x.ndim) + (Ellipsis,)]
    for axis, count in enumerate(times):
        if count == 0:
            x = x[parts.along(axis, slice(0, 0))]
        elif count > 1:
            x = concat([x] * count, axis)
    return x


# The modes of pad, and the arguments that each takes.
_MODES: dict[Any, tuple[str, ...]] = {
    "constant": ("constant_values",),
    "empty": (),
    "edge": (),
    "reflect": ("reflect_type",),
    "symmetric": ("reflect_type",),
    "wrap": (),
}


def pad(array: Any, pad_width: Any, mode: Any = "constant", **words: Any) -> Any:
    """The array with elements before and behind along its axes, as numpy.pad.

    `pad_width` is their number, a pair (before, behind), a pair for each axis, or a dictionary of
    axes. The elements are `constant_values`, by default 0, or, in the modes "edge", "reflect",
    "symmetric" and "wrap", copies, which are taken as by `take`. Elements move where a split axis
    is padded.

    Raises ValueError for negative widths, and for copies along an axis of no elements;
    NotImplementedError for other modes.
    """
    widths = _pairs(pad_width, array.ndim)
    if np.any(widths < 0):
        raise ValueError(f"pad_width is {pad_width!r}, and must not be negative")
    taken, reflection = _MODES.get(mode), words.get("reflect_type", "even")
    if taken is None or not {*words} <= {*taken} or reflection != "even":
        given = "".join(f", {name}={value!r}" for name, value in words.items())
        raise NotImplementedError(
            f"pad(x, width, {mode!r}{given}) of a DistributedArray: make the elements before and "
            "behind, and np.concatenate([before, x, behind], axis)"
        )
    values = None
    if mode in ("constant", "empty"):
        values = _pairs(words.get("constant_values", 0), array.ndim)
        values = values.astype(dtypes.to_numpy(array.element_type))
    made = array
    for axis, ends in enumerate(widths.tolist()):  # corners have what is put along the last axis
        extent = made.shape[axis]
        if values is not None and any(ends):
            shapes = [(*made.shape[:axis], count, *made.shape[axis + 1 :]) for count in ends]
            before, behind = map(np.broadcast_to, values[axis], shapes)
            made = concat([before, made, behind], axis)
        elif any(ends):
            if not extent:
                raise ValueError(f"axis {axis} has no elements with which {mode!r} could pad it")
            made = take(made, np.pad(np.arange(extent), ends, mode), axis)
    return made.copy() if made is array else made


def _pairs(given: Any, axes: int) -> HostArray:
    """One pair for each axis, of what is given for all axes, for both ends, or for each axis."""
    if isinstance(given, dict):
        rows: list[Any] = [(0, 0)] * axes
        for axis, ends in given.items():
            rows[one_axis(axis, axes)] = np.broadcast_to(ends, 2)
        given = rows
    return np.broadcast_to(np.asarray(given), (axes, 2))


# -- arrays together -------------------------------------------------------------------------------


def concat(arrays: Sequence[Any], axis: int | None = 0) -> Any:
    """The arrays joined along an axis, as numpy.concatenate; with None they are flattened first.

    Part by part where the axis is not split; otherwise each piece moves to its place. Raises
    ValueError where other extents differ.
    """
    operands = all_distributed(arrays)
    if axis is None:
        return concat([reshape(x, (-1,)) for x in operands], 0)
    return _joined(operands, one_axis(axis, operands[0].ndim), None)


def stack(arrays: Sequence[Any], axis: int = 0) -> Any:
    """The arrays joined along a new axis, as numpy.stack."""
    operands = all_distributed(arrays)
    first = operands[0]
    if any(x.shape != first.shape for x in operands):
        raise ValueError(
            f"stack takes arrays of one shape, not {', '.join(str(x.shape) for x in operands)}"
        )
    axis, operands = one_axis(axis, first.ndim + 1), of_one_type(operands)
    if all(x.layout is first.layout or x.layout == first.layout for x in operands):
        given = first.layout, first.distribution, axis, len(operands), first.context.rank
        if (found := with_new_axis(*given)) is not None:
            pieces = [x.local for x in operands]
            return first.like(parts.module_of(pieces[0]).stack(pieces, axis=axis), *found)
    return _joined([expand_dims(x, axis) for x in operands], axis, None)


def unstack(x: Any, axis: int = 0) -> tuple[Any, ...]:
    """The arrays at each index along an axis, as numpy.unstack."""
    before = parts.along(one_axis(axis, x.ndim))
    return tuple(x[(*before, number)] for number in range(x.shape[len(before)]))


def roll(x: Any, shift: int | Sequence[int], axis: Axis = None) -> Any:
    """The elements shifted cyclically by `shift` places, as numpy.roll."""
    if axis is None:
        return reshape(roll(reshape(x, (-1,)), shift, 0), x.shape)
    numbers = np.broadcast_arrays(np.asarray(shift), np.asarray(axis))
    for step, one in zip(*(line.reshape(-1).tolist() for line in numbers), strict=True):
        number = one_axis(one, x.ndim)
        cut = -step % max(x.shape[number], 1)
        if cut:
            ends = (parts.along(number, slice(cut, None)), parts.along(number, slice(0, cut)))
            x = _joined([x[end] for end in ends], number, x.distribution)
    return x


def _joined(operands: Sequence[Any], axis: int, like: Distribution | None) -> Any:
    """The operands joined along an axis, split as `like`, or as the largest operand."""
    shapes = [x.shape for x in operands]
    others = {(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}
    if len(others) > 1:
        raise ValueError(
            f"arrays of shapes {', '.join(map(str, shapes))} cannot be joined along axis {axis}: "
            "their other axes differ"
        )
    operands = of_one_type(operands)
    shape = list(shapes[0])
    shape[axis] = sum(one[axis] for one in shapes)
    if not any(axis in x.layout.partitioned_axes for x in operands):
        return _joined_parts(operands, axis, tuple(shape))
    largest = max(operands, key=lambda x: x.size * bool(x.layout.partitioned_axes))
    distribution, layout = _in_one_block(like or largest.distribution, tuple(shape), largest)
    empty = parts.empty(layout.local_shape(largest.context.rank), largest.local)
    made = largest.like(empty, distribution, layout)
    end = 0
    for x in operands:
        begin, end = end, end + x.shape[axis]
        indexing.put(made, parts.along(axis, slice(begin, end)), x)
    return made


def _joined_parts(operands: Sequence[Any], axis: int, shape: Shape) -> Any:
    """The operands joined along an axis that each rank has whole; those that are split otherwise
    along other axes move.
    """

    def needed(like: Any) -> list[Layout]:
        return [with_axis(like, axis, x.shape[axis])[1] for x in operands]

    def cost(like: Any) -> int:
        pairs = zip(operands, needed(like), strict=True)
        return sum(received(x.layout, to, x.element_type.itemsize) for x, to in pairs)

    like = operands[0]
    if [x.layout for x in operands] != needed(like):
        like = min(operands, key=cost)
    distribution, layout = with_axis(like, axis, shape[axis])
    places = enumerate(zip(operands, needed(like), strict=True))
    pieces = [brought(x, to, f"array {n}") for n, (x, to) in places]
    local = parts.module_of(pieces[0]).concatenate(pieces, axis=axis)
    return like.like(local, distribution, layout)


def _in_one_block(
    distribution: Distribution, shape: Shape, x: Distributed
) -> tuple[Distribution, Layout]:
    """A distribution like the given one, in which each rank has one block, so that slices can be
    assigned, and its layout.
    """
    target = unbound(distribution)
    if type(target) is BlockCyclic:
        target = BlockNonCyclic(target.process_grid, first_process=target.first_process)
    if target.per_rank:
        if shape == x.shape:
            return target, x.layout
        target = Slab(int(np.argmax(shape)))
    return target, layout_of(target, shape, x.context.size)


def of_one_type(operands: Sequence[Any], *, inexact: bool = False) -> list[Any]:
    """The operands in their common type, by NumPy's rules; with `inexact`, in float64 if that would
    be integers or bool.
    """
    types = [x.element_type for x in operands]
    together = types[0]
    if len({*types}) > 1:
        together = dtypes.of(np.result_type(*map(dtypes.to_numpy, types)))
    if inexact:
        together = dtypes.inexact(together)
    pairs = zip(operands, types, strict=True)
    return [x if own == together else x.astype(together) for x, own in pairs]


# -- other shapes ----------------------------------------------------------------------------------


def reshape(x: Any, shape: int | Sequence[int], order: str = "C", copy: bool | None = None) -> Any:
    """The elements in C order in another shape, as numpy.reshape; one extent may be -1.

    Nothing moves if the ranks' parts are parts of an array of the new shape, too; otherwise the
    result is in slabs. Raises ValueError where the number of elements differs, NotImplementedError
    for another order.
    """
    if order != "C":
        raise NotImplementedError(f"reshape in order {order!r}: use x.T.reshape(shape[::-1]).T")
    target = _resolved(x.shape, (shape,) if isinstance(shape, int) else shape)
    if target == x.shape:
        return x.copy() if copy else x
    size, rank = x.context.size, x.context.rank
    if not target or not x.size or x.layout.is_replicated:
        return x.everywhere(whole_everywhere(x, "reshape").local.reshape(target))
    groups = _groups(x.shape, target)
    flat = _flat_layout(x.layout, groups, 0)
    if flat is None:  # several axes of a group are split, or one is cyclic
        x = in_slabs(x, int(np.argmax(x.shape)), "reshape")
        flat = _flat_layout(x.layout, groups, 0)
        assert flat is not None, "a slab is split along one axis, in blocks"
    held = x.like(x.local.reshape(flat.local_shape(rank)), x.distribution, flat)
    layout = _raised(flat, target, groups)
    distribution = distribution_of(layout, rank) if layout else None
    if layout is None or distribution is None:
        distribution, goal = _nearest(flat, target, groups)
        layout = layout_of(distribution, target, size)
        held = x.like(brought(held, goal, "reshape"), x.distribution, goal)
    local = held.local.reshape(layout.local_shape(rank))
    made = x.like(local, distribution, layout)
    return made.copy() if copy else made


Group = tuple[range, range]  # axes before and after, with as many elements


def _resolved(shape: Shape, target: Sequence[int]) -> Shape:
    """The new shape, with -1 replaced by its extent."""
    given = [operator.index(extent) for extent in target]
    known = math.prod(extent for extent in given if extent != -1)
    elements = math.prod(shape)
    if given.count(-1) == 1 and known:
        given[given.index(-1)] = elements // known
    if math.prod(given) != elements or min(given, default=0) < 0:
        raise ValueError(f"an array of shape {shape} cannot be reshaped to {tuple(target)}")
    return tuple(given)


@lru_cache(maxsize=1024)
def _groups(source: Shape, target: Shape) -> tuple[Group, ...]:
    """The smallest groups of consecutive axes, before and after, with as many elements."""
    groups: list[Group] = []
    i = j = 0
    while i < len(source) or j < len(target):
        if i == len(source) or j == len(target):  # what is left has one element
            before, after = groups.pop()
            groups.append((range(before.start, len(source)), range(after.start, len(target))))
            break
        first = i, j
        before_, after_ = source[i], target[j]
        i, j = i + 1, j + 1
        while before_ != after_:
            if before_ < after_:
                before_, i = before_ * source[i], i + 1
            else:
                after_, j = after_ * target[j], j + 1
        groups.append((range(first[0], i), range(first[1], j)))
    return tuple(groups)


@lru_cache(maxsize=1024)
def _flat_layout(layout: Layout, groups: tuple[Group, ...], side: int) -> Layout | None:
    """The layout with each group's axes flattened to one; None where a part is no `Spans` then."""
    columns: list[list[Spans]] = []
    for group in groups:
        axes = group[side]
        split = [axis for axis in axes if axis in layout.partitioned_axes]
        if len(split) > 1:
            return None
        axis = split[0] if split else axes[0]
        made = [_flattened(spans, *_around(layout.global_shape, axes, axis))
                for spans in layout.column(axis)]  # fmt: skip
        if None in made:
            return None
        columns.append([spans for spans in made if spans is not None])
    shape = [math.prod(layout.global_shape[axis] for axis in group[side]) for group in groups]
    return Layout.product(shape, columns, size=layout.size)


@lru_cache(maxsize=1024)
def _raised(flat: Layout, target: Shape, groups: tuple[Group, ...]) -> Layout | None:
    """The layout of the new shape in which each rank has the elements of `flat`, or None."""
    columns: list[Sequence[Spans] | None] = [None] * len(target)
    for number in flat.partitioned_axes:
        for axis in groups[number][1]:
            around = _around(target, groups[number][1], axis)
            made = [_cut(spans, *around) for spans in flat.column(number)]
            if None not in made:
                columns[axis] = [spans for spans in made if spans is not None]
                break
        else:
            return None
    return Layout.product(target, columns, size=flat.size)


@lru_cache(maxsize=1024)
def _nearest(flat: Layout, target: Shape, groups: tuple[Group, ...]) -> tuple[Slab, Layout]:
    """The slab of the new shape to which the fewest elements move, preferring slabs that give every
    rank some; and its flat layout.
    """
    most = min(flat.size, max(target))
    choices = []
    for axis, extent in enumerate(target):
        wanted = _flat_layout(Layout.slab(target, flat.size, axis=axis), groups, 1)
        if extent >= most and wanted is not None:
            choices.append((received(flat, wanted, 1), axis, wanted))
    _, axis, wanted = min(choices, key=lambda choice: choice[:2])
    return Slab(axis), wanted


def _around(shape: Shape, axes: range, axis: int) -> tuple[int, int, int]:
    """The numbers of elements of a group's axes before `axis`, of it, and behind it."""
    before = math.prod(shape[other] for other in axes if other < axis)
    behind = math.prod(shape[other] for other in axes if other > axis)
    return before, shape[axis], behind


def _flattened(spans: Spans, before: int, extent: int, behind: int) -> Spans | None:
    """`spans` along one axis of a group, flattened with the group; None if they are not regular."""
    if before == 1 or not spans.block:
        return _scaled(spans, behind)
    if spans.period:
        return None
    period = extent * behind
    stop = (before - 1) * period + spans.stop * behind
    return Spans(spans.start * behind, spans.block * behind, period, stop)


def _cut(flat: Spans, before: int, extent: int, behind: int) -> Spans | None:
    """The spans along one axis that flatten to `flat`; None where there are none."""
    if before > 1 and flat.period == 0 and flat.block == before * extent * behind:
        return Spans.interval(0, extent)
    made = Spans(
        flat.start // behind,
        flat.block // behind,
        flat.period // behind if before == 1 else 0,
        flat.stop // behind if before == 1 else (flat.start + flat.block) // behind,
    )
    if made.stop > extent:
        return None
    return made if _flattened(made, before, extent, behind) == flat else None


def _scaled(spans: Spans, factor: int) -> Spans:
    return Spans(
        spans.start * factor, spans.block * factor, spans.period * factor, spans.stop * factor
    )


# -- indices ---------------------------------------------------------------------------------------


def take(x: Any, indices: Any, axis: int | None = None) -> Any:
    """The elements at indices along an axis, as numpy.take; with None, of the flattened array.

    The indices are the same on all ranks, or distributed, and then sent to all. Along a split axis
    the ranks exchange the elements that are taken, and the result is split evenly along it. Raises
    IndexError for an index out of range.
    """
    x, axis = flat_or_along(x, axis)
    numbers = gathering.checked(on_all_ranks(indices), x.shape[axis], axis)
    if not numbers.ndim:
        return x[parts.along(axis, int(numbers))]
    return gathering.gathered(x, [numbers], axis, "take")


def tril(x: Any, k: int = 0) -> Any:
    """The elements on and below diagonal `k`, with zeros elsewhere, as numpy.tril. Local."""
    return _triangle(x, lambda i, j: j - i <= k)


def triu(x: Any, k: int = 0) -> Any:
    """The elements on and above diagonal `k`, with zeros elsewhere, as numpy.triu. Local."""
    return _triangle(x, lambda i, j: j - i >= k)


def _triangle(x: Any, keeps: Any) -> Any:
    if x.ndim < 2:
        raise ValueError(f"tril and triu take arrays of two axes or more, not {x.ndim}")
    zero = x.element_type.kind != "b" and 0
    return x.with_part(parts.chosen(in_matrices(x, keeps), x.local, zero))


def in_matrices(x: Any, holds: Callable[[HostArray, HostArray], Any]) -> Any:
    """Where a condition on rows and columns holds in this rank's part of matrices."""
    rows, columns = (indices(spans) for spans in x.layout.spans(x.context.rank)[-2:])
    return parts.converted(holds(rows[:, None], columns), x.local)


def flat_or_along(x: Any, axis: int | None) -> tuple[Any, int]:
    """The array and the number of an axis; with None the flattened array and 0, as NumPy has it."""
    return (reshape(x, (-1,)), 0) if axis is None else (x, one_axis(axis, x.ndim))


def one_axis(axis: int, ndim: int) -> int:
    """The number of an axis, which may be negative. Raises ValueError if it is out of range."""
    return axes_of(operator.index(axis), ndim)[0]
