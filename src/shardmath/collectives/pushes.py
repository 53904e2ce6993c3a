"""Large data pushed straight into its place in symmetric memory, between barriers on a stream.

Kernels push (`kernels/push.cu`), or a copy engine: it is faster for parts from 24 MiB on, takes
10 us from one copy to the next, and works on one stream, since two copies to different peers at
once halve the rate. Every rank begins with another peer, so that no two send to the same. Which of
both pushes is each rank's own choice; the peers see the barriers only.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardmath.arrays.dtypes import DType
from shardmath.collectives.slices import UNIT, Slice, chunked
from shardmath.cuda.driver import call
from shardmath.cuda.kernel import Argument
from shardmath.cuda.stream import SideStream, Turns
from shardmath.symmetric.heap import Buffer, Location
from shardmath.symmetric.team import RESERVED, Team

if TYPE_CHECKING:
    from shardmath.context import Context

__all__ = ["Pushes", "on_all_ranks", "reduction_defines"]

CHANNEL = RESERVED  # of the barriers
_COPY_ENGINE_BYTES = 24 << 20  # to one rank
_PIECE, _STAGES, _AHEAD = 16 << 10, 12, 6
_OWN_BLOCKS = 16  # that copy a rank's own part beside the copy engine
_SLICE_BYTES = 64 << 20  # of scratch memory for each rank's part of a reduction
_FOLD_BLOCKS, _FOLD_THREADS = 528, 256


class Pushes:
    """Pushes of one context's team."""

    def __init__(self, context: Context, team: Team) -> None:
        self.team = team
        self._context = weakref.ref(context)  # it keeps this
        self._turns = Turns(team.device)
        self._side = SideStream(team.device)
        self._inboxes: tuple[int, list[int]] = (0, [])  # bytes, and addresses by rank

    def push_to_all(self, source: int, targets: Sequence[int], nbytes: int, stream: int) -> None:
        """Copy `nbytes` at `source` to an address on each rank; multiples of 16, no barrier."""
        order = self.team.from_next
        words = (source, nbytes, self.team.size, *(targets[peer] for peer in order))
        self._push("spread", struct.pack(f"QQQ{len(order)}Q", *words), nbytes, stream)

    def push_to_each(
        self, sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int], stream: int
    ) -> None:
        """Copy `sizes[r]` bytes at `sources[r]` to `targets[r]`, for every r; no barrier.

        Multiples of 16.
        """
        order = self.team.from_next
        columns = [[values[peer] for peer in order] for values in (sources, targets, sizes)]
        words = [max(sizes), *(word for column in columns for word in column)]
        tail = struct.pack(f"{len(words)}Q", *words)
        self._push("scatter", tail, sum(sizes), stream)

    def move(
        self, sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int], stream: int
    ) -> None:
        """Copy `sizes[r]` bytes at `sources[r]` to `targets[r]`, for every rank r, as they lie.

        With a barrier on either side: before, since the owners may still use the targets; after,
        since they will read them. Collective.
        """
        self.team.require_usable()
        with self._turns.taken(stream):
            self.barrier(stream)
            self._send(sources, targets, sizes, stream)
            self.barrier(stream)

    def all_reduce_into(
        self,
        source: int,
        targets: Sequence[int],
        count: int,
        dtype: DType,
        operation: str,
        stream: int,
    ) -> None:
        """Combine `count` elements of all ranks into `targets`, symmetric memory of each rank.

        This rank's target may be its `source`. Each rank gets everybody's slice, combines it, and
        pushes the result to all. Collective; the first time for a size the processes wait for each
        other. Raises HeapExhausted on all ranks.
        """
        nbytes = count * dtype.itemsize
        if nbytes == 0:
            return
        self.team.require_usable()
        whole = not any(word % UNIT for word in (source, nbytes, *targets))
        chunks = chunked(nbytes, self.team.size, _SLICE_BYTES)
        pitch = -(-chunks[0][0].nbytes // UNIT) * UNIT
        inboxes = self._scratch(pitch * self.team.size)
        rank, own = self.team.rank, inboxes[self.team.rank]
        with self._turns.taken(stream):
            for slices in chunks:
                self._send(
                    [source + part.start for part in slices],
                    [inbox + rank * pitch for inbox in inboxes],
                    [0 if peer == rank else part.nbytes for peer, part in enumerate(slices)],
                    stream,
                )
                self.barrier(stream)  # before reading the inbox, and before writing the targets
                parts = [own + peer * pitch for peer in range(self.team.size)]
                parts[rank] = source + slices[rank].start
                defines = reduction_defines(dtype, operation, whole)
                self._fold(parts, targets, slices[rank], defines, stream)
                self.barrier(stream)  # the targets are complete, the inboxes free

    def barrier(self, stream: int) -> None:
        """Around pushes: before them, the owners may use the targets; after, all is there."""
        self.team.barrier(stream, channel=CHANNEL)

    # -- launching ---------------------------------------------------------------------------------

    def _push(self, function: str, tail: bytes, nbytes: int, stream: int) -> None:
        self.team.check()
        # With all of them, every block would begin each stretch at the same piece of its own.
        processors = max(1, self.team.device.processors * 10 // 11)
        self._launch(function, tail, min(processors, -(-nbytes // _PIECE)), stream)

    def _launch(self, function: str, tail: bytes, blocks: int, stream: int) -> None:
        if blocks:
            defines = (f"PIECE={_PIECE}", f"STAGES={_STAGES}", f"AHEAD={_AHEAD}")
            kernel = self.team.kernel("push", function, defines, shared=_PIECE * _STAGES)
            kernel.launch(stream, blocks, 32, Argument(tail))

    def _send(
        self, sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int], stream: int
    ) -> None:
        """Copy as `push_to_each`, of any alignment, by what is fastest."""
        aligned = not any(word % UNIT for word in (*sources, *targets))
        if aligned and max(sizes) < _COPY_ENGINE_BYTES:
            ends = [size // UNIT * UNIT for size in sizes]
            self.push_to_each(sources, targets, ends, stream)
            for source, target, end, size in zip(sources, targets, ends, sizes, strict=True):
                if end < size:
                    call("cuMemcpyAsync", target + end, source + end, size - end, stream)
            return
        *peers, own = self.team.from_next
        with self._side.beside(stream) as side:
            for peer in peers:
                if sizes[peer]:
                    call("cuMemcpyAsync", targets[peer], sources[peer], sizes[peer], side)
            if sizes[own] and sources[own] != targets[own]:
                self._copy(sources[own], targets[own], sizes[own], stream)

    def _copy(self, source: int, target: int, nbytes: int, stream: int) -> None:
        """A copy within this rank, by a kernel if it can be: that leaves the engine to others."""
        if (source | target | nbytes) % UNIT:
            call("cuMemcpyAsync", target, source, nbytes, stream)
        else:
            tail = struct.pack("QQQQ", source, nbytes, 1, target) + bytes(8 * (self.team.size - 1))
            self._launch("spread", tail, min(_OWN_BLOCKS, -(-nbytes // _PIECE)), stream)

    def _fold(
        self,
        parts: Sequence[int],
        targets: Sequence[int],
        own: Slice,
        defines: tuple[str, ...],
        stream: int,
    ) -> None:
        if not own.nbytes:
            return
        results = [targets[peer] + own.start for peer in self.team.from_next]
        by_engine = results[1:-1] if own.nbytes >= _COPY_ENGINE_BYTES else []
        first = [result for result in results if result not in by_engine]
        words = (*parts, *first, *by_engine, len(first), own.nbytes)
        blocks = min(_FOLD_BLOCKS, -(-own.nbytes // (UNIT * _FOLD_THREADS)))
        kernel = self.team.kernel("reduce", "fold", defines)
        argument = Argument(struct.pack(f"{len(words)}Q", *words))
        kernel.launch(stream, blocks, _FOLD_THREADS, argument)
        if by_engine:
            with self._side.beside(stream) as side:
                for result in by_engine:
                    call("cuMemcpyAsync", result, results[-1], own.nbytes, side)

    def _scratch(self, nbytes: int) -> list[int]:
        """Scratch memory of every rank, by address. Collective where it has to grow."""
        if self._inboxes[0] < nbytes:
            context = self._context()
            assert context is not None, "it is in use"
            self._inboxes = (nbytes, on_all_ranks(context, "collectives: scratch", nbytes))
        return self._inboxes[1]


def on_all_ranks(context: Context, name: str, nbytes: int) -> list[int]:
    """Heap memory on every rank, all ones, kept until the context has ended: its addresses.

    Collective. Raises HeapExhausted on all ranks.
    """
    buffers: list[Buffer] = []

    def describe() -> tuple[int, int]:
        buffers.append(context.heap.allocate(nbytes))
        block = buffers[0].block
        assert context.team is not None, "a context of GPUs"
        context.team.device.fill(block.address, 0xFF, nbytes)
        context.announce(block)
        return block.location.segment, block.location.offset

    found = context.agree(name, describe, lambda found: found)
    context.keep_for_kernels(buffers[0])
    return [
        context.peer_address(rank, Location(*place), nbytes) or 0
        for rank, place in enumerate(found)
    ]


def reduction_defines(dtype: DType, operation: str, whole: bool) -> tuple[str, ...]:
    """What reduce.cu is compiled with."""
    element = "boolean" if dtype.name == "bool" else dtype.name
    return f"ELEMENT={element}", f"OPERATION={operation}", f"WHOLE={whole:d}"
