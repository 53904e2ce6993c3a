"""One exchange between GPUs of several hosts: pack, synchronise, fetch, unpack.

A rank packs what its peers take into its outbox, and all ranks synchronise. Then it takes its
parcel of every outbox: it reads outboxes on its own host where they lie, and gets parcels from
other hosts into its room. One launch copies all to where the elements belong, and what stays on the
rank straight from its array. The outbox may be packed again once all ranks have synchronised after
that. Parcels and a `Delivery` are pure; `fetch` puts the copies between hosts on a stream.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise, product
from math import prod
from typing import TypeGuard

from shardmath.arrays.spec import packed_strides
from shardmath.base.immutable import Immutable
from shardmath.base.integers import up
from shardmath.context.context import Context
from shardmath.geometry import Move, Run
from shardmath.redistribution.copies import StridedCopy, lowered
from shardmath.redistribution.plan import Transfer, TransferPlan
from shardmath.symmetric.heap import Location
from shardmath.transport.base import DeviceBytes

ALIGNMENT = 256  # bytes; of parcels, and of what is fetched

_Taken = tuple[int, int, int, int]  # blocks, their length, the first's start, from one to the next
Columns = tuple[tuple[_Taken, ...], ...]


class Parcel(Immutable):
    """Every combination of indices that `columns` take of each axis of a local array, in order.

    It begins at byte `offset` of the outbox; `strides` are bytes. Both sides derive from the moves
    what lies where in an outbox, so ranks only tell each other where outboxes begin. What one rank
    takes of another is one parcel, and so one range of bytes; a parcel that several ranks take is
    packed once.

        array of rank 0          its outbox             rank 2
        [ . a a . a b b ]  pack  [ a a a | b b ]  get   [ a a a ]  unpack  ...
    """

    columns: Columns
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def packed(cls, offset: int, columns: Columns, itemsize: int, axes: Sequence[int]) -> Parcel:
        """A parcel without gaps. `axes` are its axes, the slowest first."""
        shape = tuple(sum(count * length for count, length, _, _ in taken) for taken in columns)
        return cls(columns, shape, packed_strides(shape, itemsize, axes[::-1]), offset)

    def boxed(self, move: Move) -> list[Move]:
        """`move` as moves that read the parcel in place of the array."""
        columns = []
        for run, column in zip(move.runs, self.columns, strict=True):
            places = _places(column)[_taken(run)]
            columns.append(
                [
                    Run(
                        count,
                        run.length,
                        start,
                        step,
                        run.dst_start + first * run.dst_step,
                        run.dst_step if count > 1 else 0,
                    )
                    for first, count, start, step in places
                ]
            )
        return [replace(move, runs=runs) for runs in product(*columns)]

    def span(self, moves: Iterable[Move]) -> tuple[int, int]:
        """The range of bytes in the parcel, (low, high), that these boxed moves read.

        They read all of it if they were cut along the slowest axis only.
        """
        lows, highs = [], []
        for move in moves:
            ends = [(run.src_start, run.src_stop - 1) for run in move.runs]
            steps = list(zip(ends, self.strides, strict=True))
            lows.append(sum(first * stride for (first, _), stride in steps))
            highs.append(sum(last * stride for (_, last), stride in steps))
        return min(lows), max(highs) + min(self.strides, default=0)


class Outbox(Immutable):
    """The parcels that one rank packs for its peers, by rank, and the bytes of all."""

    parcels: Mapping[int, Parcel]
    itemsize: int
    nbytes: int

    @classmethod
    def of(cls, transfer: Transfer, src: int, axes: Sequence[int]) -> Outbox:
        """The outbox of `src` for a transfer. `axes` are a parcel's, the slowest first.

        What stays on the rank is not packed. Ranks that take the same share a parcel. To find one
        parcel without the others, see `parcel_of`.
        """
        moves_to: dict[int, list[Move]] = {}
        for move in transfer.out_of(src):
            if move.dst != src and move.elements:
                moves_to.setdefault(move.dst, []).append(move)
        parcels: dict[int, Parcel] = {}
        packed: dict[Hashable, Parcel] = {}
        offset, itemsize = 0, transfer.itemsize
        for dst, moves in sorted(moves_to.items()):
            columns = _columns(moves)
            part = transfer.dst.spans(dst) if _goes_by_part(transfer) else columns
            if part not in packed:
                packed[part] = Parcel.packed(offset, columns, itemsize, axes)
                offset += up(prod(packed[part].shape) * itemsize, ALIGNMENT)
            parcels[dst] = packed[part]
        return cls(parcels, itemsize, offset)

    def packing(self, strides: Sequence[int]) -> list[StridedCopy]:
        """The copies from an array of these strides, in bytes, to the outbox."""
        copies = []
        for parcel in dict.fromkeys(self.parcels.values()):
            for runs in product(*map(_into, parcel.columns)):
                copy = lowered(Move(0, 0, runs), self.itemsize, strides, parcel.strides)
                copies.append(replace(copy, dst_offset=copy.dst_offset + parcel.offset))
        return copies


def parcel_of(transfer: Transfer, src: int, dst: int, axes: Sequence[int]) -> Parcel:
    """The parcel that `dst` takes of the outbox of `src`.

    It only counts the elements for other ranks: otherwise each rank would work out the moves of all
    ranks, of which there may be many.
    """
    if not _goes_by_part(transfer):
        return Outbox.of(transfer, src, axes).parcels[dst]
    offsets: dict[Hashable, int] = {}
    end = 0
    for peer, elements in transfer.parts_out_of(src):
        part = transfer.dst.spans(peer)
        if part not in offsets:
            offsets[part] = end
            end += up(elements * transfer.itemsize, ALIGNMENT)
        if peer == dst:
            break
    columns = _columns([move for move in transfer.into(dst) if move.src == src])
    return Parcel.packed(offsets[transfer.dst.spans(dst)], columns, transfer.itemsize, axes)


def _goes_by_part(transfer: Transfer) -> TypeGuard[TransferPlan]:
    """Whether ranks that own the same part after a transfer take the same of each rank."""
    return isinstance(transfer, TransferPlan) and transfer.src.groups is not None


class Fetch(Immutable):
    """Get `nbytes` from byte `offset` of the outbox of rank `src`, to byte `at` of the room."""

    src: int
    offset: int
    nbytes: int
    at: int


def _taken(run: Run) -> _Taken:
    return run.count, run.length, run.src_start, run.src_step


def _columns(moves: Sequence[Move]) -> Columns:
    axes = zip(*(move.runs for move in moves), strict=True)
    return tuple(
        tuple(sorted({_taken(run) for run in runs}, key=lambda taken: taken[2])) for runs in axes
    )


def _into(column: tuple[_Taken, ...]) -> list[Run]:
    """The runs that put a column's indices side by side."""
    return [
        Run(count, length, start + first * step, step if count > 1 else 0, place, apart)
        for (_, length, start, step), places in _places(column).items()
        for first, count, place, apart in places
    ]


