"""Where peers read a rank's arrays during one call on cores.

A rank's note says, of each buffer that its program publishes, where peers read it:

    sent     few bytes are the payload of the exchange that carries the note
    staged   more are copied to the heap, to one half of a double buffer
    lent     many are read where they lie on the heap, or from a copy there

At the end of a call an owner waits for the readers of what it has lent, and for no others. A half
of the double buffer is written again two calls later: before the exchange of that call, every peer
has entered the exchange of the call between, and so has read the half. Small workspace that is
written only after the exchange of each call is staged, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod

import numpy as np

from shardmath.arrays import dtypes
from shardmath.arrays.base import HostArray
from shardmath.arrays.spec import packed_strides
from shardmath.base.recorder import spanned
from shardmath.context.context import Context
from shardmath.handles.operand import Exposed, Operand
from shardmath.operators.workspace import kept_for_readers
from shardmath.program.notes import unpack_parts
from shardmath.redistribution import Transfer, Window
from shardmath.redistribution.bound_copies import Calls, bind, part_of
from shardmath.redistribution.copies import whole
from shardmath.redistribution.plan import Ranges
from shardmath.symmetric.heap import Buffer, Location

_SENT_BYTES = 2 << 10  # of all that a rank sends along
STAGED_BYTES = 1 << 20  # of a half; of more, a rank waits for its readers
_LENT_IN_PLACE_BYTES = 64 << 10  # of an array: a copy of less takes less time than its readers
_SENT, STAGED, LENT = b"e", b"s", b"l"

_NOWHERE = Location(0, 0)  # of what is sent: it lies where it is received
_ALIGNED = 16  # bytes, at multiples of which what is sent or staged begins

Payload = memoryview | Callable[[], bytes]  # memory, or a function that packs


class DoubleBuffer:
    """Two buffers of one context, used by turns."""

    def __init__(self, context: Context) -> None:
        self._context, self._board = context, context.board
        self.half = self._rounds = 0

    @classmethod
    def of(cls, context: Context) -> DoubleBuffer:
        """The context's double buffer."""
        return context.cache("double buffer", lambda: cls(context))

    def turn(self) -> int:
        """The half for the call that begins: another one if ranks have met since the last."""
        rounds = self._board.rounds
        if rounds != self._rounds:
            self._rounds = rounds
            self.half ^= 1
        return self.half

    def buffer(self, nbytes: int) -> Buffer:
        """At least `nbytes` of the half whose turn it is. Local. Raises HeapExhausted."""
        return kept_for_readers(self._context, f"half {self.half}", room_for(nbytes))


def room_for(nbytes: int) -> int:
    """A power of two of at least `nbytes`, and of 64 KiB: memory that grows does so seldom."""
    return 1 << max(nbytes - 1, (64 << 10) - 1).bit_length()


@dataclass
class Offered:
    """One rank's offers: a note on each buffer, the `payload`, and the calls that make copies.

    Where an operand is `replaced`, its copy takes its place on this rank, too. With `halved`,
    copies lie in a half of the double buffer.
    """

    notes: dict[str, bytes] = field(default_factory=dict)
    payload: Payload | None = None
    copies: Calls = field(default_factory=list)
    replaced: dict[str, Operand] = field(default_factory=dict)
    halved: bool = False


def offer(
    context: Context,
    arrays: Mapping[str, Operand],
    read: Mapping[str, Ranges | None],
    overwritten: Collection[str],
    combined: Collection[str],
    buffer: Callable[[str, int], Buffer],
    *,
    lends: bool,
) -> Offered:
    """Offer what peers `read` of operands: a range of each axis, or None for nothing. Local.

    Operands that results may overwrite (`overwritten`) are copied. Those that are `combined` with
    other ranks' have to lie in C order. `buffer(name, nbytes)` is heap memory for copies that are
    too long for the double buffer. With `lends`, the call waits for readers anyway. An exchange has
    to follow. Raises HeapExhausted.
    """
    ranges = {name: cut for name, cut in read.items() if cut is not None}
    sent = _sent(arrays, ranges, overwritten)
    rest = {name: cut for name, cut in ranges.items() if name not in sent}
    rest |= {name: _whole(arrays[name]) for name in overwritten if name not in sent}
    lent = {
        name
        for name in rest.keys() - set(overwritten)
        if arrays[name].block is not None
        and (name not in combined or arrays[name].order in ("C", "both"))
    }
    room = sum(_padded(_bytes_of(arrays[name], cut)) for name, cut in rest.items())
    small = all(arrays[name].nbytes <= _LENT_IN_PLACE_BYTES for name in lent)
    offered = Offered(halved=bool(rest) and small and not lends and room <= STAGED_BYTES)
    if offered.halved:
        half, lent = DoubleBuffer.of(context).buffer(room), set()
        buffer = partial(_same, half)
    staged = {name: cut for name, cut in rest.items() if name not in lent}
    places = _stage(context, offered, arrays, staged, ordered=combined, buffer=buffer)
    for name, (copy, exposed) in places.items():
        if name in ranges:
            offered.notes[name] = note_of(STAGED if offered.halved else LENT, exposed)
        if name in overwritten:
            offered.replaced[name] = copy
    for name in lent:
        offered.notes[name] = note_of(LENT, announced(context, arrays[name]))
    for name, cut in sent.items():
        offered.notes[name] = note_of(_SENT, _dense(arrays[name], cut, _NOWHERE, in_c_order=True))
    if sent:
        offered.payload = _packing(arrays, sent)
    return offered


