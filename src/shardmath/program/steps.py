"""Steps over named buffers, and the program that they make. Pure data; every step prints in a line.

    "operand" ── move ──► "out"             redistribute
    "x" ── move ──► "all x";  multiply "a", "all x" ──► "part";  "part" ── combine ──► "out"

The names of a call's arguments are buffers, and so are those of its results and of its workspace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import Enum
from functools import cached_property
from typing import Any, Literal, NamedTuple

from shardmath.base.immutable import Immutable
from shardmath.geometry import Layout
from shardmath.handles.operand import Operand
from shardmath.local.epilog import MatmulEpilog
from shardmath.local.fft import Kind, Norm
from shardmath.local.float8 import Blocks
from shardmath.local.reduction import Reduction
from shardmath.redistribution.delivery import Delivery
from shardmath.redistribution.plan import Transfer, TransferPlan


class Reason(Enum):
    """Why ranks wait for each other. There are no other reasons."""

    BEFORE_READING = "before reading what a peer wrote"
    AFTER_WRITING = "after writing what a peer will read"
    BEFORE_REUSING = "before reusing what a peer may still read"


class Step(Immutable):
    """One step of a program.

    A step of an operator's own changes nothing but this rank's buffers, and a table of the operator
    says what performs it: `Cores.performers`, and `GPUProgram.PERFORMERS`.
    """


class Synchronise(Step):
    """Wait until all ranks have come here: what they wrote before can be read after."""

    reasons: tuple[Reason, ...]

    def __str__(self) -> str:
        return f"synchronise {', and '.join(reason.value for reason in self.reasons)}"


class Arrive(Step, words="arrive"):
    """Tell the peers that this rank has come to the next `Synchronise`, at which it waits later.

    A peer that waits there may go on, and read what this rank has done so far; it does not wait for
    what this rank does between here and there.
    """


READ = Synchronise((Reason.AFTER_WRITING, Reason.BEFORE_READING))
TAKEN = Synchronise((Reason.BEFORE_REUSING,))
REUSE = Synchronise((Reason.AFTER_WRITING, Reason.BEFORE_REUSING))


class Move(Step, words="move {source} to {target}: {transfer.kind}"):
    """Move elements from every rank's buffer `source` to every rank's `target`, as `transfer` says.

    Between the `Synchronise` before it and the one after it, peers may read the source and write
    the target. The lowering decides whether ranks push or pull.
    """

    transfer: Transfer
    source: str
    target: str


def moved(transfer: Transfer, source: str, target: str) -> tuple[Step, ...]:
    """The steps of a move. Ranks synchronise only if an element changes its rank."""
    move = Move(transfer, source, target)
    return (READ, move, REUSE) if transfer.crosses else (move,)


class Multiply(Step, words="multiply {left} by {right} into {target}"):
    """The matrix product of two of this rank's buffers, summed in the type of `target`.

    `conjugate` says of each factor whether its complex conjugate is multiplied.
    """

    left: str
    right: str
    target: str
    conjugate: tuple[bool, bool] = (False, False)


class Product(Step):
    """A `Multiply` that reads its factors where the `moves` would read them: nothing moves first.

    `rounding` are the steps that turn the sums into the result, if they do nothing but round: the
    user's library may have a product that rounds.
    """

    multiply: Multiply
    moves: tuple[Move | None, Move | None]
    rounding: tuple[Step, ...] = ()

    def __str__(self) -> str:
        moved = [f", {move.source} by {move.transfer.kind}" for move in self.moves if move]
        return f"{self.multiply}{''.join(moved)}"


class Combine(Step):
    """Add up what all ranks have in `source`, each its part of layout `held`, in rank order.

    Each rank gets its part of layout `needed` in `target`, rounded once to the type of that. Parts
    that overlap are added. If only this rank's part is taken (`alone`), replicas count once. With
    `weight`, the name of a number, each part times that number is added to what `target` has, and
    nothing is if the number is 0. A `reduction` takes the place of the sum, for arrays that all
    ranks have whole, element by element.
    """

    held: Layout
    needed: Layout
    source: str
    target: str
    alone: bool = False
    weight: str = ""
    reduction: Reduction | None = None

    def __str__(self) -> str:
        ranks = "this rank" if self.alone else "all ranks"
        return f"combine {self.source} of {ranks} into {self.target}"

    def sources(self, rank: int) -> tuple[int, ...]:
        """The ranks whose parts `rank` takes, in the order in which they are added."""
        return (rank,) if self.alone else tuple(range(self.held.size))


class Axpby(Step):
    """`target` times the number `alpha`, plus buffer `addend` times the number `beta`.

    Without an `addend` nothing is added. If `beta` is 0 the addend is not read, as in BLAS.
    """

    target: str
    alpha: str
    addend: str = ""
    beta: str = ""

    def __str__(self) -> str:
        plus = f" + {self.beta} {self.addend}" if self.addend else ""
        return f"{self.target} becomes {self.alpha} {self.target}{plus}"


class Finish(Step):
    """The epilog of a product: it turns sums in `source` into elements of `target`, rounded once.

    `inputs` are names of the epilog's inputs, which are also the names of their buffers. `outputs`
    are pairs (name of the output, its buffer), and `extras` is the dtype of these buffers.
    """

    source: str
    target: str
    epilog: MatmulEpilog = MatmulEpilog.DEFAULT
    inputs: tuple[str, ...] = ()
    outputs: tuple[tuple[str, str], ...] = ()
    extras: str = ""

    def __str__(self) -> str:
        return f"finish {self.source} as {self.target}: {self.epilog.name.lower()}"


class SumLines(Step):
    """The sums of the rows of matrix `source`, or of its columns, in the type of `target`."""

    source: str
    target: str
    columns: bool
    conjugate: bool = False

    def __str__(self) -> str:
        return f"sum the {'columns' if self.columns else 'rows'} of {self.source} in {self.target}"


class Convert(Step, words="convert {source} to {target}"):
    """The values of `source` in the type of `target`."""

    source: str
    target: str


class Dequantize(Step, words="dequantize {source} by {scale} to {target}"):
    """The numbers that the eight-bit elements of `source` stand for.

    `scale` is a buffer with a scale for each of the `blocks`, or a number for the whole matrix.
    """

    source: str
    scale: str
    blocks: Blocks
    target: str


class Quantize(Step, words="quantize {source} by {scale} to {target}"):
    """`source` times the number `scale`, rounded to the eight-bit type of `target`.

    On GPUs, buffer `largest`, if there is one, becomes the greatest absolute value in `source` if
    that is greater than what it holds.
    """

    source: str
    scale: str
    target: str
    largest: str = ""


class Largest(Step, words="the largest of {source} to {target}"):
    """Write the greatest absolute value in `source`, 0 if there is none, to `target`."""

    source: str
    target: str


class Transform(Step):
    """Transform each rank's part of `transfer.dst` along `axes`, which are whole in the part.

    The part comes from all ranks' `source`, as in a `Move`, and each piece of it is transformed as
    soon as it is there. `kind`, `forward` and `norm` are those of `local.fft`: a real transform
    changes the length of the last of `axes`.
    """

    transfer: TransferPlan
    axes: tuple[int, ...]
    kind: Kind
    forward: bool
    norm: Norm
    source: str
    target: str

    def __str__(self) -> str:
        brings = self.transfer.crosses or not self.transfer.stays
        taken = "take this rank's part from all ranks, " * brings
        axes = ", ".join(map(str, self.axes))
        return f"{taken}{self.kind} along {axes}, {self.source} to {self.target}"


class Fused(Step):
    """Steps that a performer of the operator's own does together, as its `plan` says. If it cannot,
    and in the tests, the steps that it `replaces` are performed.
    """

    plan: Any
    replaces: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return str(self.plan)


class Pack(Step, words="pack {source} into {outbox}: {delivery.outbox.nbytes:,} bytes"):
    """Copy what peers take of `source` into this rank's `outbox`."""

    delivery: Delivery
    source: str
    outbox: str


