"""Collectives on memory of GPUs of several hosts: pack, synchronise, fetch, synchronise.

All of it happens on a stream. Each rank copies what peers read to its outbox on the heap, and the
ranks synchronise. Then each fetches its part of every outbox, and combines in rank order, so that
the result has the same bits as on one host. The ranks synchronise again before an outbox is written
anew. No process waits. Networks only reach the heap: what is fetched to other memory passes through
staging memory of a fixed size.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardmath.arrays.dtypes import DType
from shardmath.base.integers import up
from shardmath.collectives.operand import bounds
from shardmath.cuda.driver import call
from shardmath.cuda.kernel import Argument
from shardmath.cuda.stream import StreamOrder
from shardmath.geometry import Spans
from shardmath.handles.allocation import allocate_on_all_ranks
from shardmath.symmetric.heap import Buffer, Location
from shardmath.symmetric.team import RESERVED
from shardmath.transport.base import DeviceBytes

if TYPE_CHECKING:
    from shardmath.context.context import Context

_THREADS = 256
_ALIGNED = 256
_STAGING_BYTES = 32 << 20
_GRANULE = 1 << 20  # of an outbox


class FarCollectives:
    """The verbs of DeviceCollectives for ranks on several hosts. All are collective.

    Addresses are of this rank's own memory, ordinary or symmetric. Made by `of`.
    """

    def __init__(self, context: Context) -> None:
        team = context.gpu_team
        self._context = weakref.ref(context)  # it keeps this
        self.team = team
        self._order = StreamOrder(team.device)
        self._outbox: Buffer | None = None
        self._staging: Buffer | None = None
        self._outboxes: Sequence[Location] = ()  # of the ranks' outboxes
        self._capacity = 0  # of each, in bytes
        self._kept: list[Buffer] = []  # buffers to which CUDA graphs refer

    @classmethod
    def of(cls, context: Context) -> FarCollectives:
        """The context's collectives, made at the first call."""
        return context.cache("far collectives", lambda: cls(context))

    def reduction_pushes(self, nbytes: int, dtype: DType) -> None:
        """See DeviceCollectives. Nothing is pushed: peers on other hosts have no address."""

    # -- moving ------------------------------------------------------------------------------------

    # Ranks of several hosts meet before each call: its `tag` is not compared again.

    def move(
        self,
        source: int,
        target: int,
        table: Sequence[Sequence[int]],
        width: int,
        stream: int,
        *,
        whole: bool = False,
        tag: int = 0,
    ) -> None:
        """See DeviceCollectives."""
        own = self.team.rank
        sizes = [width * row[own] for row in table]
        starts = bounds(sizes)[:-1]
        offsets = [0 if whole else width * sum(row[:own]) for row in table]  # in the outboxes
        packed = [width * (max(row) if whole else sum(row)) for row in table]
        if max(packed) == 0:
            return
        with self._packed(source, packed[own], max(packed), stream):
            for rank in self.team.ring_order:
                here, lies = target + starts[rank], source + offsets[rank]
                self._fetch(rank, offsets[rank], here, sizes[rank], lies, stream)

    # -- combining ---------------------------------------------------------------------------------

    def reduce_scatter(
        self,
        source: int,
        target: int,
        counts: Sequence[int],
        dtype: DType,
        operation: str,
        stream: int,
        *,
        tag: int = 0,
    ) -> None:
        """Combine all ranks' `sum(counts)` elements; rank r's `target` gets `counts[r]` of them."""
        item, rank = dtype.itemsize, self.team.rank
        nbytes, start = sum(counts) * item, sum(counts[:rank]) * item
        if nbytes == 0:
            return
        with self._packed(source, nbytes, nbytes, stream):
            self._reduce(source, start, target, counts[rank], dtype, operation, stream)

    def all_reduce(
        self,
        source: int,
        target: int,
        count: int,
        dtype: DType,
        operation: str,
        stream: int,
        *,
        tag: int = 0,
    ) -> None:
        """Combine `count` elements of all ranks into `target`, which may be `source`."""
        size, rank, item = self.team.size, self.team.rank, dtype.itemsize
        if count == 0:
            return
        counts = [Spans.even(count, size, peer).length for peer in range(size)]
        sizes = [length * item for length in counts]
        starts = bounds(sizes)[:-1]
        sums = up(count * item, _ALIGNED)  # where an outbox has its sums
        with self._packed(source, count * item, sums + max(sizes), stream):
            assert self._outbox is not None, "shown"
            own_sums = self._outbox.block.address + sums
            self._reduce(source, starts[rank], own_sums, counts[rank], dtype, operation, stream)
            # After writing what a peer will read; and all have read what is in `source`.
            self._barrier(stream)
            for peer in self.team.ring_order:
                self._fetch(peer, sums, target + starts[peer], sizes[peer], own_sums, stream)

    def _reduce(
        self,
        source: int,
        start: int,
        target: int,
        count: int,
        dtype: DType,
        operation: str,
        stream: int,
    ) -> None:
        """Fetch all ranks' bytes from `start` on, and combine `count` elements into `target`: as
        many at a time as the staging memory holds.
        """
        assert self._staging is not None, "shown"
        item, staging = dtype.itemsize, self._staging.block.address
        stride = _STAGING_BYTES // self.team.size // _ALIGNED * _ALIGNED
        most = stride // item
        element = dtype.kernels or dtype.name
        defines = (f"ELEMENT={element}", f"OPERATION={operation}")
        for first in range(0, count, most):
            some = min(most, count - first)
            offset = start + first * item
            for rank in self.team.ring_order:
                here = staging + rank * stride
                self._fetch(rank, offset, here, some * item, source + offset, stream)
            blocks = min(8 * self.team.device.processors, -(-some // _THREADS))
            argument = Argument(struct.pack("QQQQ", staging, stride, target + first * item, some))
            self.team.kernel("reduce_local", "reduce_local", defines).launch(
                stream, blocks, _THREADS, argument
            )

    # -- packing and fetching ----------------------------------------------------------------------

    @contextmanager
    def _packed(self, source: int, nbytes: int, most: int, stream: int) -> Iterator[None]:
        """Surround the reading of outboxes, after all ranks have packed what is at their `source`.

        An outbox needs `most` bytes on every rank. Raises HeapExhausted on all ranks if one lacks
        the memory, RankFailure after a call that was given up.
        """
        self.team.require_usable()
        if most > self._capacity:
            self._grow(up(most, _GRANULE))
        assert self._outbox is not None, "made together"
        with self._order.section(stream):
            self._copy(self._outbox.block.address, source, nbytes, stream)
            # After writing what a peer will read, and before reading what a peer wrote.
            self._barrier(stream)
            yield
            self._barrier(stream)  # before reusing what a peer may still read: the outbox

    def _grow(self, nbytes: int) -> None:
        """Make all ranks' outboxes that large. Collective."""
        context = self._opened()

        def allocate() -> tuple[Buffer, None]:
            if self._staging is None:
                self._staging = context.heap.allocate(_STAGING_BYTES)
            return context.heap.allocate(nbytes), None

        if self._outbox is not None:
            if self._order.captured:
                self._kept.append(self._outbox)
            self._order.wait()  # its memory may be given to another array
        self._capacity, self._outbox = 0, None
        memory = allocate_on_all_ranks(context, "collectives, outbox", allocate)
        self._outbox, self._outboxes, self._capacity = memory.buffer, memory.locations, nbytes

    def _fetch(
        self, rank: int, offset: int, target: int, nbytes: int, own: int, stream: int
    ) -> None:
        """Bring bytes to `target`: from `offset` of a rank's outbox, this rank's from `own`."""
        if rank == self.team.rank:
            self._copy(target, own, nbytes, stream)
            return
        assert self._staging is not None, "shown"
        context, where, staging = self._opened(), self._outboxes[rank], self._staging.block.address
        direct = (
            staging <= target < staging + _STAGING_BYTES or context.heap.find(target) is not None
        )
        step = nbytes if direct else _STAGING_BYTES
        for start in range(0, nbytes, max(step, 1)):
            some = min(step, nbytes - start)
            here = target + start if direct else staging
            into = DeviceBytes(here, some, self.team.device.name)
            context.get(rank, where.behind(offset + start), into, stream)
            self._copy(target + start, here, some, stream)

    def _opened(self) -> Context:
        context = self._context()
        assert context is not None, "it makes the call"
        return context

    def _copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        if nbytes and target != source:
            self.team.device.activate()
            call("cuMemcpyAsync", target, source, nbytes, stream)

    def _barrier(self, stream: int) -> None:
        self.team.barrier(stream, channel=RESERVED)