_Place = tuple[int, int, int, int]  # first block, how many, where they go, from one to the next


@lru_cache(maxsize=1024)
def _places(column: tuple[_Taken, ...]) -> dict[_Taken, list[_Place]]:
    """Where the blocks of each run of a column lie in the parcel, which has indices in order."""
    ends = [(start, start + (count - 1) * step + length) for count, length, start, step in column]
    if all(one[1] <= two[0] for one, two in pairwise(ends)):
        starts = accumulate((count * length for count, length, _, _ in column), initial=0)
        return {
            taken: [(0, taken[0], start, taken[1] if taken[0] > 1 else 0)]
            for taken, start in zip(column, starts, strict=False)
        }
    blocks = sorted(  # the runs interleave
        (start + number * step, length, taken)
        for taken in column
        for count, length, start, step in [taken]
        for number in range(count)
    )
    places: dict[_Taken, list[int]] = {taken: [] for taken in column}
    end = 0
    for _, length, taken in blocks:
        places[taken].append(end)
        end += length
    return {taken: _evenly(starts) for taken, starts in places.items()}


def _evenly(places: Sequence[int]) -> list[_Place]:
    """The places of blocks as ranges of blocks that are evenly apart, as few as possible."""
    ranges: list[_Place] = []
    first = 0
    while first < len(places):
        last = first + 1
        step = places[last] - places[first] if last < len(places) else 0
        while last < len(places) and places[last] - places[last - 1] == step:
            last += 1
        count = last - first
        ranges.append((first, count, places[first], step if count > 1 else 0))
        first = last
    return ranges


