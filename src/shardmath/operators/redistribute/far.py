"""One execution of a redistribution on GPUs of several hosts: pack, meet, fetch, unpack, meet.

All of it is on the stream. Outbox and room are those of the lane, in which operations follow each
other; the barrier at the end says that no peer reads them any more. Ranks agree once more where one
of them has to allocate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardmath.context import Context
from shardmath.operators.lanes import Lane
from shardmath.operators.redistribute.device_arrays import DeviceArrays
from shardmath.operators.redistribute.notes import Note
from shardmath.operators.redistribute.problem import Problem
from shardmath.redistribution import Exposed
from shardmath.redistribution.delivery import Delivery
from shardmath.redistribution.device import BoxCopies
from shardmath.redistribution.fetching import fetch

if TYPE_CHECKING:
    from shardmath.operators.redistribute.memory import DeviceMemory

__all__ = ["allocate_outbox", "delivery_of", "drop_outbox", "execute_far"]

_OUTBOX, _FETCH_BUFFER = "redistribute outbox", "redistribute fetch buffer"


def delivery_of(context: Context, problem: Problem) -> Delivery:
    """What this rank packs, fetches and unpacks."""
    axes = tuple(range(len(problem.transfer.src.global_shape)))
    axes = axes if problem.order == "C" else axes[::-1]
    return Delivery(problem.transfer, context.rank, context.hosts, axes)


def allocate_outbox(delivery: Delivery, lane: Lane) -> Exposed:
    """Take memory for what is packed, and for what is fetched; where the first is. Local.

    Raises HeapExhausted.
    """
    lane.buffer(_FETCH_BUFFER, delivery.room)
    block = lane.buffer(_OUTBOX, delivery.outbox.nbytes).block
    return Exposed(block.location, delivery.outbox.nbytes, 0, ())


def drop_outbox(lane: Lane) -> None:
    """Give back what `allocate_outbox` took, when what uses it has ended. Local."""
    lane.drop(_OUTBOX, _FETCH_BUFFER)


def execute_far(
    context: Context,
    problem: Problem,
    arrays: DeviceArrays,
    texts: Sequence[bytes],
    memory: DeviceMemory,
    lane: Lane,
) -> Any:
    """The result of redistributing `arrays.operand`: `out`, or a new array. Collective.

    `texts` are all ranks' notes. Raises HeapExhausted on all ranks when one lacks memory.
    """
    delivery, stream = memory.delivery(problem), arrays.stream
    outboxes = _outboxes(context, problem, arrays, texts, delivery, lane)
    assert arrays.result is not None and context.team is not None, "agreed on"
    device, operand, result = context.team.device, arrays.operand, arrays.result.array
    packing = memory.copies(
        ("pack", operand.strides), lambda: BoxCopies(device, delivery.packing(operand.strides))
    )
    unpacking = memory.copies(
        ("unpack", operand.strides, result.strides),
        lambda: BoxCopies(device, delivery.unpacking(operand.strides, result.strides)),
    )
    with context.executing("redistribute"):
        fetch_buffer = lane.address(_FETCH_BUFFER)
        near = [_address(context, peer, outboxes[peer]) for peer in delivery.near]
        with lane.section(stream) as turn:
            packing.launch(stream, [operand.address], [lane.address(_OUTBOX)])
            # After writing what a peer will read, and before reading what a peer wrote.
            lane.barrier(stream)
            locations = [outbox.location for outbox in outboxes]
            fetch(context, delivery.fetches, locations, fetch_buffer, stream)
            sources = delivery.memories(operand.address, fetch_buffer, near)
            unpacking.launch(stream, sources, [result.address])
            lane.barrier(stream)  # before reusing what a peer may still read
        if turn.captured:
            lane.keep((packing, unpacking))
        given = arrays.result.give(context, stream)
        if problem.blocking:
            context.team.synchronize(stream)
        return given


def _outboxes(
    context: Context,
    problem: Problem,
    arrays: DeviceArrays,
    texts: Sequence[bytes],
    delivery: Delivery,
    lane: Lane,
) -> list[Exposed]:
    """Where all ranks' outboxes are, when all have what they need. Collective."""
    notes = [Note.unpack(text) for text in texts]
    shapes = [problem.transfer.dst.local_shape(rank) for rank in range(context.size)]
    if any(
        note.staging is None or note.lacks_result((shape, problem.order))
        for note, shape in zip(notes, shapes, strict=True)
    ):

        def prepare() -> bytes:
            arrays.allocate(problem)
            return arrays.note(allocate_outbox(delivery, lane).pack())

        texts = context.agree("redistribute, memory", prepare, list)
        notes = [Note.unpack(text) for text in texts]
    found = [note.staging for note in notes if note.staging is not None]
    assert len(found) == context.size, "agreed on"
    return found


def _address(context: Context, peer: int, outbox: Exposed) -> int:
    address = context.peer_address(peer, outbox.location, outbox.nbytes)
    assert address is not None, "it is on this host"
    return address
