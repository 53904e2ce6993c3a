"""The GPUs of a context whose ranks are on several hosts: barriers whose signals are copies.

No kernel can write the words of a rank without an address. A barrier is therefore three steps on
the stream: a kernel that writes down the round, `put` of that word to each rank elsewhere, a kernel
that waits for all. Words and deadlines are as on one host; what expires is waited for anew.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from shardmath.symmetric import layout
from shardmath.symmetric.heap import Buffer, Location
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

    def another(self, own: Buffer, pads: Sequence[int], channels: int) -> FarTeam:
        """See Team."""
        made = FarTeam(self.device, self._board, own, pads, channels=channels)
        self._family.add(made)
        made._family = self._family
        return made

    def barrier_within(
        self, stream: int, *, channel: int = 0, timeout: float | None = None
    ) -> None:
        """Put a barrier of all ranks on `stream`: what was written before, all see after."""
        self.check()
        self._require(channel)
        tail, threads = struct.pack("Ii", channel, 0), self._barrier_threads
        self._put("advance", stream, timeout, tail, file="far", threads=threads)
        start = layout.PAD_BYTES + layout.CHANNEL_BYTES * self.size * channel
        rounds = self.pads[self.rank] + start + layout.ROUND * self.size
        inbox = start + layout.BARRIER * self.size + _WORD * self.rank
        for rank in self._far:
            self.transport.quiet(self.numbers[rank], stream)
        for rank, pad in self._far.items():
            word = DeviceBytes(rounds + _WORD * rank, _WORD, self.device.name)
            number = self.numbers[rank]
            self.transport.put(number, pad.segment, pad.offset + inbox, word, stream)
        self._put("await_round", stream, timeout, tail, file="far", threads=threads)

    def put_signal(self, dst: int, stream: int, *, channel: int = 0) -> None:
        """Raise NotImplementedError: a handle's signals serve."""
        raise self._no_kernel("put_signal")

    def wait_signal(
        self, src: int, stream: int, *, channel: int = 0, timeout: float | None = None
    ) -> None:
        """Raise NotImplementedError: a handle's signals serve."""
        raise self._no_kernel("wait_signal")

    def _no_kernel(self, name: str) -> NotImplementedError:
        return NotImplementedError(
            f"rank {self.rank}: {name} of a team is a kernel that writes peers' memory, and some "
            "ranks are on other hosts; use the handle of a rendezvous"
        )
