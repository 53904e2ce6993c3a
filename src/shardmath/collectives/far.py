"""Collectives on memory of GPUs of several hosts: show, meet, fetch, meet.

Each rank copies what peers read to the heap, and tells where; then it fetches its own part from
every peer, combines in the order of the ranks, and all meet again. So the result has the bits that
it has on one host. The ranks' processes meet, hence every call waits for its stream.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardmath.arrays.dtypes import DType
from shardmath.cuda.driver import call
from shardmath.cuda.kernel import Argument
from shardmath.geometry import Spans
from shardmath.symmetric.heap import Buffer, Location
from shardmath.symmetric.team import Team
from shardmath.transport.base import DeviceBytes

if TYPE_CHECKING:
    from shardmath.context import DistributedContext

__all__ = ["FarCollectives"]

_THREADS = 256
_ALIGNED = 256


class FarCollectives:
    """The verbs of DeviceCollectives for ranks of which some have no address. All are collective.

    Addresses are this rank's own memory, ordinary or symmetric.
    """

    def __init__(self, context: DistributedContext) -> None:
        team = context.team
        assert team is not None, "a context of GPUs"
        self._context = context
        self.team: Team = team

    # -- moving ------------------------------------------------------------------------------------

    def all_gather(self, source: int, target: int, sizes: Sequence[int], stream: int) -> None:
        """Put every rank's `sizes[rank]` bytes at `source`, in order, into everybody's `target`."""
        starts = _starts(sizes)
        self._fetch_all(
            source, sizes[self.team.rank], target, starts, [0] * len(sizes), sizes, stream
        )

    def all_to_all(
        self, source: int, target: int, sizes: Sequence[Sequence[int]], stream: int
    ) -> None:
        """Send `sizes[src][dst]` bytes from every rank to every other; both sides lie in order."""
        rank = self.team.rank
        received = [row[rank] for row in sizes]
        there = [sum(row[:rank]) for row in sizes]
        nbytes = sum(sizes[rank])
        self._fetch_all(source, nbytes, target, _starts(received), there, received, stream)

    def broadcast(self, source: int, target: int, nbytes: int, root: int, stream: int) -> None:
        """Copy `nbytes` at `source` of rank `root` to everybody's `target`."""
        size, own = self.team.size, self.team.rank == root
        sizes = [nbytes * (rank == root) for rank in range(size)]
        zeros = [0] * size
        self._fetch_all(source, nbytes * own, target, zeros, zeros, sizes, stream)

    def _fetch_all(
        self,
        source: int,
        shown: int,
        target: int,
        starts: Sequence[int],
        there: Sequence[int],
        sizes: Sequence[int],
        stream: int,
    ) -> None:
        """Of each rank's shown bytes, `sizes[rank]` from `there[rank]` to `target + starts[rank]`.

        `source` and `shown` are this rank's.
        """
        places, kept = self._show(source, [shown], stream)
        for rank in self._rotated():
            here = target + starts[rank]
            own = source + there[rank]
            self._fetch(rank, places[rank][0], there[rank], here, sizes[rank], own, stream)
        self._meet(stream)
        del kept

    # -- combining ---------------------------------------------------------------------------------

    def reduce_scatter(
        self,
        source: int,
        target: int,
        counts: Sequence[int],
        dtype: DType,
        operation: str,
        stream: int,
    ) -> None:
        """Combine all ranks' `sum(counts)` elements; rank r's `target` gets `counts[r]` of them."""
        item, rank = dtype.itemsize, self.team.rank
        part = _aligned(counts[rank] * item)
        places, kept = self._show(source, [sum(counts) * item, part * self.team.size], stream)
        start = sum(counts[:rank]) * item
        self._fold(source, start, target, counts[rank], places, kept, dtype, operation, stream)
        self._meet(stream)

    def all_reduce(
        self,
        source: int,
        target: int,
        count: int,
        dtype: DType,
        operation: str,
        stream: int,
    ) -> None:
        """Combine `count` elements of all ranks into `target`, which may be `source`."""
        size, rank, item = self.team.size, self.team.rank, dtype.itemsize
        counts = [Spans.even(count, size, each).length for each in range(size)]
        sizes = [each * item for each in counts]
        part = _aligned(sizes[rank])
        places, kept = self._show(source, [count * item, part * size, part], stream)
        starts = _starts(sizes)
        mine = kept[2].block.address
        self._fold(source, starts[rank], mine, counts[rank], places, kept, dtype, operation, stream)
        # After writing what peers will read; and they have read all of `source`.
        self._meet(stream)
        for peer in self._rotated():
            here = target + starts[peer]
            self._fetch(peer, places[peer][2], 0, here, sizes[peer], mine, stream)
        self._meet(stream)

    def _fold(
        self,
        source: int,
        start: int,
        target: int,
        count: int,
        places: Sequence[Sequence[Location]],
        kept: Sequence[Buffer],
        dtype: DType,
        operation: str,
        stream: int,
    ) -> None:
        """Fetch all ranks' bytes from `start` on, and combine `count` elements into `target`."""
        nbytes = count * dtype.itemsize
        if not nbytes:
            return
        scratch, stride = kept[1].block.address, _aligned(nbytes)
        for rank in self._rotated():
            here = scratch + rank * stride
            self._fetch(rank, places[rank][0], start, here, nbytes, source + start, stream)
        element = "boolean" if dtype.name == "bool" else dtype.name
        defines = (f"ELEMENT={element}", f"OPERATION={operation}")
        blocks = min(8 * self.team.device.processors, -(-count // _THREADS))
        argument = Argument(struct.pack("QQQQ", scratch, stride, target, count))
        self.team.kernel("fold", "fold", defines).launch(stream, blocks, _THREADS, argument)

    # -- showing and fetching ----------------------------------------------------------------------

    def _show(
        self, source: int, rooms: Sequence[int], stream: int
    ) -> tuple[list[list[Location]], list[Buffer]]:
        """Heap memory of so many bytes each, the first a copy of what is at `source`, and where
        every rank's lies.

        Raises HeapExhausted on all ranks when one lacks the memory.
        """
        context, made = self._context, list[Buffer]()

        def tell() -> list[tuple[int, int]]:
            made.extend(context.heap.allocate(room) for room in rooms)
            for buffer in made:
                context.announce(buffer.block)
            self._copy(made[0].block.address, source, rooms[0], stream)
            self.team.synchronize(stream)
            found = [buffer.block.location for buffer in made]
            return [(where.segment, where.offset) for where in found]

        # Also: after writing what a peer will read, and before reading what a peer wrote.
        told = context.agree("collectives, shown", tell, list)
        return [[Location(*where) for where in places] for places in told], made

    def _fetch(
        self, rank: int, where: Location, at: int, target: int, nbytes: int, own: int, stream: int
    ) -> None:
        """Bytes of `rank`, from `at` on of what lies at `where`; this rank's own are at `own`."""
        if rank == self.team.rank:
            self._copy(target, own, nbytes, stream)
        elif nbytes:
            place = Location(where.segment, where.offset + at)
            into = DeviceBytes(target, nbytes, self.team.device.name)
            self._context.get(rank, place, into, stream)

    def _copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        if nbytes and target != source:
            self.team.device.activate()
            call("cuMemcpyAsync", target, source, nbytes, stream)

    def _meet(self, stream: int) -> None:
        """Before reusing what a peer may still read: all ranks' streams have come here."""
        self.team.synchronize(stream)
        self._context.board.barrier(self._context.board.operation)

    def _rotated(self) -> list[int]:
        """All ranks, from the next one on to this one: no two ranks begin with the same."""
        return [(self.team.rank + step) % self.team.size for step in range(1, self.team.size + 1)]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:rank]) for rank in range(len(sizes))]
