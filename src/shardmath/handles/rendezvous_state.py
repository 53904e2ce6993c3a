"""The result of a rendezvous on one rank: where every rank's array and pad lie.

The pad of a rank is one block: first the user's slots, then words of our own.

    uint32  slot (channel, src) = size * channel + src     0: free, 1: signalled
    uint64  word (channel)                                 how many barriers this rank has reached

One rank sets a slot to 1, only while it is 0, and the other sets it to 0, only while it is 1; a
word is written by its owner alone. So plain loads and stores suffice; see rows.py for their order.
Of the pads of ranks on other hosts this rank has copies, which messages update.
"""

from __future__ import annotations

import struct
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from shardmath.base.immutable import Immutable
from shardmath.base.integers import index, up
from shardmath.base.weak_method import weakly_or
from shardmath.context.context import Context
from shardmath.symmetric.heap import Buffer, Heap, Location
from shardmath.transport.base import DeviceBytes, Memory

if TYPE_CHECKING:
    from shardmath.symmetric.team import Team

SLOT_BYTES = 4
_WORD = 8

_Table = npt.NDArray[np.uint64]


class PadSetting(type):
    """Makes `signal_pad_size` of the class the setting for later handles; a handle has its own."""

    # Bytes of slots that this rank brings to its next rendezvous; torch's figure, of 32 blocks of
    # 72 ranks' slots.
    setting = 9216

    @property
    def signal_pad_size(cls) -> int:
        """Bytes of signal slots that each rank gets at its next rendezvous; equal on all ranks."""
        return PadSetting.setting

    @signal_pad_size.setter
    def signal_pad_size(cls, nbytes: int) -> None:
        change_pad_setting(nbytes)


def change_pad_setting(nbytes: int) -> None:
    """Set the bytes of later signal pads: a positive multiple of 4, else ValueError."""
    size = index(nbytes, "the size of a signal pad")
    if size <= 0 or size % SLOT_BYTES:
        raise ValueError(f"a signal pad has a positive multiple of {SLOT_BYTES} bytes, not {size}")
    PadSetting.setting = size


class PeerLocation(Immutable):
    """Where one rank's array lies: its block of `nbytes`, the array's offset in it, and its pad."""

    location: Location
    nbytes: int
    array_offset: int
    pad: Location
    pad_size: int


def pad_bytes(slots_bytes: int, size: int) -> int:
    """Bytes of a whole pad whose slots take `slots_bytes`, for `size` ranks."""
    return _words_start(slots_bytes) + _WORD * (slots_bytes // (SLOT_BYTES * size))


def _words_start(slots_bytes: int) -> int:
    return up(slots_bytes, _WORD)


@dataclass
class RendezvousState:
    """The result of a rendezvous on this rank; it lives as long as this rank's buffer.

    `memory` and `pads` hold the ranks' blocks and pads as bytes in this process; None where a
    rank's memory has no address here.
    """

    number: int
    peers: list[PeerLocation]
    memory: list[Memory | None]
    pads: list[Memory | None]
    pad_buffer: Buffer
    team: Team | None = None  # of GPUs, which signal in place of the host's words
    tables: DeviceTables | None = None
    far: FarSignals | None = None  # for ranks of several hosts
    handles: dict[str, weakref.ref[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        slots = self.peers[0].pad_size
        start = _words_start(slots)
        self.slots: list[Any] = [_words(pad, 0, slots, "I") for pad in self.pads]
        self.words: list[Any] = [_words(pad, start, None, "Q") for pad in self.pads]
        self.reached: dict[int, int] = {}  # barriers completed, by channel
        self.signals: Counter[Any] = Counter()  # that this rank has put or taken; if observed
        self.buffer_table = np.array([address_of(view) for view in self.memory], np.uint64)
        self.pad_table = np.array([address_of(view) for view in self.pads], np.uint64)


def _words(
    pad: Memory | None, start: int, end: int | None, kind: Literal["I", "Q"]
) -> memoryview[int] | None:
    if pad is None or isinstance(pad, DeviceBytes):
        return None
    return pad[start:end].data.cast(kind)


def address_of(view: Memory | None) -> int:
    """Where memory lies in this process; 0 for what has no address."""
    if isinstance(view, DeviceBytes):
        return view.address
    return 0 if view is None else int(view.__array_interface__["data"][0])


class FarSignals:
    """Signals to and from ranks on other hosts, whose pads this process cannot map, by messages.

    The state gets copies of their pads. A message carries the new value of a word or a slot; the
    writers of each are the same as on one host.
    """

    _MESSAGE = struct.Struct("<IQ")  # index, value
    _REACHED, _RAISED, _CONSUMED = 0, 1, 2  # the `place` of a message

    def __init__(self, context: Context, state: RendezvousState) -> None:
        away = [r for r in range(context.size) if state.slots[r] is None]
        self._far = {r for r in away if r != context.rank}
        self._rank, self._size = context.rank, context.size
        self._slots, self._words = state.slots, state.words
        nbytes = pad_bytes(state.peers[0].pad_size, context.size)
        start = _words_start(state.peers[0].pad_size)
        for rank in away:
            copy = np.zeros(nbytes, np.uint8)
            state.slots[rank] = _words(copy, 0, state.peers[0].pad_size, "I")
            state.words[rank] = _words(copy, start, None, "Q")
        self._channel = context.channel(state.number + 1, weakly_or(None, self.deliver))
        weakref.finalize(self, self._channel.close).atexit = False

    def reached(self, channel: int, count: int) -> None:
        """Tell all: this rank has reached barrier `count`."""
        self._channel.send(self._far, [(self._REACHED, self._MESSAGE.pack(channel, count))])

    def flipped(self, peer: int, channel: int, value: int) -> None:
        """Tell `peer`, if it is far: this rank has signalled it (1), or consumed its signal (0)."""
        if peer in self._far:
            place = self._RAISED if value else self._CONSUMED
            self._channel.send([peer], [(place, self._MESSAGE.pack(channel, value))])

    def deliver(self, src: int, place: int, data: bytes) -> None:
        """Apply a message of rank `src`."""
        if len(data) != self._MESSAGE.size:
            return
        channel, value = self._MESSAGE.unpack(data)
        if channel >= len(self._words[self._rank]):
            return
        if place == self._REACHED:
            self._words[src][channel] = value
        elif place == self._RAISED:
            self._slots[self._rank][channel * self._size + src] = 1
        elif place == self._CONSUMED:
            self._slots[src][channel * self._size + self._rank] = 0


class DeviceTables:
    """The addresses of all ranks' allocations and pads, in memory of the device."""

    def __init__(self, heap: Heap, team: Team, buffers: _Table, pads: _Table) -> None:
        self._kept: list[Buffer] = []
        self.buffers = self._on_device(heap, team, buffers.tobytes())
        self.pads = self._on_device(heap, team, pads.tobytes())
        self.arguments: dict[int, int] = {}  # the struct SymmetricMemory, by its timeout in ms

    def argument(self, heap: Heap, team: Team, packed: bytes, timeout_ms: int) -> int:
        """The address of the struct `packed`, which is written there the first time."""
        if timeout_ms not in self.arguments:
            self.arguments[timeout_ms] = self._on_device(heap, team, packed)
        return self.arguments[timeout_ms]

    def _on_device(self, heap: Heap, team: Team, data: bytes) -> int:
        from shardmath.cuda.driver import call

        buffer = heap.allocate(len(data))
        self._kept.append(buffer)
        team.device.activate()
        call("cuMemcpyHtoD", buffer.block.address, data, len(data))
        return buffer.block.address
