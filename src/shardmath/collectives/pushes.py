"""Large data pushed straight into its place in symmetric memory, between barriers on a stream.

A kernel pushes to all peers at once (`kernels/push.cu`), or a copy engine to one after the other.
The engine is faster for large parts, and takes 10 us from one copy to the next. It works on one
stream, since two copies to different peers at once halve the rate. Every rank begins with another
peer, so that no two send to the same. Each rank chooses one of them by itself; the peers only see
the barriers.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from shardmath.arrays.dtypes import DType
from shardmath.base.immutable import Immutable
from shardmath.base.integers import up
from shardmath.cuda.driver import call
from shardmath.cuda.kernel import Argument
from shardmath.cuda.stream import SideStream, StreamOrder
from shardmath.handles.allocation import allocate_on_all_ranks
from shardmath.symmetric.heap import Buffer
from shardmath.symmetric.team import RESERVED, Team

if TYPE_CHECKING:
    from shardmath.context.context import Context

UNIT = 16  # bytes: a whole number of elements of every dtype
CHANNEL = RESERVED  # of the barriers
_ENGINE_SLICE_BYTES = 48 << 20  # from here on a copy engine moves the slices of a reduction
_SLICE_BYTES = 64 << 20  # of scratch memory for each rank's part of a reduction
_THREADS, _BLOCKS_EACH = 256, 4  # blocks on a multiprocessor
_OWN_BLOCKS = 64  # that copy a rank's own part beside the copy engine


class Slice(Immutable):
    """The bytes of a chunk that one rank combines."""

    start: int
    nbytes: int


class Pushes:
    """Pushes of one context's team."""

    def __init__(self, context: Context, team: Team) -> None:
        self.team = team
        self._context = weakref.ref(context)  # it keeps this
        self._order = StreamOrder(team.device)
        self._side = SideStream(team.device)
        # By purpose: bytes, and addresses by rank.
        self._memory: dict[str, tuple[int, list[int]]] = {}

    def push_to_all(self, source: int, targets: Sequence[int], nbytes: int, stream: int) -> None:
        """Copy `nbytes` at `source` to an address on each rank; all multiples of 16. No barrier."""
        size = self.team.size
        self.push_to_each([source] * size, targets, [nbytes] * size, stream)

    def push_to_each(
        self,
        sources: Sequence[int],
        targets: Sequence[int],
        sizes: Sequence[int],
        stream: int,
        *,
        blocks: int = 0,
    ) -> None:
        """Copy `sizes[r]` bytes at `sources[r]` to `targets[r]`, for every r. No barrier.

        All are multiples of 16. The kernel has at most so many `blocks`; 0 stands for as many as
        the device holds.
        """
        self.team.check()
        order, most = self.team.ring_order, max(sizes)
        if most:
            columns = [[values[peer] for peer in order] for values in (sources, targets, sizes)]
            words = [most, *(word for column in columns for word in column)]
            argument = Argument(struct.pack(f"{len(words)}Q", *words))
            kernel = self.team.kernel("push", "push")
            kernel.launch(stream, self._blocks(most, blocks), _THREADS, argument)

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
        aligned = not any(word % UNIT for word in (source, nbytes, *targets))
        chunks = chunked(nbytes, self.team.size, _SLICE_BYTES)
        pitch = up(chunks[0][0].nbytes, UNIT)
        inboxes = self._scratch("parts", pitch * self.team.size)
        rank, own = self.team.rank, inboxes[self.team.rank]
        with self._order.section(stream):
            for slices in chunks:
                self._send(
                    [source + part.start for part in slices],
                    [inbox + rank * pitch for inbox in inboxes],
                    [0 if peer == rank else part.nbytes for peer, part in enumerate(slices)],
                    stream,
                    by_engine=slices[0].nbytes >= _ENGINE_SLICE_BYTES,
                )
                self.barrier(stream)  # before reading the inbox, and before writing the targets
                parts = [own + peer * pitch for peer in range(self.team.size)]
                parts[rank] = source + slices[rank].start
                defines = reduction_defines(dtype, operation, aligned)
                self._reduce_and_push(parts, targets, slices[rank], defines, stream)
                self.barrier(stream)  # the targets are complete, the inboxes free

    def barrier(self, stream: int) -> None:
        """A barrier: before pushes owners may use the targets, after them all is there."""
        self.team.barrier(stream, channel=CHANNEL)

    # -- launching ---------------------------------------------------------------------------------

    def _blocks(self, nbytes: int, most: int = 0) -> int:
        """Enough blocks for every thread to have 16 bytes, and no more than run at once."""
        most = most or self.team.device.processors * _BLOCKS_EACH
        return min(most, -(-nbytes // (UNIT * _THREADS)))

    def _send(
        self,
        sources: Sequence[int],
        targets: Sequence[int],
        sizes: Sequence[int],
        stream: int,
        *,
        by_engine: bool,
    ) -> None:
        """As `push_to_each`, of any alignment; `by_engine` if a copy engine is faster."""
        aligned = not any(word % UNIT for word in (*sources, *targets))
        if aligned and not by_engine:
            ends = [size // UNIT * UNIT for size in sizes]
            self.push_to_each(sources, targets, ends, stream)
            for source, target, end, size in zip(sources, targets, ends, sizes, strict=True):
                if end < size:
                    call("cuMemcpyAsync", target + end, source + end, size - end, stream)
            return
        *peers, own = self.team.ring_order
        with self._side.forked(stream) as side:
            for peer in peers:
                if sizes[peer]:
                    call("cuMemcpyAsync", targets[peer], sources[peer], sizes[peer], side)
            if sizes[own] and sources[own] != targets[own]:
                self._copy(sources[own], targets[own], sizes[own], stream)

    def _copy(self, source: int, target: int, nbytes: int, stream: int) -> None:
        """A copy within this rank, by a kernel if possible: the engine is left to other copies."""
        if (source | target | nbytes) % UNIT:
            call("cuMemcpyAsync", target, source, nbytes, stream)
        else:
            sizes = [nbytes if rank == self.team.rank else 0 for rank in range(self.team.size)]
            sources, targets = [source] * len(sizes), [target] * len(sizes)
            self.push_to_each(sources, targets, sizes, stream, blocks=_OWN_BLOCKS)

    def _reduce_and_push(
        self,
        parts: Sequence[int],
        targets: Sequence[int],
        own: Slice,
        defines: tuple[str, ...],
        stream: int,
    ) -> None:
        if not own.nbytes:
            return
        results = [targets[peer] + own.start for peer in self.team.ring_order]
        by_engine = results[1:-1] if own.nbytes >= _ENGINE_SLICE_BYTES else []
        first = [result for result in results if result not in by_engine]
        words = (*parts, *first, *by_engine, len(first), own.nbytes)
        kernel = self.team.kernel("reduce", "reduce_and_push", defines)
        argument = Argument(struct.pack(f"{len(words)}Q", *words))
        kernel.launch(stream, self._blocks(own.nbytes), _THREADS, argument)
        if by_engine:
            with self._side.forked(stream) as side:
                for result in by_engine:
                    call("cuMemcpyAsync", result, results[-1], own.nbytes, side)

    def _scratch(self, purpose: str, nbytes: int) -> list[int]:
        """Scratch memory of every rank, by address. Collective where it has to grow."""
        have, addresses = self._memory.get(purpose, (0, []))
        if have < nbytes:
            context = self._context()
            assert context is not None, "it is in use"
            addresses = kernel_memory(context, f"collectives: {purpose}", nbytes)
            self._memory[purpose] = nbytes, addresses
        return addresses


def chunked(nbytes: int, size: int, most: int) -> list[tuple[Slice, ...]]:
    """Cut `nbytes` into even chunks, and each into slices by rank, of at most `most` bytes.

    Slices start at multiples of 16. The last ones are shorter, and may be empty.
    """
    assert most % UNIT == 0, most
    count = -(-nbytes // (size * most))
    width = -(-nbytes // (count * size * UNIT)) * UNIT
    cuts = [min(rank * width, nbytes) for rank in range(count * size + 1)]
    slices = [Slice(start, end - start) for start, end in pairwise(cuts)]
    return [tuple(slices[first : first + size]) for first in range(0, count * size, size)]


def kernel_memory(context: Context, operation: str, nbytes: int) -> list[int]:
    """The addresses of heap memory on every rank, all bits set, kept until the context has ended.

    Collective. Raises HeapExhausted on all ranks.
    """

    def allocate() -> tuple[Buffer, None]:
        buffer = context.heap.allocate(nbytes)
        context.gpu_team.device.fill(buffer.block.address, 0xFF, nbytes)
        return buffer, None

    memory = allocate_on_all_ranks(context, operation, allocate)
    context.keep_for_kernels(memory.buffer)
    return memory.addresses(context)


def reduction_defines(dtype: DType, operation: str, aligned: bool) -> tuple[str, ...]:
    """The macros with which reduce.cu is compiled."""
    element = dtype.kernels or dtype.name
    return f"ELEMENT={element}", f"OPERATION={operation}", f"ALIGNED={aligned:d}"
