"""Launching deliveries: on the stream of the steps around them, or asynchronously on two others.

Of those two streams one meets the peers and fetches, the other unpacks, so that the wire does not
wait for what unpacks. All ranks meet in the order of the deliveries. A fetch buffer is filled again
when what it held has been unpacked.

    steps      pack 0 | transform | pack 1 | ...        wait 0 | transform
    fetch              barrier, fetch 0 |    barrier, fetch 1 | ...
    unpack                           unpack 0 |            unpack 1 | ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardmath.cuda.driver import call
from shardmath.handles.exposed import Exposed
from shardmath.operators.fft.program import FETCH_BUFFERS, Deliver
from shardmath.redistribution.fetching import fetch

if TYPE_CHECKING:
    from shardmath.operators.fft.launching import Launch

__all__ = ["Deliveries"]

_FETCH, _UNPACK = "fft fetch", "fft unpack"  # streams of the lane


class Deliveries:
    """Those of one execution on `stream`. `exposed` is where all ranks' shared buffers lie."""

    def __init__(self, launch: Launch, stream: int, exposed: Sequence[Sequence[Exposed]]) -> None:
        self._launch = launch
        self._stream = stream
        self._exposed = exposed
        self._asynchronous = False  # whether other streams are in use

    def deliver(self, step: Deliver) -> None:
        """Pack; meet, fetch what lies on other hosts, and unpack."""
        self._pack(step)
        if step.number is not None:
            self._deliver_async(step, step.number)
            return
        barrier = self._launch.lane.barrier
        barrier(self._stream)  # after writing what a peer will read, before reading what it wrote
        self._fetch(step, self._stream)
        self._unpack(step, self._stream)
        if step.barrier_last:
            barrier(self._stream)  # before reusing what a peer may still read

    def _deliver_async(self, step: Deliver, number: int) -> None:
        lane = self._launch.lane
        fetching, unpacking = int(lane.stream(_FETCH)), int(lane.stream(_UNPACK))
        self._order(self._stream, fetching, f"fft packed {number}")
        if number >= FETCH_BUFFERS:  # its fetch buffer has been unpacked
            call("cuStreamWaitEvent", fetching, self._unpacked(number - FETCH_BUFFERS), 0)
        lane.barrier(fetching)  # as in `deliver`
        self._fetch(step, fetching)
        self._order(fetching, unpacking, f"fft fetched {number}")
        self._unpack(step, unpacking)
        call("cuEventRecord", self._unpacked(number), unpacking)
        if step.barrier_last:
            lane.barrier(unpacking)  # as in `deliver`
        self._asynchronous = True

    def wait(self, number: int) -> None:
        """The steps after this come after that delivery."""
        call("cuStreamWaitEvent", self._stream, self._unpacked(number), 0)

    def join(self) -> None:
        """The steps after this come after all deliveries."""
        if self._asynchronous:
            unpacking = self._launch.lane.stream(_UNPACK)
            self._order(int(unpacking), self._stream, "fft delivered")

    def _order(self, before: int, after: int, event: str) -> None:
        """What is put on stream `after` from now on follows what has been put on `before`."""
        call("cuEventRecord", self._launch.lane.event(event), before)
        call("cuStreamWaitEvent", after, self._launch.lane.event(event), 0)

    def _unpacked(self, number: int) -> Any:
        """The event of a delivery that has been unpacked."""
        return self._launch.lane.event(f"fft unpacked {number}")

    def _pack(self, step: Deliver) -> None:
        launch, delivery = self._launch, step.delivery
        packer = launch.plan.copier((step, "pack"), lambda: delivery.packing(step.own.strides))
        packer.launch(self._stream, [launch.address(step.own)], [launch.addresses[step.outbox]])

    def _fetch(self, step: Deliver, stream: int) -> None:
        launch = self._launch
        outboxes = [each.location for each in self._outboxes(step)]
        target = launch.addresses[step.fetch_buffer]
        fetch(launch.context, step.delivery.fetches, outboxes, target, stream)

    def _unpack(self, step: Deliver, stream: int) -> None:
        launch, delivery = self._launch, step.delivery
        outboxes = self._outboxes(step)
        near = [launch.peer_address(peer, outboxes[peer]) for peer in delivery.near]
        unpacker = launch.plan.copier(
            (step, "unpack"), lambda: delivery.unpacking(step.own.strides, step.target.strides)
        )
        own, fetched = launch.address(step.own), launch.addresses[step.fetch_buffer]
        sources = delivery.memories(own, fetched, near)
        unpacker.launch(stream, sources, [launch.address(step.target)])

    def _outboxes(self, step: Deliver) -> list[Exposed]:
        """Where all ranks' outboxes lie."""
        number = self._launch.plan.program.shared.index(step.outbox)
        return [each[number] for each in self._exposed]