class Get(Step, words="get {delivery.room:,} bytes from the {outbox} of other hosts"):
    """Fetch this rank's parcels from the outboxes of ranks on other hosts into `target`."""

    delivery: Delivery
    outbox: str
    target: str


class Unpack(Step, words="unpack into {target}"):
    """Copy parcels from `fetched`, and from outboxes on this host, to their places in `target`.

    What stays on this rank comes from `source`.
    """

    delivery: Delivery
    source: str
    outbox: str
    fetched: str
    target: str


# -- streams of GPUs -------------------------------------------------------------------------------


class Memory(NamedTuple):
    """Memory of the lane; peers reach what is `shared`."""

    nbytes: int
    shared: bool = False


class On(Step, words="beside, on {stream}: {step}"):
    """A step on a stream of the lane's, by name, in place of the user's."""

    stream: str
    step: Any


class Record(Step, words="record {event!r}"):
    """Record an event of this name: it stands for all that is on the stream so far."""

    event: str


class Await(Step):
    """Make the stream wait for the event as it was last recorded: on this rank or, `everywhere`, on
    all ranks.

        side     gather ── record "come 0" ── gather ── record "come 1"
        user's   await "come 0" ── multiply ── await "come 1" ── multiply
    """

    event: str
    everywhere: bool = False

    def __str__(self) -> str:
        return f"await {self.event!r}{' of all ranks' * self.everywhere}"


