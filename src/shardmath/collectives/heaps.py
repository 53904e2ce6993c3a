"""Where a rank's kernels find the heaps of all ranks: a table in its GPU's memory.

A kernel that is to write to a peer's heap learns a segment and an offset from the peer's kernel, in
place of an address from its host: so hosts need not meet. The table has the segments that were
announced when it was last renewed. It only ever grows, while kernels that read it may run. Kernels
write straight only to segments that are in it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from shardmath.context.context import Context

SEGMENTS = 16  # of each rank's heap: the first; each is as large as all before it, up to 1 GiB


def table_bytes(size: int) -> int:
    """The bytes of the struct `Heaps` of kernels/exchange.cu, for so many ranks."""
    return 8 * (2 * SEGMENTS + size + size * SEGMENTS)


def table_of(
    size: int, own: Mapping[int, tuple[int, int]], peers: Mapping[tuple[int, int], int]
) -> bytes:
    """The struct `Heaps` of kernels/exchange.cu as bytes.

    `own` has (start, bytes) of this rank's segments, by number; `peers` has the addresses here of
    the peers' segments, by (rank, number).
    """
    table = np.zeros(table_bytes(size) // 8, np.uint64)
    starts, reached, places = np.split(table, [2 * SEGMENTS, 2 * SEGMENTS + size])
    for segment, place in own.items():
        if segment < SEGMENTS:
            starts[2 * segment : 2 * segment + 2] = place
    for (rank, segment), address in peers.items():
        if segment < SEGMENTS:
            reached[rank] |= np.uint64(1 << segment)
            places[rank * SEGMENTS + segment] = address
    return table.tobytes()


class Heaps:
    """The table of one context, at `address` of its GPU's memory."""

    def __init__(self, context: Context, address: int) -> None:
        self.address = address
        self._context = weakref.ref(context)  # it keeps this
        self._own: list[tuple[int, int]] = []  # where segments start and end
        self._known: object = None
        self.renew()

    @staticmethod
    def announce(context: Context) -> None:
        """Let every peer reach what this rank's heap has now. Local; an exchange has to follow."""
        for segment in context.heap.segments:
            context.announce_segment(segment)

    def renew(self) -> None:
        """Add the segments that peers have announced so far, and this rank's own. Local."""
        context = self._context()
        assert context is not None, "it is in use"
        own, peers = context.heap.segments, context.announced_segments()
        if (own, peers) == self._known:
            return
        context.gpu_team.device.write(self.address, table_of(context.size, own, peers))
        self._own = [(start, start + nbytes) for start, nbytes in own.values()]
        self._known = own, peers

    def holds(self, address: int) -> bool:
        """Whether the address lies in this rank's own heap, as far as the table has it."""
        return any(start <= address < end for start, end in self._own)
