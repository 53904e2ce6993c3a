"""Moves on GPUs of several hosts, lowered to pack, synchronise, get, unpack, synchronise.

All of it is on the stream. Outbox and fetch buffer are those of the lane, in which operations
follow each other; the barrier at the end says that no peer reads them any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardmath.base.lru_cache import LRUCache
from shardmath.context.context import Context
from shardmath.operators.lanes import Lane
from shardmath.program.gpu_performing import Execution, ExposedArrays, Launch, Ready
from shardmath.program.hosts import FETCHED, OUTBOX, between_hosts
from shardmath.program.steps import Get, Pack, Synchronise, Unpack
from shardmath.redistribution import Exposed
from shardmath.redistribution.device import BoxCopies
from shardmath.redistribution.fetching import fetch

__all__ = ["ready_delivery"]


def ready_delivery(
    context: Context, lane: Lane, execution: Execution, kept: LRUCache[Any, BoxCopies]
) -> Ready:
    """Prepare a move that is delivered: takes memory for what is packed, and for what is fetched.

    Local. Raises HeapExhausted.
    """
    assert context.team is not None, "a context of GPUs"
    device, plan = context.team.device, execution.plan
    operand = execution.operand.without_memory()
    result = execution.result.array.without_memory()
    program = between_hosts(plan.program, context.rank, context.hosts)
    (delivery,) = (step.delivery for step in program.steps if isinstance(step, Pack))
    fetched = lane.buffer(FETCHED, delivery.room).block
    outbox = lane.buffer(OUTBOX, delivery.outbox.nbytes).block
    packing = kept.made(
        ("pack", plan, operand.strides),
        lambda: BoxCopies(device, delivery.packing(operand.strides)),
    )
    unpacking = kept.made(
        ("unpack", plan, operand.strides, result.strides),
        lambda: BoxCopies(device, delivery.unpacking(operand.strides, result.strides)),
    )

    def bind(places: Sequence[ExposedArrays]) -> Launch:
        outboxes = [each[0] for each in places]
        near = [_address(context, peer, outboxes[peer]) for peer in delivery.same_host]
        locations = [each.location for each in outboxes if each is not None]
        sources = delivery.memories(operand.address, fetched.address, near)

        def run(stream: int) -> None:
            for step in program.steps:
                if isinstance(step, Pack):
                    packing.launch(stream, [operand.address], [outbox.address])
                elif isinstance(step, Synchronise):
                    lane.barrier(stream)
                elif isinstance(step, Get):
                    fetch(context, delivery.fetches, locations, fetched.address, stream)
                elif isinstance(step, Unpack):
                    unpacking.launch(stream, sources, [result.address])

        return run

    place = Exposed(outbox.location, delivery.outbox.nbytes, 0, ()).pack()
    return Ready((place,), bind)


def _address(context: Context, peer: int, outbox: Exposed | None) -> int:
    assert outbox is not None, "agreed on"
    address = context.peer_address(peer, outbox.location, outbox.nbytes)
    assert address is not None, "it is on this host"
    return address
