"""Launching deliveries: on the stream of the steps around them, or beside these on two others.

Beside, one stream meets the peers and fetches, the other unpacks, so that the wire does not wait
for what unpacks. All ranks meet in the order of the deliveries. A room is filled again when what
it held has been unpacked.

    steps      pack 0 | transform | pack 1 | ...        wait 0 | transform
    fetching          meet, fetch 0 |       meet, fetch 1 | ...
    unpacking                        unpack 0 |            unpack 1 | ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardmath.cuda.driver import call
from shardmath.operators.fft.program import ROOMS, Deliver
from shardmath.redistribution.fetching import fetch
from shardmath.symmetric.heap import Location

if TYPE_CHECKING:
    from shardmath.operators.fft.launching import Launch

__all__ = ["Deliveries"]

_STREAMS = ("fetching", "unpacking")


class Deliveries:
    """Those of one execution, put beside `stream`. `told` is what all ranks have told."""

    def __init__(self, launch: Launch, stream: int, told: Sequence[Any]) -> None:
        self._launch = launch
        self._stream = stream
        self._told = told
        self._beside = False

    def deliver(self, step: Deliver) -> None:
        """Pack; meet, fetch what lies on other hosts, and unpack."""
        self._pack(step)
        if step.number is not None:
            self._put_beside(step, step.number)
            return
        barrier = self._launch.lane.barrier
        barrier(self._stream)  # after writing what a peer will read, before reading what it wrote
        self._fetch(step, self._stream)
        self._unpack(step, self._stream)
        if step.barrier_last:
            barrier(self._stream)  # before reusing what a peer may still read

    def _put_beside(self, step: Deliver, number: int) -> None:
        lane = self._launch.lane
        fetching, unpacking = (int(lane.stream(f"fft {name}")) for name in _STREAMS)
        self._follow(fetching, self._stream, f"fft packed {number}")
        if number >= ROOMS:  # the room is empty
            call("cuStreamWaitEvent", fetching, lane.event(f"fft arrived {number - ROOMS}"), 0)
        lane.barrier(fetching)  # as in `deliver`
        self._fetch(step, fetching)
        self._follow(unpacking, fetching, f"fft fetched {number}")
        self._unpack(step, unpacking)
        call("cuEventRecord", lane.event(f"fft arrived {number}"), unpacking)
        if step.barrier_last:
            lane.barrier(unpacking)  # as in `deliver`
        self._beside = True

    def wait(self, number: int) -> None:
        """What follows comes after that delivery has arrived."""
        call("cuStreamWaitEvent", self._stream, self._launch.lane.event(f"fft arrived {number}"), 0)

    def end(self) -> None:
        """What follows comes after all deliveries."""
        if self._beside:
            unpacking = self._launch.lane.stream(f"fft {_STREAMS[1]}")
            self._follow(self._stream, int(unpacking), "fft delivered")

    def _follow(self, stream: int, before: int, event: str) -> None:
        """What is put on `stream` comes after what has been put on `before`."""
        call("cuEventRecord", self._launch.lane.event(event), before)
        call("cuStreamWaitEvent", stream, self._launch.lane.event(event), 0)

    def _pack(self, step: Deliver) -> None:
        launch, delivery = self._launch, step.delivery
        packer = launch.way.copier((step, "pack"), lambda: delivery.packing(step.own.strides))
        packer.launch(self._stream, [launch.address(step.own)], [launch.addresses[step.outbox]])

    def _fetch(self, step: Deliver, stream: int) -> None:
        launch, notes = self._launch, self._notes(step)
        outboxes = [Location(*note[:2]) for note in notes]
        room = launch.addresses[step.room]
        fetch(launch.context, step.delivery.fetches, outboxes, room, stream)

    def _unpack(self, step: Deliver, stream: int) -> None:
        launch, delivery = self._launch, step.delivery
        notes = self._notes(step)
        near = [launch.peer(peer, notes[peer]) for peer in delivery.near]
        unpacker = launch.way.copier(
            (step, "unpack"), lambda: delivery.unpacking(step.own.strides, step.into.strides)
        )
        own, room = launch.address(step.own), launch.addresses[step.room]
        unpacker.launch(stream, delivery.memories(own, room, near), [launch.address(step.into)])

    def _notes(self, step: Deliver) -> list[Any]:
        """Where all ranks' outboxes lie."""
        number = self._launch.way.program.shared.index(step.outbox)
        return [each[number] for each in self._told]
