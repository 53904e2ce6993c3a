"""What one rank's GPU does for stages: local steps, and exchanges with all ranks.

Every rank derives the same exchanges; the local steps in between differ. Pure.
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
    "FETCH_BUFFERS",
    "Deliver",
    "PeerCopy",
    "Program",
    "Step",
    "UserArrays",
    "WaitDelivery",
    "make_program",
    "parcel_axes",
    "sizes_of",
]

FETCH_BUFFERS = 2  # into which parts of peers' outboxes are fetched, in turn


@dataclass(frozen=True)
class PeerCopy:
    """An exchange by one-sided copies: boxes between this rank's array and all ranks' arrays.

    A push goes from this rank's array, `own`, to the `remote` arrays; a pull from these to it.
    `remote` are by rank; None are the results, of which each rank knows its own.

    push    [barrier]  copy to peers    barrier
    pull    barrier    copy from peers  barrier

    After the barrier behind a push ranks read what peers wrote, and so they do after the one before
    a pull; after the barrier behind a pull they reuse what peers have read. `barrier_first`: there
    is one before the first push, too, as owners may still use the buffers that it overwrites.
    """

    source: Layout
    target: Layout
    own: View
    remote: tuple[View, ...] | None
    pull: bool
    barrier_first: bool

    def __str__(self) -> str:
        other = self.remote[0].buffer if self.remote else "result"
        if self.pull:
            return f"pull {other} of all to {self.own}"
        return f"push {self.own} to {other} of all"


@dataclass(frozen=True)
class Deliver:
    """An exchange by way of packed buffers: `own` becomes `target`, where hosts share no memory.

    Each rank packs its outbox; after a barrier it reads those of its peers: in place on its own
    host, fetched from another one; and unpacks. The barrier of the next delivery, which has another
    outbox, says that this one is no longer read; the last delivery has a barrier of its own for
    that, `barrier_last`.

    With a `number` a delivery is asynchronous: it follows the one before it, beside the steps after
    it, and a `WaitDelivery` of that number waits for it.
    """

    own: View
    target: View
    outbox: str
    delivery: Delivery
    barrier_last: bool
    number: int | None = None

    @property
    def fetch_buffer(self) -> str:
        """The buffer into which parts are fetched."""
        return f"fetched {(self.number or 0) % FETCH_BUFFERS}"

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of the outbox, and of the fetch buffer."""
        return {self.outbox: self.delivery.outbox.nbytes, self.fetch_buffer: self.delivery.room}

    def __str__(self) -> str:
        number = "" if self.number is None else f", asynchronous, number {self.number}"
        return f"deliver {self.own} to {self.target}{number}"


@dataclass(frozen=True)
class WaitDelivery:
    """The steps after it wait for the delivery of that number, and all before it."""

    number: int

    def __str__(self) -> str:
        return f"wait for delivery {self.number}"


Step = LocalStep | PeerCopy | Deliver | WaitDelivery


@dataclass(frozen=True)
class UserArrays:
    """The operand and the result of one execution on one rank, as views.

    `overlap`: writing the result may change the operand. `in_place`: the result takes the operand's
    place, element by element.
    """

    operand: View
    result: View
    overlap: bool = False
    in_place: bool = False


@dataclass(frozen=True)
class Program:
    """What one rank does, in order. `shared` are the buffers that peers reach."""

    steps: tuple[Step, ...]
    shared: tuple[str, ...]

    @cached_property
    def buffers(self) -> dict[str, int]:
        """The bytes of each buffer, except operand and result."""
        sizes = dict.fromkeys((buffer for buffer in self.shared if buffer != "result"), 0)
        views: list[View] = []
        for step in self.steps:
            if isinstance(step, PeerCopy):
                views.append(step.own)
            elif isinstance(step, Deliver):
                views += [step.own, step.target]
                for buffer, nbytes in step.sizes.items():
                    sizes[buffer] = max(sizes.get(buffer, 0), nbytes)
        return sizes | sizes_of(self.local, views)

    @cached_property
    def on_heap(self) -> frozenset[str]:
        """The buffers in memory that peers reach, or that is fetched into."""
        fetched = (step.fetch_buffer for step in self.steps if isinstance(step, Deliver))
        return frozenset((*self.shared, *fetched))

    @cached_property
    def local(self) -> tuple[LocalStep, ...]:
        """All steps but the exchanges, and the waits for these."""
        others = PeerCopy, Deliver, WaitDelivery
        return tuple(step for step in self.steps if not isinstance(step, others))

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps))