def _sent(
    arrays: Mapping[str, Operand], ranges: Mapping[str, Ranges], overwritten: Collection[str]
) -> Mapping[str, Ranges]:
    """What is sent along: whole arrays, or else what peers read of them, where either is little."""
    if sum(arrays[name].nbytes for name in ranges) <= _SENT_BYTES:
        return {name: _whole(arrays[name]) for name in ranges}
    part = sum(_bytes_of(arrays[name], cut) for name, cut in ranges.items())
    return ranges if part <= _SENT_BYTES and ranges.keys().isdisjoint(overwritten) else {}


def _same(buffer: Buffer, name: str, nbytes: int) -> Buffer:
    return buffer


def _stage(
    context: Context,
    offered: Offered,
    arrays: Mapping[str, Operand],
    staged: Mapping[str, Ranges],
    *,
    ordered: Collection[str],
    buffer: Callable[[str, int], Buffer],
) -> dict[str, tuple[Operand, Exposed]]:
    """Where copies of these ranges of arrays lie, for this rank and for its peers; what makes the
    copies is added to `offered`.

    Those `ordered` are copied in C order. In the double buffer they lie one after the other.
    """
    places, start = {}, 0
    for name, ranges in staged.items():
        array, nbytes = arrays[name], _bytes_of(arrays[name], ranges)
        block = buffer(name, nbytes).block
        context.announce(block)
        exposed = _dense(array, ranges, block.location.behind(start), in_c_order=name in ordered)
        target = Window(block.address + start, exposed.strides, None)
        offered.copies += _bind_copy(array, ranges, target)
        copy = Operand(target.address, array.shape, target.strides, array.dtype, block)
        places[name] = copy, exposed
        start += _padded(nbytes) if offered.halved else 0
    return places


def _bind_copy(array: Operand, ranges: Ranges, target: Window) -> Calls:
    """The calls that copy these ranges of an array to `target`, whose memory they do not keep."""
    extents = tuple([hi - lo for lo, hi in ranges])
    first = sum(lo * stride for (lo, _), stride in zip(ranges, array.strides, strict=True))
    source = Window(array.address + first, array.strides, array.keep)
    copies = (
        [] if 0 in extents else [whole(extents, array.itemsize, source.strides, target.strides)]
    )
    return bind(copies, {0: source}, target, name="copy to where peers read")


def array_at(array: Operand) -> HostArray:
    """An array of this rank's as NumPy sees it."""
    window = Window(array.address, array.strides, array.keep)
    return window.array(array.shape, dtypes.to_numpy(array.dtype))


def announced(context: Context, array: Operand) -> Exposed:
    """Where peers find an array on the heap. Local; precedes an exchange that says so."""
    assert array.block is not None, "on the heap"
    context.announce(array.block)
    return array.exposed


def note_of(kind: bytes, exposed: Exposed) -> bytes:
    """The part of a note that is for one buffer. It is empty for a buffer that no peer reads."""
    return kind + exposed.pack()


