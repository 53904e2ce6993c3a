"""Bringing what peers on other hosts have packed to this rank's GPU, by `get` on a stream."""

from __future__ import annotations

from collections.abc import Sequence

from shardmath.context.context import Context
from shardmath.redistribution.parcels import Fetch
from shardmath.symmetric.heap import Location
from shardmath.transport.base import DeviceBytes

__all__ = ["fetch"]


def fetch(
    context: Context,
    found: Sequence[Fetch],
    outboxes: Sequence[Location],
    room: int,
    stream: int,
) -> None:
    """Put on `stream` what brings parts of the ranks' outboxes to this rank's room.

    Before reading what a peer wrote: all ranks have met on their streams since they packed.
    """
    for each in found:
        where = outboxes[each.src]
        place = Location(where.segment, where.offset + each.offset)
        into = DeviceBytes(room + each.at, each.nbytes, context.heap.transport.device)
        context.get(each.src, place, into, stream)