def sizes_of(steps: Iterable[LocalStep], arrays: Iterable[View]) -> dict[str, int]:
    """The bytes that steps and arrays take in each buffer, except operand and result."""
    views = [*arrays]
    for step in steps:
        views += [step.target] if isinstance(step, Scale) else [step.source, step.target]
    sizes: dict[str, int] = {}
    for view in views:
        if view.buffer not in ("operand", "result"):
            need = view.offset + view.size * view.itemsize
            sizes[view.buffer] = max(sizes.get(view.buffer, 0), need)
    return sizes


def make_program(
    found: Sequence[Stage],
    problem: Problem,
    rank: int,
    arrays: UserArrays,
    *,
    hosts: tuple[int, ...] = (),
) -> Program:
    """What `rank` does, one stage after the other.

    `hosts` are the numbers of all ranks' hosts, for stages that deliver.
    """
    builder = _ProgramBuilder(problem, rank, arrays, hosts, array=arrays.operand)
    exchanges = sum(stage.kind is None for stage in found)
    for stage in found:
        if stage.kind is not None:
            builder.transform(stage)
        elif stage.mode == "deliver":
            builder.deliver(stage, barrier_last=len(builder.shared) == exchanges - 1)
        elif stage.mode == "pull":
            builder.pull(stage)
        else:
            builder.push(stage)
    return Program(tuple(builder.steps), tuple(dict.fromkeys(builder.shared)))


@dataclass
class _ProgramBuilder:
    """Appends the steps of each stage; after these, `array` holds this rank's part."""

    problem: Problem
    rank: int
    arrays: UserArrays
    hosts: tuple[int, ...]
    array: View
    steps: list[Step] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)  # one buffer for each exchange so far

    def transform(self, stage: Stage) -> None:
        """From where the array is, to the stage's target."""
        assert stage.kind is not None, "a transform"
        source, target = self.array, self._target(stage)
        if target.buffer == "result" and source.buffer == "operand" and self.arrays.overlap:
            if self.arrays.in_place:
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
            preserve_input=source.buffer == "operand",
            factor=stage.factor,
        )
        self.array = target

    def push(self, stage: Stage) -> None:
        """To all ranks' receive buffers, or results, of which each rank knows its own."""
        remote = None
        if stage.target != "result":
            remote = tuple(self._at(stage.target, stage.result, stage, r) for r in self._ranks)
        self._exchange(stage, stage.target, self.array, remote, pull=False)
        self.array = self._target(stage)

    def pull(self, stage: Stage) -> None:
        """From all ranks' buffers, into the result."""
        remote = tuple(self._at(stage.source, stage.layout, stage, r) for r in self._ranks)
        self._exchange(stage, stage.source, self.arrays.result, remote, pull=True)
        self.array = self.arrays.result

    def _exchange(
        self, stage: Stage, shared: str, own: View, remote: tuple[View, ...] | None, *, pull: bool
    ) -> None:
        barrier_first = not self.shared  # the first
        self.shared.append(shared)
        self.steps.append(PeerCopy(stage.layout, stage.result, own, remote, pull, barrier_first))

    def deliver(self, stage: Stage, *, barrier_last: bool) -> None:
        """To the stage's target, by way of two outboxes in turn."""
        transfer = TransferPlan(stage.layout, stage.result, dtypes.of(stage.dtype).itemsize)
        delivery = Delivery(transfer, self.rank, self.hosts, parcel_axes(self.problem))
        target, outbox = self._target(stage), f"outbox {len(self.shared) % 2}"
        self.steps.append(Deliver(self.array, target, outbox, delivery, barrier_last))
        self.shared.append(outbox)
        self.array = target

    def _target(self, stage: Stage) -> View:
        if stage.target == "result":
            return self.arrays.result
        return self._at(stage.target, stage.result, stage, self.rank)

    def _at(self, buffer: str, layout: Layout, stage: Stage, rank: int) -> View:
        """The array of a rank in a buffer of its workspace, before or after a stage."""
        dtype = stage.dtype if layout is stage.layout else stage.result_dtype
        return packed(buffer, layout.local_shape(rank), dtype, self.problem.order)

    @property
    def _ranks(self) -> range:
        return range(self.problem.source.size)


def parcel_axes(problem: Problem) -> tuple[int, ...]:
    """The axes of parcels, the slowest first: in the order of the results."""
    axes = tuple(range(problem.source.ndim))
    return axes if problem.order == "C" else axes[::-1]
