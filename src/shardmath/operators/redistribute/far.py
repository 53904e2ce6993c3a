"""One execution of a redistribution on GPUs of several hosts: show, meet, fetch, meet.

Kernels of one host cannot write to another's memory, so every rank pulls: from memory with an
address as it lies, and of the others' it first fetches what it needs. The ranks' processes meet;
every call waits for its stream, and none can be captured in a graph.
"""

from __future__ import annotations

from typing import Any

from shardmath.context import DistributedContext
from shardmath.operators.redistribute.device_arrays import DeviceArrays
from shardmath.operators.redistribute.problem import Problem
from shardmath.redistribution import Exposed
from shardmath.redistribution.copies import lowered, whole
from shardmath.symmetric.device_array import DeviceArray, packed_on_heap
from shardmath.symmetric.heap import Buffer, Location
from shardmath.transport.base import DeviceBytes

__all__ = ["execute_on_far_gpus"]


def execute_on_far_gpus(context: DistributedContext, problem: Problem, arrays: DeviceArrays) -> Any:
    """The result of redistributing `arrays.operand`: `out`, or a new array. Collective.

    Raises HeapExhausted on all ranks when one has no room for its result, or to show its operand.
    """
    from shardmath.redistribution.device import Box, BoxCopies

    team, transfer, rank = context.team, problem.transfer, context.rank
    assert team is not None, "a context of GPUs"
    shown: list[DeviceArray] = []

    def show() -> bytes:
        arrays.allocate(problem)
        shown.append(_on_heap(context, arrays))
        team.synchronize(arrays.stream)
        exposed = arrays.exposed(shown[0])
        assert exposed is not None, "on the heap"
        return exposed.pack()

    # Also: after writing what a peer will read, and before reading what a peer wrote.
    texts = context.agree("redistribute, shown", show, list)
    assert arrays.result is not None, "allocated"
    result = arrays.result
    with context.executing("redistribute"):
        bases = [0] * context.size
        bases[rank], strides, kept = arrays.operand.address, {rank: arrays.operand.strides}, []
        for src in transfer.sources(rank):
            if src != rank:
                exposed = Exposed.unpack(texts[src])
                bases[src], buffer = _fetched(context, problem, src, exposed, arrays.stream)
                strides[src] = exposed.strides
                kept.append(buffer)
        boxes = [
            Box.of(lowered(move, transfer.itemsize, strides[move.src], result.array.strides), 0)
            for move in transfer.into(rank)
        ]
        copies = BoxCopies(team.device, boxes)
        copies.launch(arrays.stream, bases, [result.array.address])
        team.synchronize(arrays.stream)
        # Before reusing what a peer may still read: what is shown.
        context.board.barrier("redistribute")
        return result.give(context, arrays.stream)


def _on_heap(context: DistributedContext, arrays: DeviceArrays) -> DeviceArray:
    """The operand where peers can reach it: where it lies, or a copy that `stream` makes."""
    from shardmath.redistribution.device import Box, BoxCopies

    operand, team = arrays.operand, context.team
    assert team is not None, "a context of GPUs"
    if operand.block is not None:
        return operand
    copy = packed_on_heap(context, operand.shape, operand.dtype, "C")
    if operand.size:
        box = Box.of(whole(operand.shape, operand.itemsize, operand.strides, copy.strides), 0)
        copies = BoxCopies(team.device, [box])
        copies.launch(arrays.stream, [operand.address], [copy.address])
        team.synchronize(arrays.stream)
    return copy


def _fetched(
    context: DistributedContext, problem: Problem, src: int, exposed: Exposed, stream: int
) -> tuple[int, Buffer | None]:
    """Where the element 0 of what `src` shows is for this GPU, and what holds a copy of it."""
    team = context.team
    assert team is not None, "a context of GPUs"
    address = context.peer_address(src, exposed.location, exposed.nbytes)
    if address is not None:
        return address + exposed.origin, None
    buffer = context.heap.allocate(exposed.nbytes)
    first, at = buffer.block.address, exposed.location
    for low, high in problem.transfer.pieces(context.rank, src, exposed.strides):
        start = exposed.origin + low
        into = DeviceBytes(first + start, high - low, team.device.name)
        context.get(src, Location(at.segment, at.offset + start), into, stream)
    return first + exposed.origin, buffer
