"""Long arrays combined in two shots: each rank reduces one part, and all ranks take it from there.

That is a reduce-scatter followed by an all-gather, in a pipeline of blocks with a barrier each:

    between barriers k and k+1:   fetch block k-1   reduce block k   stage block k+1

An operand on the heap is read where it lies; any other is copied to a stage, one block at a time. A
result on the heap is written by the rank that reduces it; any other is fetched from that rank's
slot. Between hosts a rank reads copies of the parts that it needs, and writes no peer's result:
its parts are fetched from its slots. Where hosts have several ranks each, that would send elements
to the same host more than once, which `_HostChain` does not. If all is on the heap of one host
there is one block only.

Even and odd blocks have a stage and a slot each, which are written between one pair of barriers,
read between the next, and written again after that. So each barrier has all three reasons: after
writing what a peer will read, before reading what a peer wrote, before reusing what a peer may
still read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np

from shardmath.arrays import dtypes, raw_view
from shardmath.arrays.base import HostArray
from shardmath.base.immutable import Immutable
from shardmath.base.integers import up
from shardmath.base.recorder import spanned, this_process
from shardmath.context.context import Context
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


class _Area(Immutable):
    """Memory for two arrays of `count` elements, of even and of odd blocks, in staging buffers."""

    begin: int  # bytes into the buffer
    count: int
    dtype: np.dtype[Any]

    @property
    def end(self) -> int:
        """Bytes from the buffer's begin to where the area ends."""
        return self.begin + 2 * self.count * self.dtype.itemsize

    def place(self, number: int, low: int = 0) -> int:
        """Where element `low` of block `number` lies: bytes into the buffer."""
        return self.begin + ((number & 1) * self.count + low) * self.dtype.itemsize

    def arrays(self, staging: HostArray) -> list[HostArray]:
        """Both arrays, in this rank's buffer."""
        nbytes = self.count * self.dtype.itemsize
        return [staging[self.place(i) :][:nbytes].view(self.dtype) for i in (0, 1)]


