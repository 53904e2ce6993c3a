"""One exchange between GPUs of which some have no address: pack, meet, fetch, unpack.

A rank packs what its peers take into its outbox, and all ranks wait for each other. Then it takes
its own parcel from every outbox: from one on its own host where that lies, from any other by `get`
into its room. One launch copies from there to where the elements belong; what stays on the rank
goes there straight from the array before. The outbox may be written again once all ranks have met
after that. A `Delivery` is pure; `fetch` puts the copies between hosts on a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from functools import cached_property

from shardmath.base.immutable import Immutable
from shardmath.context.context import Context
from shardmath.geometry import Move
from shardmath.redistribution.copies import StridedCopy, lowered
from shardmath.redistribution.parcels import Fetch, Outbox, Parcel, fetches, parcel_of, room_for
from shardmath.redistribution.plan import Transfer
from shardmath.symmetric.heap import Location
from shardmath.transport.base import DeviceBytes

_OWN, _ROOM, _NEAR = 0, 1, 2  # the memories that are unpacked, see `memories`


class Delivery(Immutable):
    """The part of `rank` in a transfer.

    `hosts` are the numbers of all ranks' hosts; `axes` those of a parcel, the slowest first. `part`
    are the moves of it that are wanted at a time, None for all: see `only`.
    """

    transfer: Transfer
    rank: int
    hosts: tuple[int, ...]
    axes: tuple[int, ...]
    part: tuple[Move, ...] | None = field(default=None, repr=False)

    def only(self, part: Sequence[Move]) -> Delivery:
        """A part of the same exchange: some of its `moves`, or what those are cut into."""
        cut = replace(self, part=tuple(part))
        cut.__dict__["_parcels"] = self._parcels  # which are the same
        return cut

    @cached_property
    def outbox(self) -> Outbox:
        """The parcels that this rank packs."""
        return Outbox.of(self.transfer, self.rank, self.axes)

    @cached_property
    def fetches(self) -> tuple[Fetch, ...]:
        """The ranges that it fetches from other hosts."""
        return fetches(self.moves, self._parcels.__getitem__, self.is_far)

    @property
    def room(self) -> int:
        """The bytes of all fetches."""
        return room_for(self.fetches)

    @cached_property
    def same_host(self) -> tuple[int, ...]:
        """The peers on this rank's host, whose outboxes are read where they lie."""
        here = {move.src for move in self.moves if not self.is_far(move.src)}
        return tuple(sorted(here - {self.rank}))

    def unpacking(self, own: Sequence[int], target: Sequence[int]) -> list[StridedCopy]:
        """The copies to an array of strides `target`, from memories in the order of `memories`.

        `own` are the strides of this rank's array before.
        """
        copies = []
        for move in self.moves:
            if move.src == self.rank:
                copy = lowered(move, self.transfer.itemsize, own, target)
                copies.append(replace(copy, src=_OWN))
                continue
            start, strides = self.place(move.src)
            copy = lowered(move, self.transfer.itemsize, strides, target)
            far = self.is_far(move.src)
            number = _ROOM if far else _NEAR + self.same_host.index(move.src)
            copies.append(replace(copy, src=number, src_offset=copy.src_offset + start))
        return copies

    def place(self, src: int) -> tuple[int, tuple[int, ...]]:
        """Where this rank's parcel of a peer begins, in its outbox, or in the room where that is on
        another host; and its strides.
        """
        parcel = self._parcels[src]
        moved = (part.at - part.offset for part in self.fetches if part.src == src)
        return parcel.offset + next(moved, 0), parcel.strides

    def memories(self, own: int, room: int, outboxes: Sequence[int]) -> list[int]:
        """The addresses of what is unpacked: the array before, the room, the outboxes of peers on
        this rank's host, in the order of `same_host`.
        """
        return [own, room, *outboxes]

    @cached_property
    def _parcels(self) -> dict[int, Parcel]:
        """The parcel that this rank takes of each peer."""
        taken = [move for move in self.transfer.into(self.rank) if move.elements]
        sources = sorted({move.src for move in taken} - {self.rank})
        return {src: parcel_of(self.transfer, src, self.rank, self.axes) for src in sources}

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """The moves into this rank, those of peers out of their parcels, the next rank's first."""
        if self.part is not None:
            return self.part
        size = len(self.hosts)
        wanted = [move for move in self.transfer.into(self.rank) if move.elements]
        wanted.sort(key=lambda move: (move.src - self.rank - 1) % size)
        return tuple(
            boxed
            for move in wanted
            for boxed in ([move] if move.src == self.rank else self._parcels[move.src].boxed(move))
        )

    def is_far(self, rank: int) -> bool:
        """Whether a rank is on another host."""
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
        place = outboxes[part.src].behind(part.offset)
        into = DeviceBytes(room + part.at, part.nbytes, context.heap.transport.device)
        context.get(part.src, place, into, stream)
