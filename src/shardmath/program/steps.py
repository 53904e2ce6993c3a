"""Steps over named buffers, and the program that they make. Pure data; every step prints in a line.

    "operand" ── move ──► "out"             redistribute
    "x" ── move ──► "all x";  multiply "a", "all x" ──► "part";  "part" ── combine ──► "out"

The names of a call's arguments are buffers, and so are those of its results and of its workspace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Literal

from shardmath.geometry import Layout
from shardmath.redistribution.delivery import Delivery
from shardmath.redistribution.plan import TransferPlan

__all__ = [
    "Combine",
    "Get",
    "Move",
    "Multiply",
    "Pack",
    "Program",
    "Reason",
    "SplitArray",
    "Step",
    "Synchronise",
    "Unpack",
]


class Reason(Enum):
    """Why ranks wait for each other. There is no other reason."""

    BEFORE_READING = "before reading what a peer wrote"
    AFTER_WRITING = "after writing what a peer will read"
    BEFORE_REUSING = "before reusing what a peer may still read"


@dataclass(frozen=True)
class Synchronise:
    """All ranks have come here, and all that they wrote before can be read."""

    reasons: tuple[Reason, ...]

    def __str__(self) -> str:
        return f"synchronise {', and '.join(reason.value for reason in self.reasons)}"


@dataclass(frozen=True)
class Move:
    """Every rank's part of `transfer.src`, in buffer `source`, to `transfer.dst`, in `target`.

    Between the `Synchronise` before it and the one behind it peers may read the source and write
    the target: whether they push or pull is for the lowering to say.
    """

    transfer: TransferPlan
    source: str
    target: str

    def __str__(self) -> str:
        return f"move {self.source} to {self.target}: {self.transfer.pattern.value}"


@dataclass(frozen=True)
class Multiply:
    """The matrix product of two of this rank's buffers, summed in the type of `target`."""

    left: str
    right: str
    target: str

    def __str__(self) -> str:
        return f"multiply {self.left} by {self.right} into {self.target}"


@dataclass(frozen=True)
class Combine:
    """The sum of what all ranks have in `source`, each its part of layout `held`, in rank order.

    Where parts overlap they are added; `needed` is what each rank has of the sum in `target`.
    """

    held: Layout
    needed: Layout
    source: str
    target: str

    def __str__(self) -> str:
        return f"combine {self.source} of all ranks into {self.target}"


@dataclass(frozen=True)
class Pack:
    """What peers take of `source`, copied into this rank's `outbox`."""

    delivery: Delivery
    source: str
    outbox: str

    def __str__(self) -> str:
        return f"pack {self.source} into {self.outbox}: {self.delivery.outbox.nbytes:,} bytes"


@dataclass(frozen=True)
class Get:
    """This rank's parcels in the outboxes of ranks on other hosts, fetched into `target`."""

    delivery: Delivery
    outbox: str
    target: str

    def __str__(self) -> str:
        return f"get {self.delivery.room:,} bytes from the {self.outbox} of other hosts"


@dataclass(frozen=True)
class Unpack:
    """Parcels to where they belong in `target`: from `fetched`, and from outboxes on this host.

    What stays on this rank comes from `source`.
    """

    delivery: Delivery
    source: str
    outbox: str
    fetched: str
    target: str

    def __str__(self) -> str:
        return f"unpack into {self.target}"


Step = Synchronise | Move | Multiply | Combine | Pack | Get | Unpack


@dataclass(frozen=True)
class SplitArray:
    """An array of which every rank has a part: how it is split, its dtype, and its memory order."""

    layout: Layout
    dtype: str
    order: Literal["C", "F"] = "C"


@dataclass(frozen=True)
class Program:
    """What one rank does, in order. All ranks have the same synchronisations.

    `results` are the buffers that the call returns, by name: what a new one looks like, and what
    one that is given must be. `workspace` are buffers of the program's own, which peers may reach.
    `blocking`: the call returns when the results are there, also on GPUs.
    """

    steps: tuple[Step, ...]
    results: Mapping[str, SplitArray]
    workspace: Mapping[str, SplitArray] = field(default_factory=dict)
    blocking: bool = False

    @cached_property
    def published(self) -> dict[str, list[TransferPlan | None]]:
        """The buffers that peers read, in the order of the steps, and by which moves.

        None where all of a buffer is read.
        """
        found: dict[str, list[TransferPlan | None]] = {}
        for step in self.steps:
            if isinstance(step, Move) and step.transfer.crosses:
                found.setdefault(step.source, []).append(step.transfer)
            elif isinstance(step, Combine):
                found.setdefault(step.source, []).append(None)
        return found

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps))
