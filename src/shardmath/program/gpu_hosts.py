"""Programs on GPUs of several hosts, lowered to pack, synchronise, get, unpack, synchronise.

All of it is on the stream. Outbox and room are those of the lane, in which operations follow each
other; the barrier at the end says that no peer reads them any more. Ranks agree once more where one
of them has to allocate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardmath.context import Context
from shardmath.operators.lanes import Lane
from shardmath.program.gpu_arrays import GPUTurn
from shardmath.program.gpu_memory import DeviceMemory
from shardmath.program.gpu_notes import Note, OneMove
from shardmath.program.hosts import FETCHED, OUTBOX
from shardmath.program.steps import Get, Pack, Program, Synchronise, Unpack
from shardmath.redistribution import Exposed
from shardmath.redistribution.delivery import Delivery
from shardmath.redistribution.device import BoxCopies
from shardmath.redistribution.fetching import fetch

__all__ = ["allocate_outbox", "delivery_in", "drop_outbox", "perform_between_hosts"]


def delivery_in(program: Program) -> Delivery:
    """What is packed and fetched in a program that has been lowered."""
    (pack,) = (step for step in program.steps if isinstance(step, Pack))
    return pack.delivery


def allocate_outbox(delivery: Delivery, lane: Lane) -> Exposed:
    """Take memory for what is packed, and for what is fetched; where the first is. Local.

    Raises HeapExhausted.
    """
    lane.buffer(FETCHED, delivery.room)
    block = lane.buffer(OUTBOX, delivery.outbox.nbytes).block
    return Exposed(block.location, delivery.outbox.nbytes, 0, ())


def drop_outbox(lane: Lane) -> None:
    """Give back what `allocate_outbox` took, when what uses it has ended. Local."""
    lane.drop(OUTBOX, FETCHED)


def perform_between_hosts(
    context: Context,
    program: Program,
    move: OneMove,
    arrays: GPUTurn,
    texts: Sequence[bytes],
    memory: DeviceMemory,
    lane: Lane,
) -> Any:
    """The result of a program that has been lowered: `out`, or a new array. Collective.

    `texts` are all ranks' notes. Raises HeapExhausted on all ranks when one lacks memory.
    """
    delivery, stream = delivery_in(program), arrays.stream
    outboxes = _outboxes(context, move, arrays, texts, delivery, lane)
    assert arrays.result is not None and context.team is not None, "agreed on"
    device, operand, result = context.team.device, arrays.operand, arrays.result.array
    packing = memory.copies(
        ("pack", operand.strides), lambda: BoxCopies(device, delivery.packing(operand.strides))
    )
    unpacking = memory.copies(
        ("unpack", operand.strides, result.strides),
        lambda: BoxCopies(device, delivery.unpacking(operand.strides, result.strides)),
    )
    with context.executing(move.operation):
        fetch_buffer = lane.address(FETCHED)
        near = [_address(context, peer, outboxes[peer]) for peer in delivery.near]
        locations = [outbox.location for outbox in outboxes]
        sources = delivery.memories(operand.address, fetch_buffer, near)
        with lane.section(stream) as turn:
            for step in program.steps:
                if isinstance(step, Pack):
                    packing.launch(stream, [operand.address], [lane.address(OUTBOX)])
                elif isinstance(step, Synchronise):
                    lane.barrier(stream)
                elif isinstance(step, Get):
                    fetch(context, delivery.fetches, locations, fetch_buffer, stream)
                elif isinstance(step, Unpack):
                    unpacking.launch(stream, sources, [result.address])
        if turn.captured:
            lane.keep((packing, unpacking))
        given = arrays.result.give(context, stream)
        if move.blocking:
            context.team.synchronize(stream)
        return given


def _outboxes(
    context: Context,
    move: OneMove,
    arrays: GPUTurn,
    texts: Sequence[bytes],
    delivery: Delivery,
    lane: Lane,
) -> list[Exposed]:
    """Where all ranks' outboxes are, when all have what they need. Collective."""
    notes = [Note.unpack(text) for text in texts]
    shapes = [move.transfer.dst.local_shape(rank) for rank in range(context.size)]
    if any(
        note.staging is None or note.lacks_result((shape, move.order))
        for note, shape in zip(notes, shapes, strict=True)
    ):

        def prepare() -> bytes:
            arrays.allocate(move)
            return arrays.note(allocate_outbox(delivery, lane).pack())

        texts = context.gather(f"{move.operation}, memory", prepare)
        notes = [Note.unpack(text) for text in texts]
    found = [note.staging for note in notes if note.staging is not None]
    assert len(found) == context.size, "agreed on"
    return found


def _address(context: Context, peer: int, outbox: Exposed) -> int:
    address = context.peer_address(peer, outbox.location, outbox.nbytes)
    assert address is not None, "it is on this host"
    return address
