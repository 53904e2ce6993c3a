"""One execution of a redistribution on GPUs of several hosts: show, fetch, copy, meet.

Each rank shows its operand where it lies on the heap, or a packed copy of it. From every peer it
fetches the bytes that move to it, and a launch copies them from there to their place in the result.
Ranks of its own host it reads in place. The ranks' processes meet, hence the call waits for its
stream.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from shardmath.context import DistributedContext
from shardmath.operators.redistribute.device_arrays import DeviceArrays
from shardmath.operators.redistribute.problem import Problem
from shardmath.redistribution import Exposed, TransferPlan
from shardmath.redistribution.copies import lowered, whole
from shardmath.redistribution.device import Box, BoxCopies
from shardmath.symmetric.device_array import DeviceArray
from shardmath.symmetric.heap import Buffer, Location
from shardmath.transport.base import DeviceBytes

__all__ = ["execute_far"]


def execute_far(context: DistributedContext, problem: Problem, arrays: DeviceArrays) -> Any:
    """The result of redistributing `arrays.operand`: `out`, or a new array. Collective.

    Raises HeapExhausted on all ranks when one lacks memory.
    """
    team = context.team
    assert team is not None, "a context of GPUs"
    transfer, rank, stream = problem.transfer, context.rank, arrays.stream
    kept: list[Any] = []  # until the stream has come to the end

    def show() -> bytes:
        arrays.allocate(problem)
        exposed = _shown(context, transfer, arrays.operand, stream, kept)
        team.synchronize(stream)
        return exposed

    # Also: after writing what a peer will read, and before reading what a peer wrote.
    shown = context.agree("redistribute, shown", show, list)
    peers = [src for src in transfer.sources(rank) if src != rank]
    peers.sort(key=lambda src: (src - rank) % context.size)
    sources = [_Source.of(context, transfer, src, Exposed.unpack(shown[src])) for src in peers]
    scratch: list[Buffer] = []

    def make_room() -> None:
        scratch.append(context.heap.allocate(max((each.room for each in sources), default=0)))

    context.agree("redistribute, memory", make_room, lambda _: None)
    assert arrays.result is not None, "agreed on"
    with context.executing("redistribute"):
        operand, result = arrays.operand, arrays.result.array
        for source in sources:
            address = source.fetch(context, scratch[0], stream)
            kept.append(_copies(context, transfer, source.rank, source.shown.strides, result))
            kept[-1].launch(stream, [address], [result.address])
        kept.append(_copies(context, transfer, rank, operand.strides, result))
        kept[-1].launch(stream, [operand.address], [result.address])
        team.synchronize(stream)
        # Before reusing what a peer may still read: operand and staging.
        context.board.barrier("redistribute")
        return arrays.result.give(context, stream)


@dataclass(frozen=True)
class _Source:
    """What a peer shows, and which of its bytes this rank fetches, from the peer's element 0."""

    rank: int
    shown: Exposed
    pieces: tuple[tuple[int, int], ...]  # none where it is read in place

    @classmethod
    def of(
        cls, context: DistributedContext, transfer: TransferPlan, src: int, shown: Exposed
    ) -> _Source:
        if context.reads_in_place(src):
            return cls(src, shown, ())
        return cls(src, shown, tuple(transfer.pieces(context.rank, src, shown.strides)))

    @property
    def low(self) -> int:
        """The first byte that is fetched."""
        return min((low for low, _ in self.pieces), default=0)

    @property
    def room(self) -> int:
        """The bytes from there to the last."""
        return max((high for _, high in self.pieces), default=0) - self.low

    def fetch(self, context: DistributedContext, scratch: Buffer, stream: int) -> int:
        """Put the fetching on `stream`; where the peer's element 0 then is, or would be."""
        where = self.shown.location
        if not self.pieces:
            address = context.peer_address(self.rank, where, self.shown.nbytes)
            assert address is not None, "it is on this host"
            return address + self.shown.origin
        start = scratch.block.address - self.low
        for low, high in self.pieces:
            place = Location(where.segment, where.offset + self.shown.origin + low)
            into = DeviceBytes(start + low, high - low, scratch.device)
            context.get(self.rank, place, into, stream)
        return start


def _shown(
    context: DistributedContext,
    transfer: TransferPlan,
    operand: DeviceArray,
    stream: int,
    kept: list[Any],
) -> bytes:
    """Show the operand, or a packed copy of one in ordinary memory; nothing if none reads it."""
    if not transfer.traffic.sent[context.rank]:
        return b""
    if operand.block is not None:
        context.announce(operand.block)
        return Exposed.within(operand.block, operand.address, operand.span, operand.strides).pack()
    strides, step = [0] * len(operand.shape), transfer.itemsize
    for axis in sorted(range(len(strides)), key=lambda axis: (abs(operand.strides[axis]), -axis)):
        strides[axis] = step
        step *= operand.shape[axis]
    buffer = context.heap.allocate(step)
    context.announce(buffer.block)
    assert context.team is not None, "a context of GPUs"
    copy = whole(operand.shape, transfer.itemsize, operand.strides, strides)
    packing = BoxCopies(context.team.device, [Box.of(copy, 0)])
    packing.launch(stream, [operand.address], [buffer.block.address])
    kept += [buffer, packing]
    return Exposed(buffer.block.location, step, 0, tuple(strides)).pack()


def _copies(
    context: DistributedContext,
    transfer: TransferPlan,
    src: int,
    strides: tuple[int, ...],
    result: DeviceArray,
) -> BoxCopies:
    """What moves to this rank from `src`, whose array has these strides."""
    assert context.team is not None, "a context of GPUs"
    boxes = [
        Box.of(replace(lowered(move, transfer.itemsize, strides, result.strides), src=0), 0)
        for move in transfer.into(context.rank)
        if move.src == src
    ]
    return BoxCopies(context.team.device, boxes)
