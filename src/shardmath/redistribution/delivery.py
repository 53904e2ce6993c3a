"""One exchange between GPUs of which some have no address: pack, meet, fetch, unpack.

A rank packs what its peers take into its outbox, and all ranks wait for each other. Then it takes
its own parcel from every outbox: from one on its own host where that lies, from any other by `get`
into its room. One launch copies from there to where the elements belong; what stays on the rank
goes there straight from the array before. The outbox may be written again once all ranks have met
after that. A `Delivery` is pure; `fetch` puts the copies between hosts on a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardmath.context.context import Context
from shardmath.geometry import Move
from shardmath.redistribution.boxes import Box
from shardmath.redistribution.copies import lowered
from shardmath.redistribution.parcels import Fetch, Outbox, Parcel, fetches, parcel_of, room_for
from shardmath.redistribution.plan import TransferPlan
from shardmath.symmetric.heap import Location
from shardmath.transport.base import DeviceBytes

_OWN, _ROOM, _NEAR = 0, 1, 2  # the memories that are unpacked, see `memories`


@dataclass(frozen=True)
class Delivery:
    """The part of `rank` in a transfer.

    `hosts` are the numbers of all ranks' hosts; `axes` those of a parcel, the slowest first.
    """

    transfer: TransferPlan
    rank: int
    hosts: tuple[int, ...]
    axes: tuple[int, ...]

    @cached_property
    def outbox(self) -> Outbox:
        """The parcels that this rank packs."""
        return Outbox.of_transfer(self.transfer, self.rank, self.axes)

    @cached_property
    def fetches(self) -> tuple[Fetch, ...]:
        """The ranges that it fetches from other hosts."""
        return fetches(self._moves, self._parcel, self._is_far)

    @property
    def room(self) -> int:
        """The bytes of all fetches."""
        return room_for(self.fetches)

    @cached_property
    def same_host(self) -> tuple[int, ...]:
        """The peers on this rank's host, whose outboxes are read where they lie."""
        here = [src for src in self._parcels if not self._is_far(src)]
        return tuple(sorted(here))

    def packing(self, strides: Sequence[int]) -> list[Box]:
        """The boxes from an array of these strides, in bytes, to the outbox, both memory 0."""
        return [Box.of(copy, 0) for copy in self.outbox.packing(strides)]

    def unpacking(self, own: Sequence[int], target: Sequence[int]) -> list[Box]:
        """To an array of strides `target`, from memories in the order of `memories`.

        `own` are the strides of this rank's array before.
        """
        starts = {each.src: each.at - each.offset for each in self.fetches}
        found = []
        for move in self._moves:
            if move.src == self.rank:
                copy = lowered(move, self.transfer.itemsize, own, target)
                found.append(Box.of(replace(copy, src=_OWN), 0))
                continue
            parcel = self._parcel(move.src)
            copy = lowered(move, self.transfer.itemsize, parcel.strides, target)
            far = self._is_far(move.src)
            number = _ROOM if far else _NEAR + self.same_host.index(move.src)
            offset = copy.src_offset + parcel.offset + starts.get(move.src, 0)
            found.append(Box.of(replace(copy, src=number, src_offset=offset), 0))
        return found

    def memories(self, own: int, room: int, outboxes: Sequence[int]) -> list[int]:
        """The addresses of what is unpacked: the array before, the room, the outboxes of peers on
        this rank's host, in the order of `same_host`.
        """
        return [own, room, *outboxes]

    @cached_property
    def _parcels(self) -> dict[int, Parcel]:
        """The parcel that this rank takes of each peer."""
        sources = [src for src in self.transfer.sources(self.rank) if src != self.rank]
        return {src: parcel_of(self.transfer, src, self.rank, self.axes) for src in sources}

    @cached_property
    def _moves(self) -> tuple[Move, ...]:
        """All moves into this rank, those of peers out of their parcels, the next rank's first."""
        size = len(self.hosts)
        found = [move for move in self.transfer.into(self.rank) if move.elements]
        found.sort(key=lambda move: (move.src - self.rank - 1) % size)
        return tuple(
            boxed
            for move in found
            for boxed in ([move] if move.src == self.rank else self._parcel(move.src).boxed(move))
        )

    def _parcel(self, src: int) -> Parcel:
        return self._parcels[src]

    def _is_far(self, rank: int) -> bool:
        return self.hosts[rank] != self.hosts[self.rank]


def fetch(
    context: Context,
    fetches: Sequence[Fetch],
    outboxes: Sequence[Location],
    room: int,
    stream: int,
) -> None:
    """Put the copies of parts of the ranks' outboxes to this rank's room on `stream`.

    Before reading what a peer wrote: all ranks have met on their streams since they packed.
    """
    for part in fetches:
        outbox = outboxes[part.src]
        place = Location(outbox.segment, outbox.offset + part.offset)
        into = DeviceBytes(room + part.at, part.nbytes, context.heap.transport.device)
        context.get(part.src, place, into, stream)
