"""Programs between hosts: a move to ranks whose memory has no address is packed and fetched.

    move     ►     pack   synchronise   get, unpack   synchronise

Pure. No operator knows of this, nor does a program until it is lowered. What a rank packs, and who
takes which part of it, follows from the move: ranks only tell each other where their outboxes lie.
"""

from __future__ import annotations

from dataclasses import replace

from shardmath.program.steps import READ, TAKEN, Get, Move, Pack, Program, Step, Synchronise, Unpack
from shardmath.redistribution.delivery import Delivery

OUTBOX, FETCHED = "moved outbox", "moved fetch buffer"  # names among those of all operations


def between_hosts(program: Program, rank: int, hosts: tuple[int, ...]) -> Program:
    """The program of `rank`, for ranks on these hosts.

    Peers read nothing but outboxes, so the synchronisations of moves replace those of the program.
    """
    steps: list[Step] = []
    for step in program.steps:
        if isinstance(step, Move) and step.transfer.crosses:
            target = program.results.get(step.target) or program.workspace[step.target]
            transfer = step.transfer
            axes = tuple(range(len(transfer.source_shape(rank))))
            axes = axes if target.order == "C" else axes[::-1]  # in the memory order of the target
            delivery = Delivery(transfer, rank, hosts, axes)
            steps += delivered(delivery, step.source, step.target, OUTBOX, FETCHED)
            steps.append(TAKEN)
        elif not isinstance(step, Synchronise):
            steps.append(step)
    return replace(program, steps=tuple(steps))


def delivered(
    delivery: Delivery, source: str, target: str, outbox: str, fetched: str
) -> tuple[Pack, Synchronise, Get, Unpack]:
    """The steps that bring array `source` to `target` in place of a move.

    The outbox may be packed again once all ranks have synchronised after them: see TAKEN.
    """
    unpack = Unpack(delivery, source, outbox, fetched, target)
    return Pack(delivery, source, outbox), READ, Get(delivery, outbox, fetched), unpack
