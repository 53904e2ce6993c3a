"""What one rank's GPU does for stages: steps of its own, and exchanges with all ranks.

Every rank derives the same exchanges; what it does in between is its own. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from shardmath.arrays import dtypes
from shardmath.geometry import Layout
from shardmath.operators.fft.local_steps import (
    Copy,
    LocalStep,
    Scale,
    View,
    local_steps,
    packed,
)
from shardmath.operators.fft.problem import Problem
from shardmath.operators.fft.stages import Stage
from shardmath.redistribution import TransferPlan
from shardmath.redistribution.delivery import Delivery

__all__ = [
    "ROOMS",
    "Arrived",
    "Delivered",
    "Ends",
    "Exchange",
    "Program",
    "Step",
    "parcel_axes",
    "programmed",
    "sizes_of",
]

ROOMS = 2  # places into which parts of peers' outboxes are fetched, in turn


@dataclass(frozen=True)
class Exchange:
    """Boxes from this rank's array to all ranks' arrays in `target`, or from theirs to this one's.

    `own` is this rank's side: the source of a push, the target of a pull. `theirs` are all ranks'
    arrays in the other place; None are the results, of which each rank knows its own.

    `opens`: all ranks wait for each other first, before reusing memory that its owner may still
    use. After a push they always wait: before reading what peers wrote. Before a pull, too; and
    after it, before reusing what peers may still read.
    """

    source: Layout
    target: Layout
    own: View
    theirs: tuple[View, ...] | None
    pulls: bool
    opens: bool

    def __str__(self) -> str:
        other = self.theirs[0].place if self.theirs else "result"
        if self.pulls:
            return f"pull {other} of all to {self.own}"
        return f"push {self.own} to {other} of all"


@dataclass(frozen=True)
class Delivered:
    """This rank's array `own` becomes `into`, by what all ranks pack into their places `outbox`.

    All ranks wait for each other once, before reading what peers wrote. That the outbox is no
    longer read, the wait of the next delivery says, whose outbox is another; one that `closes` says
    it itself, before reusing what a peer may still read.

    `number` is None where the steps after it wait for it. Otherwise it goes on beside them, after
    the one before it; they wait by an `Arrived` of that number.
    """

    own: View
    into: View
    outbox: str
    delivery: Delivery
    closes: bool
    number: int | None = None

    @property
    def room(self) -> str:
        """The place into which parts are fetched."""
        return f"room {(self.number or 0) % ROOMS}"

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of the outbox, and of the room."""
        return {self.outbox: self.delivery.outbox.nbytes, self.room: self.delivery.room}

    def __str__(self) -> str:
        beside = "" if self.number is None else f" beside what follows, number {self.number}"
        return f"deliver {self.own} to {self.into}{beside}"


@dataclass(frozen=True)
class Arrived:
    """What follows waits for the delivery of that number, and all before it."""

    number: int

    def __str__(self) -> str:
        return f"wait for delivery {self.number}"


Step = LocalStep | Exchange | Delivered | Arrived


@dataclass(frozen=True)
class Ends:
    """The arrays that one rank's execution begins and ends with.

    `overlap`: writing the result may change the operand; `same`: element by element, in its place.
    """

    operand: View
    result: View
    overlap: bool = False
    same: bool = False


@dataclass(frozen=True)
class Program:
    """What one rank does, in order. `shared` are the places that peers reach."""

    steps: tuple[Step, ...]
    shared: tuple[str, ...]

    @cached_property
    def places(self) -> dict[str, int]:
        """Bytes of each place that is not the operand or the result."""
        sizes = dict.fromkeys((place for place in self.shared if place != "result"), 0)
        views: list[View] = []
        for step in self.steps:
            if isinstance(step, Exchange):
                views.append(step.own)
            elif isinstance(step, Delivered):
                views += [step.own, step.into]
                for place, nbytes in step.sizes.items():
                    sizes[place] = max(sizes.get(place, 0), nbytes)
        return sizes | sizes_of(self.local, views)

    @cached_property
    def on_heap(self) -> frozenset[str]:
        """The places in memory that peers, or what fetches from them, reach."""
        rooms = (step.room for step in self.steps if isinstance(step, Delivered))
        return frozenset((*self.shared, *rooms))

    @cached_property
    def local(self) -> tuple[LocalStep, ...]:
        """All steps but the exchanges, and the waits for them."""
        others = Exchange, Delivered, Arrived
        return tuple(step for step in self.steps if not isinstance(step, others))

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps))


