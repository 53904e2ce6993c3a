"""Programs between hosts: a move to ranks whose memory has no address is packed and fetched.

    move     ►     pack   synchronise   get, unpack   synchronise

Pure. No operator knows of it, and neither does a program until it is lowered. What a rank packs and
who takes what of it follows from the move, so nothing is told but where each outbox lies.
"""

from __future__ import annotations

from dataclasses import replace

from shardmath.program.steps import (
    Get,
    Move,
    Pack,
    Program,
    Reason,
    SplitArray,
    Step,
    Synchronise,
    Unpack,
)
from shardmath.redistribution import TransferPlan
from shardmath.redistribution.delivery import Delivery

__all__ = ["FETCHED", "OUTBOX", "between_hosts", "delivery_of"]

OUTBOX, FETCHED = "moved outbox", "moved fetch buffer"  # names among those of all operations

_PACKED = Synchronise((Reason.AFTER_WRITING, Reason.BEFORE_READING))
_TAKEN = Synchronise((Reason.BEFORE_REUSING,))


def between_hosts(program: Program, rank: int, hosts: tuple[int, ...]) -> Program:
    """The program of `rank` where ranks are on these hosts.

    Peers read outboxes only, so what moves bring with them is all the synchronisation there is.
    """
    steps: list[Step] = []
    for step in program.steps:
        if isinstance(step, Move) and step.transfer.crosses:
            target = program.results.get(step.target) or program.workspace[step.target]
            assert isinstance(target, SplitArray), "what is moved to"
            delivery = delivery_of(step.transfer, rank, hosts, target)
            steps += [
                Pack(delivery, step.source, OUTBOX),
                _PACKED,
                Get(delivery, OUTBOX, FETCHED),
                Unpack(delivery, step.source, OUTBOX, FETCHED, step.target),
                _TAKEN,
            ]
        elif not isinstance(step, Synchronise):
            steps.append(step)
    return replace(program, steps=tuple(steps))


def delivery_of(
    transfer: TransferPlan, rank: int, hosts: tuple[int, ...], target: SplitArray
) -> Delivery:
    """What this rank packs, fetches and unpacks; parcels are in the memory order of the target."""
    axes = tuple(range(len(transfer.src.global_shape)))
    return Delivery(transfer, rank, hosts, axes if target.order == "C" else axes[::-1])