class Offers:
    """All ranks' offers of the buffers of these names, read from byte `start` of their notes.

    `landing` is memory on this rank for all ranks' payloads, one after the other; None if nothing
    was sent.
    """

    def __init__(
        self, context: Context, names: Sequence[str], notes: Sequence[bytes], start: int
    ) -> None:
        self._context = context
        self._places: dict[tuple[str, int], tuple[bytes, bytes, int]] = {}
        self._size = len(notes)
        room = 0
        for rank, note in enumerate(notes):
            for name, part in zip(names, unpack_parts(note, start), strict=True):
                if part:
                    kind, place = part[:1], part[1:]
                    self._places[name, rank] = kind, place, room
                    room += _padded(Exposed.unpack(place).nbytes) if kind == _SENT else 0
        sent = any(kind == _SENT for kind, _, _ in self._places.values())
        self.landing = np.empty(room, np.uint8) if sent else None

    def wait(self, names: Collection[str]) -> bool:
        """Whether the owners of these buffers wait for the readers of one of them."""
        kinds = {place[0] for (name, _), place in self._places.items() if name in names}
        # Memory of another host can be read only while its rank is there.
        return LENT in kinds or (STAGED in kinds and self._context.multi_host)

    def sent(self, name: str, rank: int) -> bool:
        """Whether the buffer of a rank, or what is read of it, was sent along."""
        place = self._places.get((name, rank))
        return place is not None and place[0] == _SENT

    def own(self, name: str, array: Operand) -> Operand:
        """This rank's buffer: in `landing` if all of it was sent, else `array`."""
        rank = self._context.rank
        if not self.sent(name, rank):
            return array
        if Exposed.unpack(self._places[name, rank][1]).nbytes < array.nbytes:
            return array
        window = self.window(name, rank)
        return Operand(window.address, array.shape, window.strides, array.dtype, None, self.landing)

    def raw(self, name: str) -> list[bytes]:
        """The parts of all ranks' notes that are for a buffer, see `two_shots`."""
        return [self._places[name, rank][1] for rank in range(self._size)]

    def has_address(self, name: str, rank: int) -> bool:
        """Whether what a rank offers can be read here where it lies."""
        return self.sent(name, rank) or self._context.same_host(rank)

    def window(self, name: str, rank: int, transfer: Transfer | None = None) -> Window:
        """The window through which this rank reads the buffer of another: in place, or in a copy if
        the buffer has no address here.

        A copy is made now, so the exchange or barrier after which peers may read has to be over. It
        has what `transfer` moves here from `rank`, or all. Raises CollectiveMismatch if the rank
        has no such memory.
        """
        kind, place, offset = self._places[name, rank]
        context, exposed = self._context, Exposed.unpack(place)
        origin, strides = exposed.origin, exposed.strides
        if kind == _SENT:
            assert self.landing is not None, "something was sent"
            return Window(int(self.landing.ctypes.data) + offset + origin, strides, self.landing)
        pieces, read = None, context.read_bytes
        if not context.same_host(rank):
            read = spanned(
                read, f"fetch from rank {rank}", "copy"
            )  # what is copied from it says more
            if transfer is not None:
                ranges = transfer.pieces(context.rank, rank, strides)
                pieces = [(origin + low, origin + high) for low, high in ranges]
        view = read(rank, exposed.location, exposed.nbytes, pieces)
        return Window(int(view.__array_interface__["data"][0]) + origin, strides, view)


def _whole(array: Operand) -> Ranges:
    return tuple((0, extent) for extent in array.shape)


def _bytes_of(array: Operand, ranges: Ranges) -> int:
    return prod(hi - lo for lo, hi in ranges) * array.itemsize


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _dense(array: Operand, ranges: Ranges, place: Location, *, in_c_order: bool) -> Exposed:
    """The elements in these ranges without gaps, from `place` on: in C order, or with their axes in
    the order of the array's, so that a copy runs at memory speed.
    """
    axes = range(len(ranges))
    fastest_first = sorted(axes, key=lambda a: (not in_c_order and abs(array.strides[a]), -a))
    strides = packed_strides([hi - lo for lo, hi in ranges], array.itemsize, fastest_first)
    origin = -sum(lo * stride for (lo, _), stride in zip(ranges, strides, strict=True))
    return Exposed(place, _bytes_of(array, ranges), origin, strides)


def _packing(arrays: Mapping[str, Operand], sent: Mapping[str, Ranges]) -> Payload:
    """Where these parts of arrays lie as they are sent, or a function that packs them each time."""
    parts = [
        part_of(array_at(arrays[name]), [slice(lo, hi) for lo, hi in ranges])
        for name, ranges in sent.items()
    ]
    pads = [bytes(_padded(part.nbytes) - part.nbytes) for part in parts]
    if len(parts) == 1 and not pads[0]:
        only = parts[0]
        return only.reshape(-1).view(np.uint8).data if only.flags.c_contiguous else only.tobytes
    return lambda: b"".join(
        [piece for part, pad in zip(parts, pads, strict=True) for piece in (part.tobytes(), pad)]
    )
