"""How a rank shows its local array to its peers, and how they find it in their own address space.

An array on the heap is shown where it is. Of any other, the part that peers read is first copied to
the heap. What travels is a few numbers; the exchange that carries them is also the barrier after
which peers may read.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from shardmath.arrays.base import HostArray
from shardmath.arrays.spec import byte_span, packed_strides
from shardmath.context import Context
from shardmath.redistribution.host import Window, copy_array
from shardmath.redistribution.plan import TransferPlan
from shardmath.symmetric.exposed import Exposed
from shardmath.symmetric.heap import Block, Buffer

__all__ = ["expose", "stage", "staged_bytes", "window_on"]

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
    """Copy the `ranges` of each axis of `host` to `buffer`, and show them. Local; as `expose`.

    The copy is dense, its axes in the order of the array's, so that it runs at memory speed.
    """
    extents = [hi - lo for lo, hi in ranges]
    fastest_first = sorted(range(host.ndim), key=lambda axis: (abs(host.strides[axis]), -axis))
    strides = packed_strides(extents, host.itemsize, fastest_first)
    nbytes = staged_bytes(ranges, host.itemsize)
    part = host[tuple(slice(lo, hi) for lo, hi in ranges)]
    dense = np.ndarray(extents, host.dtype, np.asarray(buffer)[:nbytes].data, 0, strides)
    copy_array(part, dense)
    context.announce(buffer.block)
    origin = -sum(lo * stride for (lo, _), stride in zip(ranges, strides, strict=True))
    return Exposed(buffer.block.location, nbytes, origin, strides)


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
    if transfer is not None and not context.reads_in_place(rank):
        found = transfer.pieces(context.rank, rank, exposed.strides)
        pieces = [(exposed.origin + low, exposed.origin + high) for low, high in found]
    view = context.read_bytes(rank, exposed.location, exposed.nbytes, pieces)
    address = int(view.__array_interface__["data"][0]) + exposed.origin
    return Window(address, exposed.strides, view)
