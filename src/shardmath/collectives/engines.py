"""Copy engines: copies between GPUs on streams beside the user's, several at once.

A copy engine takes about 10 us from one copy to the next, so two or more lanes take turns on the
wire. Everything on the lanes starts where the user's stream is, and the user's stream goes on after
it; so what the user sees is one stream, which can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from shardmath.cuda.device import Device
from shardmath.cuda.driver import call

__all__ = ["Copy", "Engines"]

Copy = tuple[int, int, int]  # where to, where from, how many bytes


class Engines:
    """`count` lanes of one device."""

    def __init__(self, device: Device, count: int) -> None:
        device.activate()
        self._device = device
        # Lanes do not wait for the default stream. An event is waited for as it was last recorded,
        # so one is enough for all.
        self.lanes = tuple(call("cuStreamCreate", 1) for _ in range(count))
        self._event = call("cuEventCreate", 2)  # without times

    def order(self, earlier: Any, later: Any) -> None:
        """What is put on stream `later` from now on waits for what is on `earlier`."""
        self._device.activate()
        call("cuEventRecord", self._event, earlier)
        call("cuStreamWaitEvent", later, self._event, 0)

    def start(self, copies: Iterable[Copy], stream: int, lanes: Sequence[Any]) -> None:
        """Deal copies out to `lanes`, after what is on `stream`. Empty ones are left out."""
        for lane in lanes:
            self.order(stream, lane)
        for number, (to, source, nbytes) in enumerate(c for c in copies if c[2] and c[0] != c[1]):
            call("cuMemcpyAsync", to, source, nbytes, lanes[number % len(lanes)])

    def finish(self, stream: int, lanes: Sequence[Any]) -> None:
        """Let `stream` wait for what is on `lanes`."""
        for lane in lanes:
            self.order(lane, stream)