_OWN, _ROOM, _NEAR = 0, 1, 2  # the memories that are unpacked, see `memories`


class Delivery(Immutable):
    """What `rank` packs, fetches and unpacks in a transfer.

    `hosts` are the numbers of all ranks' hosts, and `axes` are a parcel's, the slowest first. With
    `part`, only these moves are wanted: see `only`.
    """

    transfer: Transfer
    rank: int
    hosts: tuple[int, ...]
    axes: tuple[int, ...]
    part: tuple[Move, ...] | None = field(default=None, repr=False)

    def only(self, part: Sequence[Move]) -> Delivery:
        """A part of this exchange: some of its `moves`, or pieces of them."""
        cut = replace(self, part=tuple(part))
        cut.__dict__["_parcels"] = self._parcels  # they are the same, and are not worked out again
        return cut

    @cached_property
    def outbox(self) -> Outbox:
        """The parcels that this rank packs."""
        return Outbox.of(self.transfer, self.rank, self.axes)

    @cached_property
    def fetches(self) -> tuple[Fetch, ...]:
        """The ranges that this rank fetches from other hosts, one of each rank's parcel."""
        by_source: dict[int, list[Move]] = {}
        for move in self.moves:
            if move.elements and self.is_far(move.src):
                by_source.setdefault(move.src, []).append(move)
        ranges, end = [], 0
        for src, taken in by_source.items():
            parcel = self._parcels[src]
            low, high = parcel.span(taken)
            end += low % ALIGNMENT  # so that the room allows words as wide as the outbox does
            ranges.append(Fetch(src, parcel.offset + low, high - low, end))
            end += up(high - low, ALIGNMENT)
        return tuple(ranges)

    @property
    def room(self) -> int:
        """The bytes of a room for all fetches."""
        return max((part.at + part.nbytes for part in self.fetches), default=0)

    @cached_property
    def same_host(self) -> tuple[int, ...]:
        """The peers on this rank's host, whose outboxes are read where they lie."""
        here = {move.src for move in self.moves if not self.is_far(move.src)}
        return tuple(sorted(here - {self.rank}))

    def unpacking(self, own: Sequence[int], target: Sequence[int]) -> list[StridedCopy]:
        """The copies to an array of strides `target`, from memories in the order of `memories`.

        `own` are the strides of this rank's source array.
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
        """Where this rank's parcel of a peer begins, and its strides: in the peer's outbox, or in
        the room if the peer is on another host.
        """
        parcel = self._parcels[src]
        moved = (part.at - part.offset for part in self.fetches if part.src == src)
        return parcel.offset + next(moved, 0), parcel.strides

    def memories(self, own: int, room: int, outboxes: Sequence[int]) -> list[int]:
        """The addresses from which is unpacked: the source array, the room, and the outboxes of
        peers on this rank's host, in the order of `same_host`.
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
        """The moves into this rank, from the peers' parcels, the next rank's first."""
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
    """Put copies from the ranks' outboxes to this rank's room on `stream`.

    All ranks must have synchronised on their streams since they packed.
    """
    for part in fetches:
        place = outboxes[part.src].behind(part.offset)
        into = DeviceBytes(room + part.at, part.nbytes, context.heap.transport.device)
        context.get(part.src, place, into, stream)
