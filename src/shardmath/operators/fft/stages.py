"""A strategy as work for GPUs: transforms of whole local arrays, and exchanges between places.

Ranks push into each other's landings, which take turns, or into the result where all results are
within reach; otherwise the last exchange is pulled. Every rank derives the same exchanges; what it
does in between is its own. Pure, like the strategy.

    operand --transform--> work --push--> landing 0 --transform--> result      a slab, transposed
                                                    --transform--> landing 0 --push--> result

Where ranks are on several hosts nobody writes to another's memory: arrays are delivered, by way of
outboxes that take turns, to landings and results of any kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from shardmath.arrays import dtypes
from shardmath.geometry import Layout
from shardmath.local.fft import Kind
from shardmath.operators.fft.local_steps import (
    Copy,
    LocalStep,
    Scale,
    View,
    local_steps,
    packed,
)
from shardmath.operators.fft.problem import Problem
from shardmath.operators.fft.strategy import Move, Strategy, Transform
from shardmath.redistribution import TransferPlan
from shardmath.redistribution.delivery import Delivery

__all__ = [
    "ROOMS",
    "Arrived",
    "Delivered",
    "Exchange",
    "Program",
    "Stage",
    "parcel_axes",
    "programmed",
    "sizes_of",
    "stages",
]

ROOMS = 2  # places into which parts of peers' outboxes are fetched, in turn


Verb = Literal["push", "pull", "deliver"]


@dataclass(frozen=True)
class Stage:
    """One step of the strategy, with the places that it takes the array from and to.

    `kind` is None for an exchange, whose `verb` is push, pull or deliver; then `layout` is the one
    before. For a transform, `layout` and `result` are those before and after it, and what it makes
    is multiplied by `factor`.
    """

    kind: Kind | None
    axes: tuple[int, ...]
    layout: Layout
    result: Layout
    dtype: str
    made: str
    source: str
    target: str
    verb: Verb = "push"
    factor: float = 1.0

    def __str__(self) -> str:
        if self.kind is None:
            return f"{self.verb} {self.source} -> {self.target}: {self.layout} -> {self.result}"
        return f"{self.kind} along {self.axes}, {self.source} -> {self.target}: {self.result}"


def stages(strategy: Strategy, *, reachable: bool, apart: bool = False) -> tuple[Stage, ...]:
    """The stages; `reachable`: all ranks' results lie in symmetric memory. `apart`: some ranks have
    no address for others' memory, symmetric or not.
    """
    problem, steps = strategy.problem, strategy.steps
    found: list[Stage] = []
    place, dtype, landings = "operand", problem.dtype, 0
    for number, step in enumerate(steps):
        last = number == len(steps) - 1
        if isinstance(step, Move):
            target = "result" if last else f"landing {landings % 2}"
            landings += not last
            verb: Verb = "deliver" if apart else "pull" if last and not reachable else "push"
            found.append(Stage(None, (), step.src, step.dst, dtype, dtype, place, target, verb))
        else:
            kind, made = _kind(problem, step, dtype)
            if last:
                target = "result"
            elif place == "operand" or kind != "C2C":
                target = "other work" if place == "work" else "work"
            else:
                target = place
            axes = _axes(step.axes, problem.axes[-1])
            factor = _factor(problem, axes, first=all(each.kind is None for each in found))
            ends = step.layout, step.result
            found.append(Stage(kind, axes, *ends, dtype, made, place, target, factor=factor))
            dtype = made
        place = target
    return tuple(found)


def _kind(problem: Problem, step: Transform, dtype: str) -> tuple[Kind, str]:
    """The kind of one step of the transform, and the type that it makes."""
    if problem.kind == "R2C" and dtype == problem.dtype:
        return "R2C", problem.result
    if problem.kind == "C2R" and problem.axes[-1] in step.axes:
        return "C2R", problem.result
    return "C2C", dtype


def _axes(axes: Sequence[int], real: int) -> tuple[int, ...]:
    """The real axis last, as in NumPy's functions."""
    return (*(a for a in sorted(axes) if a != real), *([real] if real in axes else []))


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


