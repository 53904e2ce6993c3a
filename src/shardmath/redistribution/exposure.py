"""How a rank exposes its local array to its peers, and how they find it in their address space.

An array on the heap is exposed where it lies. Of any other, the part that peers read is copied to
the heap first. A few numbers travel; the exchange that carries them is also the barrier after which
peers may read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from shardmath.arrays.spec import packed_strides
from shardmath.context.context import Context
from shardmath.handles.operand import Exposed
from shardmath.redistribution.bound_copies import Window, bind
from shardmath.redistribution.copies import whole
from shardmath.redistribution.plan import Transfer
from shardmath.symmetric.heap import Buffer

Ranges = Sequence[tuple[int, int]]


def staged_bytes(ranges: Ranges, itemsize: int) -> int:
    """The bytes that such a copy of part of an array takes."""
    return prod(hi - lo for lo, hi in ranges) * itemsize


def bind_stage(
    context: Context,
    array: Window,
    itemsize: int,
    ranges: Ranges,
    buffer: Buffer,
    at: int = 0,
    *,
    in_c_order: bool = False,
) -> tuple[Exposed, list[Callable[[], object]]]:
    """Where the `ranges` of each axis of an array will lie, and the calls that copy them there.

    That is in `buffer`, from byte `at` on. The copy is dense, its axes in the order of the array's,
    so that it runs at memory speed, or in C order. The calls keep the memory of the array, but not
    of the buffer. Local; an exchange carries the place.
    """
    extents = [hi - lo for lo, hi in ranges]
    fastest_first = sorted(
        range(len(extents)), key=lambda a: (not in_c_order and abs(array.strides[a]), -a)
    )
    strides = packed_strides(extents, itemsize, fastest_first)
    origin = -sum(lo * stride for (lo, _), stride in zip(ranges, strides, strict=True))
    part = sum(lo * stride for (lo, _), stride in zip(ranges, array.strides, strict=True))
    source = Window(array.address + part, array.strides, array.keep)
    copies = [] if 0 in extents else [whole(extents, itemsize, array.strides, strides)]
    context.announce(buffer.block)
    exposed = Exposed(buffer.block.location.behind(at), prod(extents) * itemsize, origin, strides)
    return exposed, bind(copies, {0: source}, Window(buffer.block.address + at, strides, None))


def window_on(
    context: Context,
    rank: int,
    exposed: Exposed,
    transfer: Transfer | None = None,
) -> Window:
    """The array that `rank` exposes, to be read: in place, or a copy where that has no address.

    A copy is made now: when the exchange or barrier has passed after which peers may read. With
    `transfer` it has what that plan moves here from `rank`, else all. Raises CollectiveMismatch
    when the rank has no such memory.
    """
    pieces = None
    if transfer is not None and not context.same_host(rank):
        ranges = transfer.pieces(context.rank, rank, exposed.strides)
        pieces = [(exposed.origin + low, exposed.origin + high) for low, high in ranges]
    view = context.read_bytes(rank, exposed.location, exposed.nbytes, pieces)
    address = int(view.__array_interface__["data"][0]) + exposed.origin
    return Window(address, exposed.strides, view)
