"""Long arrays combined in two shots: each rank reduces one part, and all ranks take it from there.

That is a reduce-scatter followed by an all-gather, in a pipeline of blocks with a barrier each:

    between barriers k and k+1:   fetch block k-1   reduce block k   stage block k+1

An operand on the heap is read where it lies; any other is copied to a stage, one block at a time. A
result on the heap is written by the rank that reduces it; any other is fetched from that rank's
slot. Between hosts a rank reads copies of the parts that it needs, and writes no peer's result:
its parts are fetched from its slots. If all is on the heap of one host there is one block only.

Even and odd blocks have a stage and a slot each, which are written between one pair of barriers,
read between the next, and written again after that. So each barrier has all three reasons: after
writing what a peer will read, before reading what a peer wrote, before reusing what a peer may
still read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from shardmath.arrays import dtypes, raw_view
from shardmath.arrays.base import HostArray
from shardmath.base.immutable import Immutable
from shardmath.context.context import Context
from shardmath.geometry.integers import up
from shardmath.handles.operand import Exposed, Operand
from shardmath.local.reduction import Reduction, reduce_local
from shardmath.operators.workspace import kept_for_readers
from shardmath.program.notes import pack_parts, unpack_parts
from shardmath.program.offers import announced
from shardmath.program.steps import Combine
from shardmath.redistribution import Window
from shardmath.redistribution.bound_copies import Calls
from shardmath.symmetric.heap import Location

# One shot reads every operand on every rank, and takes one exchange; two shots read each operand
# once, and take a barrier more. Measured on 2 cores with 4 ranks: they meet between 1 and 2 MB.
_ONE_SHOT_BYTES = 1 << 20  # of one operand
_ONE_SHOT_TOTAL_BYTES = 4 << 20  # of all ranks' operands
_BLOCK_BYTES = 2 << 20  # of one stage; measured, 1 to 32 MB do not differ clearly
_LINE_ELEMENTS = 64  # parts begin at whole cache lines
_KIND = b"t"  # the first byte of a note on a buffer
_STAGING = "staging of two shots"


class StagingLayout(Immutable):
    """A rank's staging buffer: two stages of `block` elements of dtype `source`, then two slots of
    `part` elements of dtype `target`, each rank's part of a block.
    """

    block: int
    part: int
    source: np.dtype[Any]
    target: np.dtype[Any]

    @classmethod
    def of(cls, reduction: Reduction, size: int) -> StagingLayout:
        """The layout for one reduction over `size` ranks."""
        source, target = dtypes.to_numpy(reduction.dtype), dtypes.to_numpy(reduction.result)
        block = _BLOCK_BYTES // max(source.itemsize, target.itemsize)
        return cls(block, _part(block, size), source, target)

    @property
    def nbytes(self) -> int:
        """Bytes of a staging buffer."""
        return 2 * (self.block * self.source.itemsize + self.part * self.target.itemsize)

    def views(self, staging: HostArray) -> tuple[list[HostArray], list[HostArray]]:
        """The stages and the slots of a rank's staging buffer."""
        stage = self.block * self.source.itemsize
        slot = self.part * self.target.itemsize
        return (
            [staging[i * stage : (i + 1) * stage].view(self.source) for i in (0, 1)],
            [staging[2 * stage + i * slot :][:slot].view(self.target) for i in (0, 1)],
        )


