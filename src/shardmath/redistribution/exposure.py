"""How a rank shows its local array to its peers, and how they find it in their own address space.

An array on the heap is shown where it is. Of any other, the part that peers read is first copied to
the heap. What travels is a few numbers; the exchange that carries them is also the barrier after
which peers may read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from shardmath.arrays.base import HostArray
from shardmath.arrays.spec import byte_span, packed_strides
from shardmath.context.context import Context
from shardmath.handles.operand import Exposed
from shardmath.redistribution.copies import whole
from shardmath.redistribution.host import Window, bind
from shardmath.redistribution.plan import TransferPlan
from shardmath.symmetric.heap import Block, Buffer

__all__ = ["bind_stage", "expose", "stage", "staged_bytes", "window_on"]

Ranges = Sequence[tuple[int, int]]


def expose(context: Context, host: HostArray, block: Block) -> Exposed:
    """Show `host`, which lies in `block`, in place. Local; to be told in an exchange."""
    context.announce(block)
    if host.size == 0:
        return Exposed(block.location, 0, 0, host.strides)
    address = int(host.__array_interface__["data"][0])
    span = byte_span(host.shape, host.strides, host.itemsize)
    return Exposed.within(block, address, span, host.strides)


def staged_bytes(ranges: Ranges, itemsize: int) -> int:
    """The bytes that `stage` needs."""
    return prod(hi - lo for lo, hi in ranges) * itemsize


def stage(context: Context, host: HostArray, ranges: Ranges, buffer: Buffer) -> Exposed:
    """Copy the `ranges` of each axis of `host` to `buffer`, and show them. Local; as `expose`."""
    exposed, copies = bind_stage(context, Window.of(host), host.itemsize, ranges, buffer)
    for copy in copies:
        copy()
    return exposed


def bind_stage(
    context: Context, array: Window, itemsize: int, ranges: Ranges, buffer: Buffer
) -> tuple[Exposed, list[Callable[[], object]]]:
    """Where the `ranges` of each axis of an array will be, and what copies them to `buffer`.

    The copy is dense, its axes in the order of the array's, so that it runs at memory speed. What
    copies keeps the memory of the array, but not of the buffer. Local; as `expose`.
    """
    extents = [hi - lo for lo, hi in ranges]
    fastest_first = sorted(range(len(extents)), key=lambda a: (abs(array.strides[a]), -a))
    strides = packed_strides(extents, itemsize, fastest_first)
    origin = -sum(lo * stride for (lo, _), stride in zip(ranges, strides, strict=True))
    part = sum(lo * stride for (lo, _), stride in zip(ranges, array.strides, strict=True))
    source = Window(array.address + part, array.strides, array.keep)
    copies = [] if 0 in extents else [whole(extents, itemsize, array.strides, strides)]
    context.announce(buffer.block)
    exposed = Exposed(buffer.block.location, prod(extents) * itemsize, origin, strides)
    return exposed, bind(copies, {0: source}, Window(buffer.block.address, strides, None))


def window_on(
    context: Context,
    rank: int,
    exposed: Exposed,
    transfer: TransferPlan | None = None,
) -> Window:
    """What `rank` shows, for this process to read: in place, or a copy where that has no address.

    A copy is made now: when the exchange or barrier has passed after which peers may read. With
    `transfer` it has what that plan moves here from `rank`, else all. Raises CollectiveMismatch
    when the rank has no such memory.
    """
    pieces = None
    if transfer is not None and not context.same_host(rank):
        found = transfer.pieces(context.rank, rank, exposed.strides)
        pieces = [(exposed.origin + low, exposed.origin + high) for low, high in found]
    view = context.read_bytes(rank, exposed.location, exposed.nbytes, pieces)
    address = int(view.__array_interface__["data"][0]) + exposed.origin
    return Window(address, exposed.strides, view)