@dataclass(frozen=True)
class Program:
    """What one rank does, in order. `shared` are the places that peers reach."""

    steps: tuple[LocalStep | Exchange | Delivered | Arrived, ...]
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
    *,
    operand: View,
    result: View,
    overlap: bool,
    same: bool,
    hosts: tuple[int, ...] = (),
) -> Program:
    """What `rank` does with an operand and a result of its own.

    `overlap`: writing the result may change the operand; `same`: element by element, in its place.
    `hosts` are the numbers of all ranks' hosts, for stages that deliver.
    """
    steps: list[LocalStep | Exchange | Delivered | Arrived] = []
    shared: list[str] = []
    array, opens = operand, True
    delivered = sum(stage.verb == "deliver" for stage in found)
    for stage in found:
        if stage.verb == "deliver":
            into = result if stage.target == "result" else _at(stage.target, stage, problem, rank)
            delivered -= 1
            made = _delivery(stage, problem, rank, hosts)
            outbox = f"outbox {delivered % 2}"
            steps.append(Delivered(array, into, outbox, made, closes=not delivered))
            shared.append(outbox)
            array = into
            continue
        if stage.kind is None:
            ranks = range(stage.layout.size)
            own, theirs = array, None
            if stage.verb == "pull":
                own = result
                theirs = tuple(_at(stage.source, stage, problem, r, before=True) for r in ranks)
            elif stage.target != "result":
                theirs = tuple(_at(stage.target, stage, problem, r) for r in ranks)
            pulls = stage.verb == "pull"
            shared.append(stage.source if pulls else stage.target)
            steps.append(Exchange(stage.layout, stage.result, own, theirs, pulls, opens))
            opens = False
            array = result if theirs is None or pulls else theirs[rank]
            continue
        target = result if stage.target == "result" else _at(stage.target, stage, problem, rank)
        if target.place == "result" and array.place == "operand" and overlap:
            if same:
                array = target
            else:
                kept = packed("pack operand", array.shape, array.dtype)
                steps.append(Copy(array, kept))
                array = kept
        keep = array.place == "operand"
        steps += local_steps(stage.kind, stage.axes, array, target, keep=keep, factor=stage.factor)
        array = target
    return Program(tuple(steps), tuple(dict.fromkeys(shared)))


def _delivery(stage: Stage, problem: Problem, rank: int, hosts: tuple[int, ...]) -> Delivery:
    transfer = TransferPlan(stage.layout, stage.result, dtypes.of(stage.dtype).itemsize)
    return Delivery(transfer, rank, hosts, parcel_axes(problem))


def parcel_axes(problem: Problem) -> tuple[int, ...]:
    """The axes of parcels, the slowest first: as they are in the results."""
    axes = tuple(range(problem.source.ndim))
    return axes if problem.order == "C" else axes[::-1]


def _at(place: str, stage: Stage, problem: Problem, rank: int, *, before: bool = False) -> View:
    """The array of a rank in a place of its workspace, before or after a stage."""
    layout = stage.layout if before else stage.result
    dtype = stage.dtype if before else stage.made
    return packed(place, layout.local_shape(rank), dtype, problem.order)


def _factor(problem: Problem, axes: Sequence[int], *, first: bool) -> float:
    """What a transform along some of the axes is multiplied by, the first one or a later one.

    The first does it for all: what it made is still near, and an exchange that follows goes on
    meanwhile. But halves are scaled by each: what grows to the end may be too large for them.
    """
    if "complex32" not in (problem.dtype, problem.result):
        axes = problem.axes if first else ()
    shape = (problem.target if problem.kind == "C2R" else problem.source).global_shape
    count = math.prod(shape[axis] for axis in axes)
    whole = "forward" if problem.direction < 0 else "backward"
    return {"ortho": 1 / math.sqrt(count), whole: 1 / count}.get(problem.norm or "", 1.0)