class _Peer(Immutable):
    """One rank's memory as this rank sees it.

    `operand` and `result` are the places of these arrays, None if they are not on the heap;
    `staging` is that of the staging buffer. Nothing on another host can be written.
    """

    context: Context
    rank: int
    layout: StagingLayout
    count: int
    operand: Location | None
    result: Location | None
    staging: Location

    @property
    def same_host(self) -> bool:
        """Whether this rank and the peer are on one host, and can write each other's memory."""
        return self.context.same_host(self.rank)

    @property
    def writes_result(self) -> bool:
        """Whether this rank writes its parts of the result straight into the peer's."""
        return self.result is not None and self.same_host

    def operand_view(self, number: int, start: int, low: int, high: int) -> HostArray:
        """Elements `low` to `high` of block `number`, which begins at `start`."""
        item = self.layout.source.itemsize
        if self.operand is not None:
            memory = self._read(self.operand, (start + low) * item, (high - low) * item)
        else:
            stage = (number & 1) * self.layout.block
            memory = self._read(self.staging, (stage + low) * item, (high - low) * item)
        return memory.view(self.layout.source)

    def reduced(self, number: int, count: int) -> HostArray:
        """The peer's `count` elements of block `number` of the result."""
        layout = self.layout
        offset = 2 * layout.block * layout.source.itemsize
        offset += (number & 1) * layout.part * layout.target.itemsize
        return self._read(self.staging, offset, count * layout.target.itemsize).view(layout.target)

    @cached_property
    def result_view(self) -> HostArray:
        """The peer's result, to be written."""
        assert self.result is not None and self.writes_result
        nbytes = self.count * self.layout.target.itemsize
        memory = self.context.peer_bytes(self.rank, self.result, nbytes)
        assert memory is not None, "it is on this host"
        return memory.view(self.layout.target)

    def _read(self, where: Location, start: int, nbytes: int) -> HostArray:
        return self.context.read_bytes(self.rank, where.behind(start), nbytes)


def takes(step: Combine, nbytes: int) -> bool:
    """Whether a step that combines arrays of so many bytes is done in two shots."""
    size = step.held.size
    if step.reduction is None or size == 1 or not step.needed.is_replicated:
        return False
    return nbytes > _ONE_SHOT_BYTES or nbytes * size > _ONE_SHOT_TOTAL_BYTES


def needs_copy(operand: Operand, result: Operand | None) -> bool:
    """Whether an operand does not lie in C order, or a result overlaps it and is not it."""
    if operand.order not in ("C", "both"):
        return True
    if result is None or not operand.overlaps(result):
        return False
    alike = operand.address == result.address and operand.itemsize == result.itemsize
    return not (alike and result.order in ("C", "both"))


def offer(
    context: Context, step: Combine, operand: Operand, result: Operand | None
) -> tuple[bytes, Calls]:
    """A note on where peers read the operand, or its first block, and the calls that put it there.

    Local. An exchange of the notes has to follow. Raises HeapExhausted.
    """
    assert step.reduction is not None, "taken"
    layout = StagingLayout.of(step.reduction, context.size)
    staging = kept_for_readers(context, _STAGING, layout.nbytes)
    copies: Calls = []
    if operand.block is None:
        stages, _ = layout.views(np.asarray(staging))
        first = _flat(operand, layout.source)[: layout.block]
        copies.append(partial(_copy, stages[0][: first.size], first))
    in_place = result if result is not None and result.order in ("C", "both") else None
    own = Exposed(staging.block.location, layout.nbytes, 0, ())
    places = _on_heap(context, operand), _on_heap(context, in_place), own
    return _KIND + pack_parts(place.pack() if place else b"" for place in places), copies


def bind(
    context: Context, step: Combine, operand: HostArray, result: HostArray, notes: Sequence[bytes]
) -> Calls:
    """The calls that combine all ranks' operands, this rank's being `operand`, into `result`."""
    reduction = step.reduction
    assert reduction is not None, "taken"
    layout = StagingLayout.of(reduction, context.size)
    flat, size = operand.reshape(-1), operand.size
    peers = [_peer(context, rank, note, size, layout) for rank, note in enumerate(notes)]
    whole = all(peer.operand is not None and peer.result is not None for peer in peers)
    block = size if whole and not context.multi_host else layout.block
    staging = kept_for_readers(context, _STAGING, layout.nbytes)
    own = layout.views(np.asarray(staging))
    direct = result.flags.c_contiguous
    target = result.reshape(-1) if direct else np.empty(0, result.dtype)
    pipeline = _Pipeline(context, reduction, flat, target, peers, block, *own)
    if direct:
        return [pipeline.run]

    def run() -> None:
        packed = np.empty(size, result.dtype)
        replace(pipeline, result=packed).run()
        _copy(result, packed.reshape(result.shape))

    return [run]