class StagingLayout(Immutable):
    """How a rank's staging buffer is divided, for blocks of `block` elements.

    Stages have blocks of an operand, slots parts of the result. For a chain, `hosts` are the ranks
    of each host, and partials are parts of what the hosts so far have combined.
    """

    block: int
    stages: _Area
    slots: _Area
    partials: _Area
    hosts: tuple[range, ...]

    @classmethod
    def of(cls, reduction: Reduction, hosts: Sequence[int], count: int) -> StagingLayout:
        """The layout for a reduction of `count` elements; rank r is on host `hosts[r]`."""
        names = reduction.dtype, reduction.result, reduction.accumulator
        source, target, partial = map(dtypes.to_numpy, names)
        block = _BLOCK_BYTES // max(source.itemsize, target.itemsize)
        chain = _chain(hosts, (source, target, partial), -(-count // block))
        part = _part(block, min(map(len, chain)) if chain else len(hosts))
        stages = _Area(0, block, source)
        slots = _Area(stages.end, part, target)
        partials = _Area(slots.end, part if chain else 0, partial)
        return cls(block, stages, slots, partials, chain)

    @property
    def nbytes(self) -> int:
        """Bytes of a staging buffer."""
        return self.partials.end


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
        if self.operand is None:
            return self.staged(self.layout.stages, number, low, high)
        dtype = self.layout.stages.dtype
        place, nbytes = (start + low) * dtype.itemsize, (high - low) * dtype.itemsize
        memory = self.context.read_bytes(self.rank, self.operand.behind(place), nbytes)
        return memory.view(dtype)

    def staged(self, area: _Area, number: int, low: int, high: int) -> HostArray:
        """Elements `low` to `high` of what the peer has in an area, for block `number`."""
        where, nbytes = area.place(number, low), (high - low) * area.dtype.itemsize
        memory = self.context.read_bytes(self.rank, self.staging.behind(where), nbytes)
        return memory.view(area.dtype)

    @cached_property
    def result_view(self) -> HostArray:
        """The peer's result, to be written."""
        assert self.result is not None and self.writes_result
        dtype = self.layout.slots.dtype
        memory = self.context.peer_bytes(self.rank, self.result, self.count * dtype.itemsize)
        assert memory is not None, "it is on this host"
        return memory.view(dtype)


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
    layout = StagingLayout.of(step.reduction, context.hosts, operand.size)
    staging = kept_for_readers(context, _STAGING, layout.nbytes)
    copies: Calls = []
    if operand.block is None:
        stages = layout.stages.arrays(np.asarray(staging))
        first = _flat(operand, layout.stages.dtype)[: layout.block]
        stage = partial(_copy, stages[0][: first.size], first)
        copies.append(spanned(stage, "copy to where peers read", "copy", first.nbytes))
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
    flat, size = operand.reshape(-1), operand.size
    layout = StagingLayout.of(reduction, context.hosts, size)
    peers = [_peer(context, rank, note, size, layout) for rank, note in enumerate(notes)]
    whole = all(peer.operand is not None and peer.result is not None for peer in peers)
    block = size if whole and not context.multi_host else layout.block
    staging = kept_for_readers(context, _STAGING, layout.nbytes)
    memory = np.asarray(staging)
    own = [area.arrays(memory) for area in (layout.stages, layout.slots, layout.partials)]
    direct = result.flags.c_contiguous
    target = result.reshape(-1) if direct else np.empty(0, result.dtype)
    kind: type[_Pipeline] = _HostChain if layout.hosts else _Pipeline
    if this_process.spans is not None:
        kind = _TracedHostChain if layout.hosts else _TracedPipeline
    meet = partial(context.board.barrier, context.board.operation)
    barrier = spanned(meet, "barrier", "wait")
    pipeline = kind(context, reduction, flat, target, peers, block, layout, barrier, *own)
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
    layout: StagingLayout
    barrier: Callable[[], object]
    stages: list[HostArray]
    slots: list[HostArray]
    partials: list[HostArray]

    @property
    def rank(self) -> int:
        """This rank."""
        return self.context.rank

    def run(self) -> None:
        """Combine the operands of all ranks into all results."""
        count = -(-self.operand.size // self.block)
        for number in range(count):
            if number:
                self.fetch(number - 1)
            self.reduce(number)
            if number + 1 < count:
                self.stage(number + 1)
            self.barrier()
        self.fetch(count - 1)
        if self.context.multi_host:
            # Before reusing what a peer may still read: on its own host it can even when this rank
            # has ended, from another it cannot.
            self.barrier()

    def part(self, rank: int, number: int) -> tuple[int, int, int]:
        """Where block `number` begins, and the range in it that `rank` sees to."""
        start, ranks = number * self.block, self.sharers(rank)
        extent, index = min(self.block, self.operand.size - start), rank - ranks.start
        part = _part(self.block, len(ranks))
        return start, min(index * part, extent), min((index + 1) * part, extent)

    def sharers(self, rank: int) -> range:
        """The ranks among which `rank` shares each block."""
        return range(len(self.peers))

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
                _copy(into, peer.staged(peer.layout.slots, number, 0, high - low))


class _HostChain(_Pipeline):
    """Two shots between hosts: each element crosses once to the next host, and back as a result.

        host 0: combine ─partials─► host 1: combine ─partials─► host 2: combine
        host 1 ◄─results─ host 0 ◄─────────────results───────── host 2

    A host's ranks share a block among them: each brings its part of what the host before has, goes
    on with its own host's operands, in the order of the ranks, and hands that on; so the bits are
    those of one host. Host h is h barriers behind the first, and again as results come round.
    """

    @property
    def place(self) -> int:
        """The place of this rank's host in the chain."""
        return next(i for i, ranks in enumerate(self.layout.hosts) if self.rank in ranks)

    def run(self) -> None:
        """Combine the operands of all ranks into all results."""
        place, last = self.place, len(self.layout.hosts) - 1
        count = -(-self.operand.size // self.block)
        results = last if place == last else last + 1 + place  # barriers until they are here
        for time in range(count + 2 * last + 1):
            if time:
                self.barrier()
            if 0 <= time - place < count:
                self.reduce(time - place)
            if 1 <= time - place + 1 < count:
                self.stage(time - place + 1)
            if place != last and 0 <= time - results < count:
                self.bring(time - results)
            if 0 <= time - results - 1 < count:
                self.fetch(time - results - 1)

    def sharers(self, rank: int) -> range:
        """The ranks of the same host."""
        return next(ranks for ranks in self.layout.hosts if rank in ranks)

    def reduce(self, number: int) -> None:
        """Go on with what the hosts before have combined, into partial sums or the result."""
        start, low, high = self.part(self.rank, number)
        if low == high:
            return
        place, hosts, layout = self.place, self.layout.hosts, self.layout
        inputs = [] if place == 0 else [self._from(hosts[place - 1], layout.partials, number)]
        for src in hosts[place]:
            if src == self.rank:
                inputs.append(self.operand[start + low : start + high])
            else:
                inputs.append(self.peers[src].operand_view(number, start, low, high))
        reduction = self.reduction
        if place == len(hosts) - 1:
            slot = self.slots[number & 1][: high - low]
            outputs = [self.result[start + low : start + high], slot]
        else:
            outputs = [self.partials[number & 1][: high - low]]
            op = "sum" if reduction.op == "mean" else reduction.op
            reduction = replace(reduction, op=op, result=reduction.accumulator)
        rows, targets = [row[None] for row in inputs], [row[None] for row in outputs]
        reduce_local(reduction, rows, targets, count=len(self.peers))

    def bring(self, number: int) -> None:
        """Copy this rank's part of the result from the host that has it, for this host's ranks."""
        start, low, high = self.part(self.rank, number)
        part = self._from(self.layout.hosts[self.place - 1], self.layout.slots, number)
        _copy(self.slots[number & 1][: high - low], part)
        _copy(self.result[start + low : start + high], part)

    def fetch(self, number: int) -> None:
        """Copy the parts of the result that the other ranks of this host have."""
        for src in self.layout.hosts[self.place]:
            start, low, high = self.part(src, number)
            if src != self.rank:
                part = self.peers[src].staged(self.layout.slots, number, 0, high - low)
                _copy(self.result[start + low : start + high], part)

    def _from(self, ranks: range, area: _Area, number: int) -> HostArray:
        """This rank's part of a block, of which the ranks of another host have parts."""
        _, low, high = self.part(self.rank, number)
        pieces = []
        for src in ranks:
            _, begin, end = self.part(src, number)
            begins, ends = max(begin, low), min(end, high)
            if begins < ends:
                pieces.append(self.peers[src].staged(area, number, begins - begin, ends - begin))
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, area.dtype), *pieces])


class _TracedPipeline(_Pipeline):
    """A pipeline in a traced process, which records a span for each of its calls."""

    def reduce(self, number: int) -> None:
        """Reduce a part, in a span that says what is read and written where peers have it."""
        peers = [src for src in range(len(self.peers)) if src != self.rank]
        read = dict.fromkeys(peers, self._nbytes(self.rank, number, self.operand))
        written = {
            src: self._nbytes(self.rank, number, self.result)
            for src in peers
            if self.peers[src].writes_result
        }
        spanned(super().reduce, "reduce", read=read, written=written)(number)

    def stage(self, number: int) -> None:
        """Copy a block, if it is copied, in a span."""
        if self.peers[self.rank].operand is None:
            start, low, high = self.part(self.rank, number)
            size = min(self.block, self.operand.size - start) - (high - low)
            nbytes = size * self.operand.itemsize
            spanned(super().stage, "copy to where peers read", "copy", nbytes)(number)

    def fetch(self, number: int) -> None:
        """Copy the parts that peers have reduced, in a span that says whose they are."""
        read = {src: self._nbytes(src, number, self.result) for src in self._fetched()}
        if read:
            spanned(super().fetch, "copy results", "copy", sum(read.values()), read=read)(number)

    def _fetched(self) -> list[int]:
        """The ranks whose results this rank copies."""
        on_heap = self.peers[self.rank].result is not None
        peers = [src for src in range(len(self.peers)) if src != self.rank]
        return [src for src in peers if not (on_heap and self.peers[src].same_host)]

    def _nbytes(self, rank: int, number: int, array: HostArray) -> int:
        """The bytes of a rank's part of a block."""
        _, low, high = self.part(rank, number)
        return (high - low) * array.itemsize


class _TracedHostChain(_HostChain):
    """A chain of hosts in a traced process, which records a span for each of its calls."""

    def reduce(self, number: int) -> None:
        """Go on with a part, in a span."""
        spanned(super().reduce, "reduce")(number)

    def stage(self, number: int) -> None:
        """Copy a block, in a span."""
        spanned(super().stage, "copy to where peers read", "copy")(number)

    def bring(self, number: int) -> None:
        """Copy results from another host, in a span."""
        spanned(super().bring, "copy results", "copy")(number)

    def fetch(self, number: int) -> None:
        """Copy results from this host's ranks, in a span."""
        spanned(super().fetch, "copy results", "copy")(number)


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


def _chain(hosts: Sequence[int], types: Sequence[np.dtype[Any]], blocks: int) -> tuple[range, ...]:
    """The ranks of each host, where a chain of hosts is faster; none where it is not.

    Both ways take as long as the host that sends most does for one block, for each barrier. Of a
    chain, the ranks of a host must follow each other, or the order would not be theirs.
    """
    starts = [rank for rank, host in enumerate(hosts) if not rank or hosts[rank - 1] != host]
    runs = tuple(range(*ends) for ends in pairwise([*starts, len(hosts)]))
    if len(runs) == 1 or len(runs) != len(set(hosts)):
        return ()
    source, target, partial = (dtype.itemsize for dtype in types)
    near = max(len(ranks) * (len(hosts) - len(ranks)) for ranks in runs) / len(hosts)
    pipeline = near * (source + target) * (blocks + 1)
    most = max(partial, target) if len(runs) == 2 else partial + target
    return runs if most * (blocks + 2 * len(runs) - 1) < pipeline else ()


def _part(block: int, size: int) -> int:
    """The elements of a block that each rank reduces; the last ranks may have fewer, or none."""
    share = -(-block // size)
    return up(share, _LINE_ELEMENTS)
