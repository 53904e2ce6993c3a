"""Elements at any indices: what `take`, `x[[3, 1, 5]]` and `x[rows, columns]` read.

Every rank knows all indices and all layouts, so it knows which rank has each element that is
selected and which rank gets it: one exchange of just these elements brings them there.

    indices   5 0 4 | 1 1 3        the result is split evenly, at the bar
    owners    1 0 1 | 0 0 0        x has 0, ..., 3 on rank 0, and 4, ... on rank 1

An element that is selected twice is sent twice. Along axes that no rank shares nothing is sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import numpy as np

from shardmath.arrays.base import HostArray
from shardmath.base.collective_call import collective_call
from shardmath.collectives import all_to_all
from shardmath.context.agreement import require_equal
from shardmath.context.context import DistributedContext
from shardmath.distributed import parts
from shardmath.distributed.layouts import distribution_of_axes, indices, layout_of
from shardmath.distributed.movement import in_slabs, permit, settled
from shardmath.geometry import Layout, Slab, Spans, unbound

_SHOWN = 4  # indices that an error shows


def checked(numbers: HostArray, extent: int, axis: int) -> HostArray:
    """Indices of an axis, with negative ones counted from the end. Raises IndexError for an index
    out of range, and for elements that are no integers.
    """
    if numbers.dtype.kind not in "iu" and numbers.size:
        raise IndexError(f"the indices of axis {axis} are {numbers.dtype}: give integers or bool")
    numbers = numbers.astype(np.intp)
    wrong = numbers[(numbers < -extent) | (numbers >= extent)]
    if wrong.size:
        raise IndexError(f"index {wrong[0]} is out of range for axis {axis}, of {extent} elements")
    return np.where(numbers < 0, numbers + extent, numbers)


def gathered(x: Any, numbers: Sequence[HostArray], place: int, purpose: str) -> Any:
    """The elements at `numbers`: arrays of one shape, the indices along the axes from `place` on.
    The result has the axes of that shape in place of these axes.

    Collective where these axes are split; the result is then in slabs of the longest of its new
    axes. Raises RuntimeError where moves are forbidden.
    """
    shape, axes = numbers[0].shape, range(place, place + len(numbers))
    if not set(axes).isdisjoint(x.layout.partitioned_axes):
        return _gathered_from_ranks(x, numbers, place, purpose)
    columns = [x.layout.column(axis) for axis in range(x.ndim)]
    extents = (*x.shape[:place], *shape, *x.shape[axes.stop :])
    kept = [*columns[:place], *(None for _ in shape), *columns[axes.stop :]]
    layout = Layout.product(extents, kept, size=x.context.size)
    names = (
        *range(place),
        *(place if number == 0 else None for number in range(len(shape))),
        *range(axes.stop, x.ndim),
    )
    like = distribution_of_axes(unbound(x.distribution), names)
    local = parts.picked(x.local, [line.reshape(-1) for line in numbers], place)
    return settled(x, local.reshape(layout.local_shape(x.context.rank)), layout, like)


def _gathered_from_ranks(x: Any, numbers: Sequence[HostArray], place: int, purpose: str) -> Any:
    """`gathered` along axes that are split, which takes an exchange. Collective."""
    shape, size = numbers[0].shape, x.context.size
    axes = range(place, place + len(numbers))
    if not (set(x.layout.partitioned_axes) <= set(axes) and x.layout.disjoint()):
        x = in_slabs(x, max(axes, key=lambda axis: x.shape[axis]), purpose)
    lines = [line.reshape(-1) for line in numbers]
    count = len(lines[0])
    permit(lambda: f"{purpose}: {count} indices of axis {place}, which is split: {x.layout}")
    target = Slab(place + int(np.argmax(shape)))
    layout = layout_of(target, (*x.shape[:place], *shape, *x.shape[axes.stop :]), size)
    flat = np.arange(math.prod(shape)).reshape(shape)
    wanted = []
    for part in layout.parts:
        along = part[place : place + len(shape)]
        wanted.append(flat[tuple(slice(s.start, s.stop) for s in along)].reshape(-1))
    local = exchanged(x, lines, place, wanted)
    return x.like(local.reshape(layout.local_shape(x.context.rank)), target, layout)


@collective_call
def exchanged(x: Any, lines: Sequence[HostArray], place: int, wanted: Sequence[HostArray]) -> Any:
    """This rank's elements of those at `lines` along the axes from `place` on, which become one.
    Collective.

    The array is split along these axes alone, and each element is on one rank. `wanted` says which
    numbers of the lines each rank gets, in which order. Raises CollectiveMismatch on all ranks
    where they give different lines.
    """
    rank, size = x.context.rank, x.context.size
    require_equal_on_all_ranks(x.context, [*lines, *wanted])
    owners = np.empty(len(lines[0]), np.intp)
    for number, part in enumerate(x.layout.parts):
        owners[owned(part[place : place + len(lines)], x.shape[place:], lines)] = number
    sent = [numbers[owners[numbers] == rank] for numbers in wanted]
    mine = np.concatenate(sent)
    held = x.layout.spans(rank)[place : place + len(lines)]
    places = local_places(held, [line[mine] for line in lines])
    picked = parts.picked(x.local, places, place)
    sources = owners[wanted[rank]]
    received = all_to_all(
        picked,
        axis=place,
        send_counts=[len(numbers) for numbers in sent],
        receive_counts=np.bincount(sources, minlength=size).tolist(),
        context=x.context,
    )
    order = np.argsort(sources, kind="stable")  # they are received rank after rank
    return parts.taken(received, np.argsort(order), place)


def require_equal_on_all_ranks(context: DistributedContext, lines: Sequence[HostArray]) -> None:
    """Raise CollectiveMismatch on all ranks where they give different indices. Collective.

    Ranks exchange the number of indices and a checksum, not all indices.
    """

    def described() -> tuple[Any, ...]:
        checksum = 0
        for line in lines:
            checksum = crc32(np.ascontiguousarray(line).data, checksum)
        first = lines[0]
        return len(first), first[:_SHOWN].tolist(), checksum

    def compared(specs: list[tuple[Any, ...]]) -> None:
        require_equal("how many indices there are", [count for count, *_ in specs])
        require_equal(f"the first {_SHOWN} indices", [shown for _, shown, _ in specs])
        require_equal("the indices", [f"checksum {checksum:08x}" for *_, checksum in specs])

    context.agree("indices", described, compared)


def owned(part: Sequence[Spans], extents: Sequence[int], lines: Sequence[HostArray]) -> HostArray:
    """Which of the indices in `lines`, one line for each axis, lie in a part."""
    there: HostArray = np.ones(len(lines[0]), bool)
    for spans, extent, line in zip(part, extents, lines, strict=False):
        held = np.zeros(extent, bool)
        held[indices(spans)] = True
        there &= held[line]
    return there


def local_places(part: Sequence[Spans], lines: Sequence[HostArray]) -> list[HostArray]:
    """Where the indices in `lines`, one line for each axis, lie in this rank's part."""
    return [np.searchsorted(indices(spans), line) for spans, line in zip(part, lines, strict=True)]