class _Pipeline(Immutable):
    """One rank's calls between the same arrays, and what happens to each block."""

    context: Context
    reduction: Reduction
    operand: HostArray
    result: HostArray
    peers: Sequence[_Peer]
    block: int
    stages: list[HostArray]
    slots: list[HostArray]

    @property
    def rank(self) -> int:
        """This rank."""
        return self.context.rank

    def run(self) -> None:
        """Combine the operands of all ranks into all results."""
        board, count = self.context.board, -(-self.operand.size // self.block)
        for number in range(count):
            if number:
                self.fetch(number - 1)
            self.reduce(number)
            if number + 1 < count:
                self.stage(number + 1)
            board.barrier(board.operation)
        self.fetch(count - 1)
        if self.context.multi_host:
            # Before reusing what a peer may still read: on its own host it can even when this rank
            # has ended, from another it cannot.
            board.barrier(board.operation)

    def part(self, rank: int, number: int) -> tuple[int, int, int]:
        """Where block `number` begins, and the range in it that `rank` reduces."""
        start = number * self.block
        extent = min(self.block, self.operand.size - start)
        part = _part(self.block, len(self.peers))
        return start, min(rank * part, extent), min((rank + 1) * part, extent)

    def reduce(self, number: int) -> None:
        """Reduce this rank's part of a block into results on the heap, and into its slot."""
        start, low, high = self.part(self.rank, number)
        here = slice(start + low, start + high)
        inputs, outputs = [], [self.result[here]]
        fetched = False
        for src, peer in enumerate(self.peers):
            if src == self.rank:
                inputs.append(self.operand[here])
                continue
            inputs.append(peer.operand_view(number, start, low, high))
            if peer.writes_result:
                outputs.append(peer.result_view[here])
            else:
                fetched = True
        if fetched:
            outputs.append(self.slots[number & 1][: high - low])
        reduce_local(self.reduction, [row[None] for row in inputs], [row[None] for row in outputs])

    def stage(self, number: int) -> None:
        """Copy a block to where peers read it, except for the part that this rank reduces."""
        if self.peers[self.rank].operand is None:
            start, low, high = self.part(self.rank, number)
            source = self.operand[start : start + self.block]
            into = self.stages[number & 1]
            _copy(into[:low], source[:low])
            _copy(into[high : source.size], source[high:])

    def fetch(self, number: int) -> None:
        """Copy the parts of a block that peers have reduced, unless they wrote them here."""
        on_heap = self.peers[self.rank].result is not None
        for src, peer in enumerate(self.peers):
            start, low, high = self.part(src, number)
            if src != self.rank and not (on_heap and peer.same_host):
                into = self.result[start + low : start + high]
                _copy(into, peer.reduced(number, high - low))


def _copy(into: HostArray, source: HostArray) -> None:
    np.copyto(raw_view(into), raw_view(source))


def _flat(operand: Operand, dtype: np.dtype[Any]) -> HostArray:
    window = Window(operand.address, (dtype.itemsize,), operand.keep)
    return window.array((operand.size,), dtype)


def _on_heap(context: Context, array: Operand | None) -> Exposed | None:
    """Where an array lies on the heap; peers may read and write it from now on."""
    return None if array is None or array.block is None else announced(context, array)


def _peer(context: Context, rank: int, note: bytes, count: int, layout: StagingLayout) -> _Peer:
    operand, result, staging = (
        Exposed.unpack(part).location if part else None for part in unpack_parts(note)
    )
    assert staging is not None, "every rank has announced a staging buffer"
    return _Peer(context, rank, layout, count, operand, result, staging)


def _part(block: int, size: int) -> int:
    """The elements of a block that each rank reduces; the last ranks may have fewer, or none."""
    share = -(-block // size)
    return up(share, _LINE_ELEMENTS)