def plain(steps: tuple[Any, ...]) -> tuple[Any, ...]:
    """These steps, where the steps that fused ones replace take their place."""
    performed: list[Any] = []
    for step in steps:
        if isinstance(step, On):
            performed += [On(step.stream, replaced) for replaced in plain((step.step,))]
        else:
            performed += plain(step.replaces) if isinstance(step, Fused) else [step]
    return tuple(performed)


def buffers_of(step: object) -> set[str]:
    """The names of all buffers that a step reads or writes, among other strings; of a fused one,
    those of its plan or else those of the steps that it replaces.
    """
    if isinstance(step, str):
        return {step}
    if isinstance(step, Fused):
        return buffers_of(step.plan) or buffers_of(step.replaces)
    if isinstance(step, Step):
        step = tuple(vars(step).values())
    parts = step if isinstance(step, tuple) else ()
    return {name for part in parts for name in buffers_of(part)}


# -- programs --------------------------------------------------------------------------------------


class SplitArray(Immutable):
    """A distributed array: how it is split, its dtype, and its memory order.

    With `like`, names of operands, it is in column-major order if all of those are. Buffers of the
    same `memory` lie in the same place, and are used one after the other.
    """

    layout: Layout
    dtype: str
    order: Literal["C", "F"] = "C"
    like: tuple[str, ...] = ()
    memory: str = ""

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the part of `rank`."""
        return self.layout.local_shape(rank)

    def order_among(self, arrays: Mapping[str, Operand]) -> Literal["C", "F"]:
        """The memory order where the operands are these."""
        if not self.like:
            return self.order
        return "F" if all(arrays[name].order == "F" for name in self.like) else "C"


class LocalArray(Immutable):
    """An array of this rank's own, in ordinary memory: its shape, dtype and memory order."""

    shape: tuple[int, ...]
    dtype: str
    order: Literal["C", "F"] = "C"

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape, whichever the rank."""
        return self.shape

    def order_among(self, arrays: Mapping[str, Operand]) -> Literal["C", "F"]:
        """The memory order, whatever the operands."""
        return self.order


class Scratch(Immutable):
    """A buffer that no peer reaches, with the shape and the memory order of the buffer `like`."""

    like: str
    dtype: str


class Program(Immutable):
    """What one rank does, in order. All ranks have the same synchronisations.

    The steps before the first synchronisation run before the ranks agree, and write nothing but
    workspace. A program without synchronisations waits for nobody.

    results      the buffers that the call returns, by name, and how they look, new or given
    workspace    buffers of the program that peers may reach
    scratch      buffers of the program that peers do not reach
    transposed   operands and results that the steps see with their axes reversed
    equal        numbers of the call that have to be equal on all ranks
    in_place     the operand whose memory a result takes, by the name of the result
    library      of new results, if all operands may be left out
    blocking     the call returns when the results are there, also on GPUs
    """

    steps: tuple[Step, ...]
    results: Mapping[str, SplitArray | LocalArray]
    workspace: Mapping[str, SplitArray] = field(default_factory=dict)
    blocking: bool = False
    scratch: Mapping[str, Scratch] = field(default_factory=dict)
    transposed: tuple[str, ...] = ()
    equal: tuple[str, ...] = ()
    in_place: Mapping[str, str] = field(default_factory=dict)
    library: str = ""

    @cached_property
    def published(self) -> dict[str, list[Transfer | None]]:
        """The buffers that peers read, in the order of the steps, and the moves that read them:
        None stands for a step that reads all of the buffer.
        """
        moved: dict[str, list[Transfer | None]] = {}
        for step in self.steps:
            moves = step.moves if isinstance(step, Product) else (step,)
            for move in moves:
                if isinstance(move, Move | Transform) and move.transfer.crosses:
                    moved.setdefault(move.source, []).append(move.transfer)
            if isinstance(step, Combine) and not step.alone and step.held.size > 1:
                moved.setdefault(step.source, []).append(None)
        return moved

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps))
