"""The GPUs of a context whose ranks are on several hosts: signals to these are copies.

No kernel can write the words of a rank without an address. A barrier is therefore three steps on
the stream: a kernel that writes down the round, `put` of that word to each rank elsewhere, a kernel
that waits for all; a signal is counted by a kernel, and `put`. Words and deadlines are as on one
host; what expires is waited for anew.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from shardmath.symmetric import structs
from shardmath.symmetric.heap import Location
from shardmath.symmetric.team import Team
from shardmath.transport.base import DeviceBytes, Transport

__all__ = ["FarTeam"]

_WORD = 8


class FarTeam(Team):
    """See Team. Of `pads` those of ranks on other hosts are 0: `locate` says where they lie."""

    def locate(
        self, transport: Transport, numbers: Sequence[int], places: Mapping[int, Location]
    ) -> None:
        """Say how ranks on other hosts are reached: their numbers for `transport`, and their pads.

        To be called once, before the first barrier.
        """
        self.transport = transport
        self.numbers = tuple(numbers)
        self._far = dict(places)

    def enqueue_barrier(
        self, stream: int, *, channel: int = 0, timeout: float | None = None
    ) -> None:
        """Put a barrier of all ranks on `stream`: what was written before, all see after."""
        self.check()
        self._require(channel)
        tail, threads = struct.pack("Ii", channel, 0), self._barrier_threads
        self._launch("advance", stream, timeout, tail, file="far_signals", threads=threads)
        for rank in self._far:
            self.transport.quiet(self.numbers[rank], stream)
        for rank in self._far:
            inbox = structs.BARRIER * self.size + _WORD * self.rank
            self._put_word(rank, channel, structs.ROUND, inbox, stream)
        self._launch("await_round", stream, timeout, tail, file="far_signals", threads=threads)

    def put_signal(self, dst: int, stream: int, *, channel: int = 0) -> None:
        """See Team."""
        if dst not in self._far:
            super().put_signal(dst, stream, channel=channel)
            return
        self.check()
        self._require(channel)
        self.device.activate()
        self._launch(
            "count_signal", stream, None, struct.pack("Ii", channel, dst), file="far_signals"
        )
        self._put_counter(dst, channel, structs.SENT, 0, stream)

    def flag(
        self,
        function: str,
        peer: int,
        stream: int,
        *,
        slot: int,
        channel: int,
        timeout: float | None = None,
    ) -> None:
        """See Team. The word at `slot` stays as it is: two counts of the channel take its place."""
        self.check()
        self.device.activate()
        tail = struct.pack("Ii", channel, peer)
        self._launch(function, stream, timeout, tail, file="far_signals")
        if peer in self._far:
            raises = function == "raise_flag"
            counter, half = (structs.SENT, 0) if raises else (structs.TAKEN, _WORD)
            self._put_counter(peer, channel, counter, half, stream)

    def _put_counter(self, peer: int, channel: int, counter: int, half: int, stream: int) -> None:
        """Carry a counter to that half of `peer`'s inbox of signals, after what was put before."""
        self.transport.quiet(self.numbers[peer], stream)
        inbox = structs.SIGNAL * self.size + 2 * _WORD * self.rank + half
        self._put_word(peer, channel, counter, inbox, stream)

    def _put_word(self, peer: int, channel: int, counter: int, inbox: int, stream: int) -> None:
        """Put this rank's word of `counter` for `peer` to byte `inbox` of the peer's channel."""
        start = structs.PAD_BYTES + structs.CHANNEL_BYTES * self.size * channel
        address = self.pads[self.rank] + start + counter * self.size + _WORD * peer
        word, pad = DeviceBytes(address, _WORD, self.device.name), self._far[peer]
        place = pad.offset + start + inbox
        self.transport.put(self.numbers[peer], pad.segment, place, word, stream)
