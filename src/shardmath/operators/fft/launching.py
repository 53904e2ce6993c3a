"""Launching a rank's plan: transforms, copies, and exchanges between the ranks' buffers.

Everything is put on one stream; pipelines and asynchronous deliveries have others, which are forked
from it and joined. No process waits here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardmath.context.context import Context
from shardmath.cuda.driver import call
from shardmath.handles.operand import Exposed
from shardmath.local.gpu.fft import CuFFT, scale
from shardmath.operators.fft.local_steps import Convert, LocalFFT, LocalStep, Scale, View
from shardmath.operators.fft.pipeline import Pipeline
from shardmath.operators.fft.program import FETCH_BUFFERS, Deliver, PeerCopy, WaitDelivery
from shardmath.operators.fft.push_stream import PushStream
from shardmath.operators.fft.rank_plan import RankPlan, boxes_of_copy, boxes_of_exchange
from shardmath.operators.lanes import Lane
from shardmath.redistribution.fetching import fetch

__all__ = ["Launch", "is_double"]

_FETCH, _UNPACK = "fft fetch", "fft unpack"  # streams of the lane


class Deliveries:
    """The deliveries of one execution on `stream`, or asynchronously on two other streams.

    Of those one meets the peers and fetches, the other unpacks, so that the wire does not wait for
    what unpacks. All ranks meet in the order of the deliveries. A fetch buffer is filled again when
    what it held has been unpacked. `exposed` is where all ranks' shared buffers lie.

        steps      pack 0 | transform | pack 1 | ...        wait 0 | transform
        fetch              barrier, fetch 0 |    barrier, fetch 1 | ...
        unpack                           unpack 0 |            unpack 1 | ...
    """

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
        near = [launch.peer_address(peer, outboxes[peer]) for peer in delivery.same_host]
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


@dataclass(frozen=True)
class Launch:
    """One execution of `plan`, in buffers at `addresses`, which belong to `lane`.

    `work_area` names the work area of cuFFT's: that of the stream on which the launches will run.
    """

    context: Context
    plan: RankPlan
    addresses: Mapping[str, int]
    lane: Lane
    forward: bool
    work_area: int

    @property
    def rank(self) -> int:
        """The rank whose plan it is."""
        return self.context.rank

    def run(self, stream: int, exposed: Sequence[Sequence[Exposed]]) -> None:
        """Launch everything. `exposed` is where all ranks' shared buffers lie."""
        program = self.plan.program
        if isinstance(program, Pipeline):
            self._run_pipeline(stream, program, exposed)
            return
        deliveries = Deliveries(self, stream, exposed)
        for step in program.steps:
            if isinstance(step, PeerCopy):
                self._copy_to_peers(stream, step, exposed)
            elif isinstance(step, Deliver):
                deliveries.deliver(step)
            elif isinstance(step, WaitDelivery):
                deliveries.wait(step.number)
            else:
                self.local(stream, step)
        deliveries.join()

    def local(self, stream: int, step: LocalStep) -> None:
        """Launch one local step."""
        if isinstance(step, Scale):
            self._scale(stream, step.target, step.target, step.factor)
            return
        source, target = self.address(step.source), self.address(step.target)
        if isinstance(step, LocalFFT):
            CuFFT.of(self.plan.device).run(
                step.kind,
                source,
                target,
                stream,
                double=is_double(step),
                plan=step.plan,
                forward=self.forward,
                work_area=self.work_area,
            )
        elif isinstance(step, Convert):
            self._scale(stream, step.source, step.target, step.factor)
        else:
            self.plan.copier((step,), lambda: boxes_of_copy(step)).launch(
                stream, [source], [target]
            )

    def _scale(self, stream: int, source: View, target: View, factor: float) -> None:
        one, two = _real(source), _real(target)
        scale(
            self.plan.device,
            self.address(source),
            self.address(target),
            one.shape,
            (one.strides, two.strides),
            stream,
            dtypes=(one.dtype, two.dtype),
            factor=factor,
        )

    def _copy_to_peers(
        self, stream: int, step: PeerCopy, exposed: Sequence[Sequence[Exposed]]
    ) -> None:
        """Move boxes between this rank's array and all ranks' arrays."""
        buffer = "result" if step.remote is None else step.remote[self.rank].buffer
        addresses, strides = self.peer_addresses(buffer, exposed)
        if step.remote is not None:
            strides = [view.strides for view in step.remote]
        copier = self.plan.copier(
            (step, *strides), lambda: boxes_of_exchange(step, self.rank, strides)
        )
        own = self.address(step.own)
        if step.barrier_first or step.pull:
            # Before reusing what a peer may still use; before reading what a peer wrote.
            self.lane.barrier(stream)
        if step.pull:
            copier.launch(stream, addresses, [own])
        else:
            copier.launch(stream, [own], addresses)
        # Before reading what a peer wrote; before reusing what a peer may still read.
        self.lane.barrier(stream)

    def address(self, view: View) -> int:
        """Where an array begins."""
        return self.addresses[view.buffer] + view.offset

    def peer_addresses(
        self, buffer: str, exposed: Sequence[Sequence[Exposed]]
    ) -> tuple[list[int], list[Sequence[int]]]:
        """Where all ranks' arrays in a shared buffer begin for this GPU, and their strides."""
        arrays = [each[self.plan.program.shared.index(buffer)] for each in exposed]
        addresses = [
            self.addresses[buffer] if rank == self.rank else self.peer_address(rank, array)
            for rank, array in enumerate(arrays)
        ]
        return addresses, [array.strides for array in arrays]

    def _run_pipeline(
        self, stream: int, program: Pipeline, exposed: Sequence[Sequence[Exposed]]
    ) -> None:
        """Transforms on the user's stream, and exchanges on the push stream at the same time."""
        push_stream = PushStream.of(self.context)
        assert self.plan.tables is not None, "made with the pipeline"
        targets = [self.peer_addresses(buffer, exposed)[0] for buffer in program.shared]
        sources = [self.addresses[buffer] for buffer in program.sources]
        push_stream.start(self.plan.tables, stream, sources, targets)
        for steps in program.first:
            for step in steps:
                self.local(stream, step)
            push_stream.signal_ready(stream)
        for steps in program.second:
            push_stream.wait_for_chunk(stream)
            for step in steps:
                self.local(stream, step)
            if program.two_exchanges:
                push_stream.signal_ready(stream)
        if program.two_exchanges:
            push_stream.wait_for_chunk(stream)
        for step in program.last:
            self.local(stream, step)
        push_stream.join(stream)

    def peer_address(self, rank: int, array: Exposed) -> int:
        """Where a rank's array begins for this GPU; 0 where it has no elements."""
        if array.nbytes == 0:
            return 0
        address = self.context.peer_address(rank, array.location, array.nbytes)
        assert address is not None, "GPUs of one host reach each other"
        return address + array.origin


def is_double(step: LocalFFT) -> bool:
    """Whether a transform is in double precision."""
    return "complex128" in (step.source.dtype, step.target.dtype)


def _real(view: View) -> View:
    """The real numbers that an array consists of."""
    if not view.dtype.startswith("complex"):
        return view
    size = view.itemsize // 2
    return replace(
        view,
        shape=(*view.shape, 2),
        strides=(*view.strides, size),
        dtype=f"float{8 * size}",
    )
