"""Launching what a way says: transforms, copies, and exchanges between the ranks' places.

Everything is put on one stream, but for pipelines, which have a second one; no process waits here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardmath.context import Context
from shardmath.local.gpu.fft import Transforms, scale
from shardmath.operators.fft.delivering import Deliveries
from shardmath.operators.fft.local_steps import Convert, Fourier, LocalStep, Scale, View
from shardmath.operators.fft.overlap import Beside
from shardmath.operators.fft.pipeline import Pipeline
from shardmath.operators.fft.program import Deliver, PeerCopy, WaitDelivery
from shardmath.operators.fft.rank_plan import RankPlan, boxes_of_copy, boxes_of_exchange
from shardmath.operators.lanes import Lane
from shardmath.symmetric.heap import Location

__all__ = ["Launch", "Told", "is_double"]

Told = tuple[Any, ...]  # where a rank's shared places lie, and the strides of its result


@dataclass(frozen=True)
class Launch:
    """One rank's way between memories at `addresses`, by place.

    `lane` is theirs. `area` names the work area of cuFFT's: that of the stream on which the
    launches will run.
    """

    context: Context
    way: RankPlan
    addresses: Mapping[str, int]
    lane: Lane
    forward: bool
    area: int

    @property
    def rank(self) -> int:
        """Whose part it is."""
        return self.context.rank

    def all(self, stream: int, told: Sequence[Told]) -> None:
        """Launch everything. `told` are all ranks'."""
        program = self.way.program
        if isinstance(program, Pipeline):
            self._pipeline(stream, program, told)
            return
        deliveries = Deliveries(self, stream, told)
        for step in program.steps:
            if isinstance(step, PeerCopy):
                self._exchange(stream, step, told)
            elif isinstance(step, Deliver):
                deliveries.deliver(step)
            elif isinstance(step, WaitDelivery):
                deliveries.wait(step.number)
            else:
                self.local(stream, step)
        deliveries.end()

    def local(self, stream: int, step: LocalStep) -> None:
        """Launch one step of this rank's own."""
        if isinstance(step, Scale):
            self._scale(stream, step.target, step.target, step.factor)
            return
        source, target = self.address(step.source), self.address(step.target)
        if isinstance(step, Fourier):
            Transforms.of(self.way.device).run(
                step.kind,
                source,
                target,
                stream,
                double=is_double(step),
                batches=step.batches,
                forward=self.forward,
                area=self.area,
            )
        elif isinstance(step, Convert):
            self._scale(stream, step.source, step.target, step.factor)
        else:
            self.way.copier((step,), lambda: boxes_of_copy(step)).launch(stream, [source], [target])

    def _scale(self, stream: int, source: View, target: View, factor: float) -> None:
        one, two = _real(source), _real(target)
        scale(
            self.way.device,
            self.address(source),
            self.address(target),
            one.shape,
            (one.strides, two.strides),
            stream,
            dtypes=(one.dtype, two.dtype),
            factor=factor,
        )

    def _exchange(self, stream: int, step: PeerCopy, told: Sequence[Told]) -> None:
        """Move boxes between this rank's array and all ranks' arrays."""
        place = "result" if step.remote is None else step.remote[self.rank].place
        addresses, strides = self.everywhere(place, told)
        if step.remote is not None:
            strides = [view.strides for view in step.remote]
        copier = self.way.copier(
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
        return self.addresses[view.place] + view.offset

    def everywhere(self, place: str, told: Sequence[Told]) -> tuple[list[int], list[Sequence[int]]]:
        """Where all ranks' arrays of that place begin for this GPU, and their strides."""
        notes = [each[self.way.program.shared.index(place)] for each in told]
        addresses = [
            self.addresses[place] if rank == self.rank else self.peer(rank, entry)
            for rank, entry in enumerate(notes)
        ]
        return addresses, [entry[4] for entry in notes]

    def _pipeline(self, stream: int, program: Pipeline, told: Sequence[Told]) -> None:
        """Transforms on the user's stream, and exchanges beside them."""
        beside = Beside.of(self.context)
        assert self.way.tables is not None, "made with the pipeline"
        targets = [self.everywhere(place, told)[0] for place in program.shared]
        sources = [self.addresses[place] for place in program.sources]
        beside.start(self.way.tables, stream, sources, targets)
        for steps in program.first:
            for step in steps:
                self.local(stream, step)
            beside.ready(stream)
        for steps in program.second:
            beside.wait(stream)
            for step in steps:
                self.local(stream, step)
            if program.returns:
                beside.ready(stream)
        if program.returns:
            beside.wait(stream)
        for step in program.last:
            self.local(stream, step)
        beside.end(stream)

    def peer(self, rank: int, entry: Sequence[Any]) -> int:
        """Where a rank's array begins for this GPU; 0 where it has no elements."""
        segment, offset, low, nbytes, _ = entry
        if nbytes == 0:
            return 0
        address = self.context.peer_address(rank, Location(segment, offset), nbytes)
        assert address is not None, "GPUs of one host reach each other"
        return address - int(low)


def is_double(step: Fourier) -> bool:
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