def sizes_of(steps: Iterable[LocalStep], arrays: Iterable[View]) -> dict[str, int]:
    """The bytes that steps and arrays take in each place but the operand and the result."""
    views = [*arrays]
    for step in steps:
        views += [step.target] if isinstance(step, Scale) else [step.source, step.target]
    sizes: dict[str, int] = {}
    for view in views:
        if view.place not in ("operand", "result"):
            need = view.offset + view.size * view.itemsize
            sizes[view.place] = max(sizes.get(view.place, 0), need)
    return sizes


def programmed(
    found: Sequence[Stage],
    problem: Problem,
    rank: int,
    ends: Ends,
    *,
    hosts: tuple[int, ...] = (),
) -> Program:
    """What `rank` does, one stage after the other.

    `hosts` are the numbers of all ranks' hosts, for stages that deliver.
    """
    made = _Programming(problem, rank, ends, hosts, array=ends.operand)
    exchanges = sum(stage.kind is None for stage in found)
    for stage in found:
        if stage.kind is not None:
            made.transform(stage)
        elif stage.verb == "deliver":
            made.deliver(stage, closes=len(made.shared) == exchanges - 1)
        elif stage.verb == "pull":
            made.pull(stage)
        else:
            made.push(stage)
    return Program(tuple(made.steps), tuple(dict.fromkeys(made.shared)))


@dataclass
class _Programming:
    """The steps so far, after which `array` holds this rank's part."""

    problem: Problem
    rank: int
    ends: Ends
    hosts: tuple[int, ...]
    array: View
    steps: list[Step] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)  # a place for each exchange so far

    def transform(self, stage: Stage) -> None:
        """From where the array is, to the stage's target."""
        assert stage.kind is not None, "a transform"
        source, target = self.array, self._target(stage)
        if target.place == "result" and source.place == "operand" and self.ends.overlap:
            if self.ends.same:
                source = target
            else:
                kept = packed("pack operand", source.shape, source.dtype)
                self.steps.append(Copy(source, kept))
                source = kept
        self.steps += local_steps(
            stage.kind,
            stage.axes,
            source,
            target,
            keep=source.place == "operand",
            factor=stage.factor,
        )
        self.array = target

    def push(self, stage: Stage) -> None:
        """To all ranks' landings, or to the results, of which each rank knows its own."""
        theirs = None
        if stage.target != "result":
            theirs = tuple(self._at(stage.target, stage.result, stage, r) for r in self._ranks)
        self._exchange(stage, stage.target, self.array, theirs, pulls=False)
        self.array = self._target(stage)

    def pull(self, stage: Stage) -> None:
        """From all ranks' places, into the result."""
        theirs = tuple(self._at(stage.source, stage.layout, stage, r) for r in self._ranks)
        self._exchange(stage, stage.source, self.ends.result, theirs, pulls=True)
        self.array = self.ends.result

    def _exchange(
        self, stage: Stage, shared: str, own: View, theirs: tuple[View, ...] | None, *, pulls: bool
    ) -> None:
        opens = not self.shared  # the first
        self.shared.append(shared)
        self.steps.append(Exchange(stage.layout, stage.result, own, theirs, pulls, opens))

    def deliver(self, stage: Stage, *, closes: bool) -> None:
        """To the stage's target, by way of outboxes that take turns."""
        transfer = TransferPlan(stage.layout, stage.result, dtypes.of(stage.dtype).itemsize)
        delivery = Delivery(transfer, self.rank, self.hosts, parcel_axes(self.problem))
        into, outbox = self._target(stage), f"outbox {len(self.shared) % 2}"
        self.steps.append(Delivered(self.array, into, outbox, delivery, closes))
        self.shared.append(outbox)
        self.array = into

    def _target(self, stage: Stage) -> View:
        if stage.target == "result":
            return self.ends.result
        return self._at(stage.target, stage.result, stage, self.rank)

    def _at(self, place: str, layout: Layout, stage: Stage, rank: int) -> View:
        """The array of a rank in a place of its workspace, before or after a stage."""
        dtype = stage.dtype if layout is stage.layout else stage.made
        return packed(place, layout.local_shape(rank), dtype, self.problem.order)

    @property
    def _ranks(self) -> range:
        return range(self.problem.source.size)


def parcel_axes(problem: Problem) -> tuple[int, ...]:
    """The axes of parcels, the slowest first: as they are in the results."""
    axes = tuple(range(problem.source.ndim))
    return axes if problem.order == "C" else axes[::-1]
