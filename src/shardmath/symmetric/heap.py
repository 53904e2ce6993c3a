"""The symmetric heap: this rank's segments, and the blocks that arrays live in.

Allocation is local: offsets may differ by rank, and ranks tell each other where a block lies when
they use it together. Freeing is local, too. A block that peers know of is reused only after every
rank of each of its groups has marked it, and an exchange has carried the marks: a late reader never
sees memory that has been given to another array. The garbage collector only appends to a list. A
block that this rank has dropped or freed is *retired* until it can be reused.

Streams. Kernels on any stream of a rank may still read memory that the rank has dropped. So a
dropped block is retired behind a fence, set on all streams of the device once the drop has been
seen: until the fence has passed, the rank neither reuses the block nor marks it for its peers.
Where a fence is expensive, small blocks share one. There, blocks of one size take turns: the block
that was dropped first is reused where it lies, while a few that were dropped later wait. If the
device is behind, a small array takes new memory rather than wait, up to a limit for each size;
large ones take turns in a few places.

Timeouts. After an operation on GPUs was given up, memory that its peers know of is reused only when
their group has ended: see `groups`.

Interrupts. An exception can leave any of these methods midway. `_blocks` alone says which memory is
taken, and changes in one step; the next call rebuilds everything else from it.
"""

from __future__ import annotations

import threading
import time
import weakref
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from shardmath.arrays.base import described_bytes
from shardmath.base.immutable import Immutable
from shardmath.base.integers import up
from shardmath.errors import HeapExhausted
from shardmath.symmetric.groups import Groups
from shardmath.symmetric.ranges import ALIGNMENT, GRANULE, FreeRanges, OwnSegment
from shardmath.transport.base import Fence, Transport

_SMALL = 32 << 20  # bytes of a block that need not be reused at once
_TOGETHER = 64 << 20  # bytes of small blocks, at least two, that may share one fence
_AT_ONCE = 8  # dropped blocks among which `_last_dropped` looks
_IN_TURN = 4  # large blocks of one size that may wait for the device before the host does
_MOST_IN_TURN = 64  # the same of small blocks
_SIZES = 64  # sizes of blocks that take turns
_MOST_WAITING = 256 << 20  # bytes of one size that may wait for the device before the host does
_AHEAD = 1e-3  # seconds that the host then waits for fences
_FENCE_WAIT = 0.05  # seconds that an allocation waits for fences before the heap grows
_LAST_FENCE_WAIT = 2.0  # the same where it cannot grow
_PAUSE = 2e-5


class Location(Immutable):
    """Where a block lies in its owner's memory."""

    segment: int
    offset: int

    def behind(self, nbytes: int) -> Location:
        """The place `nbytes` further on."""
        return Location(self.segment, self.offset + nbytes)


class Block:
    """`nbytes` of the heap.

    `shared` are the marks, (group, number), that every rank of the group must set before the block
    is reused; `announced_to` are the groups that know where it lies. `freed`: the user has freed
    it. `unused`: no array of this rank refers to it. `fence` is behind what the device was doing
    when either was seen. `buffer()` is the Buffer, as long as there is one; `handles` are weak
    references to the handles through which this rank reaches the peers' blocks.
    """

    __slots__ = (
        "__weakref__",
        "address",
        "announced_to",
        "buffer",
        "description",
        "fence",
        "freed",
        "handles",
        "location",
        "nbytes",
        "reserved",
        "shared",
        "unused",
    )

    def __init__(self, location: Location, nbytes: int, reserved: int, address: int) -> None:
        self.location = location
        self.nbytes = nbytes
        self.reserved = reserved
        self.address = address
        self.freed = False
        self.unused = False
        self.fence: Fence | None = None
        self.shared: set[tuple[int, int]] = set()
        self.announced_to: set[int] = set()
        self.buffer: Callable[[], Buffer | None] = _nothing
        self.handles: list[weakref.ref[Any]] = []
        self.description = described_bytes(address, nbytes)

    @property
    def released(self) -> bool:
        """Whether this rank will use neither the block nor its peers' blocks again."""
        return self.unused or (self.freed and not any(handle() for handle in self.handles))

    @property
    def idle(self) -> bool:
        """Whether the device is done with a block that was dropped or freed."""
        return self.fence is not None and self.fence.passed()

    def __repr__(self) -> str:
        return f"Block({self.nbytes} bytes at {self.location.segment}:{self.location.offset})"


def _nothing() -> None:
    return None


def _await(block: Block, give_up: float) -> bool:
    """Wait until the fence of a block has passed: True; or, at the time `give_up`, False."""
    while not block.idle:
        if time.monotonic() > give_up:
            return False
        time.sleep(_PAUSE)
    return True


class Buffer:
    """The object that arrays on a block keep alive. The block is dropped when it goes.

    Array libraries take its bytes by the protocol of the transport: `__array_interface__` on hosts,
    `__cuda_array_interface__` on GPUs. `rendezvous_states` are the results of rendezvous of arrays
    on the block; `group` is the name of the group that it was allocated for, if any.
    """

    __slots__ = (
        *("__weakref__", "_dropped", "_lease", "_protocol"),
        *("block", "group", "rendezvous_states"),
    )

    def __init__(
        self, block: Block, lease: object, protocol: tuple[str, str], dropped: deque[Block]
    ) -> None:
        """`protocol` is (interface, device). The block is appended to `dropped` at the end."""
        self.block = block
        self._dropped = dropped
        self._lease = lease  # keeps the mapping
        self._protocol = protocol
        self.rendezvous_states: dict[Any, Any] = {}
        self.group: str | None = None

    def __del__(self) -> None:
        try:  # noqa: SIM105 - suppress() would be slower, and each call drops buffers
            self._dropped.append(self.block)
        except AttributeError:  # `__init__` was interrupted: `restore_order` finds the block
            pass

    @property
    def device(self) -> str:
        """Where the block lies: "cpu", or like "cuda:0"."""
        return self._protocol[1]

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._described("__array_interface__")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._described("__cuda_array_interface__")

    def _described(self, interface: str) -> dict[str, Any]:
        if interface != self._protocol[0]:
            raise AttributeError(f"these bytes are taken by {self._protocol[0]}")
        return self.block.description


class Heap:
    """This rank's symmetric memory, which peers reach by `transport`."""

    def __init__(self, transport: Transport, *, rank: int, segment_bytes: int) -> None:
        self.transport = transport
        self.rank = rank
        self.groups = Groups()
        self._segment_bytes = segment_bytes
        self._segments: dict[int, OwnSegment] = {}  # by the transport's index
        self._blocks: dict[int, Block] = {}  # by address
        self._addresses: list[int] = []  # the same addresses, sorted
        self.changing = False  # while a method changes the books, and after an exception left one
        self.version = 0  # rises before blocks are reused or freed, and before segments are added
        self._change = _Change(self)
        self._dropped: deque[Block] = deque()
        self._retired: dict[Block, None] = {}  # in order of arrival
        self.freed: set[Block] = set()  # blocks that were freed while arrays still refer to them
        self._full_at = 0  # number of retired blocks at which small ones are reused next
        self._turns: dict[int, deque[Block]] = {}  # retired blocks by bytes, and some reused
        self._fresh: list[Block] = []  # retired blocks that have no fence yet
        self._late: Fence | None = None  # a fence that had not passed when last asked
        self._passed: object = object()  # the last fence that was found to have passed
        self._protocol = transport.interface, transport.device
        self._lock = threading.RLock()

    @property
    def segments(self) -> dict[int, tuple[int, int]]:
        """The address and the bytes of each segment, by its number."""
        return {index: (one.address, one.nbytes) for index, one in self._segments.items()}

    @property
    def used(self) -> int:
        """Bytes in blocks, retired ones included."""
        with self._lock:
            self.recycle()
            return sum(one.nbytes - one.ranges.free for one in self._segments.values())

    def allocate(self, nbytes: int) -> Buffer:
        """A buffer of `nbytes`, of which a multiple of ALIGNMENT is reserved. Local.

        Raises HeapExhausted, and leaves the heap as it was, when memory does not suffice.
        """
        with self._lock:
            if self.changing:
                self.restore_order()
            self.changing = True  # until the block has a buffer
            many = self.transport.drops_at_once
            block = self._next_in_turn(nbytes, many) if many else self._last_dropped(nbytes)
            buffer = None if block is None else self._buffer(block)
            self.changing = False
            return buffer or self._allocate(nbytes, up(max(nbytes, 1), ALIGNMENT))

    def _allocate(self, nbytes: int, reserved: int) -> Buffer:
        with self._change:
            if self.transport.drops_at_once == 0:
                self._recycle()
            elif reserved > _SMALL:
                self._collect()
                self._reclaim(_SMALL)
            else:
                self._reuse_small_blocks(self.transport.drops_at_once)
            location = self._take(reserved)
            if location is None:
                self._recycle()
                location = self._take(reserved)
                if location is None and not self._may_run_ahead(reserved):
                    location = self._take_after_fences(reserved)
            grown = location is None
            if location is None:
                self._grow(reserved)
                location = self._take(reserved)
                assert location is not None, "a new segment holds what it was made for"
            segment = self._segments[location.segment]
            try:
                self._commit(location, reserved)
            except HeapExhausted:
                segment.ranges.give(location.offset, reserved)
                if grown:
                    del self._segments[location.segment]
                    self.transport.release()
                raise
            block = Block(location, nbytes, reserved, segment.address + location.offset)
            self._blocks[block.address] = block
            insort(self._addresses, block.address)
            return self._buffer(block)

    def _buffer(self, block: Block) -> Buffer:
        lease = self._segments[block.location.segment].lease
        buffer = Buffer(block, lease, self._protocol, self._dropped)
        block.buffer = weakref.ref(buffer)
        return buffer

    def _last_dropped(self, nbytes: int) -> Block | None:
        """A block of `nbytes` among the last that were dropped, to be reused as it is, or None.

        The books do not change, so what calls have found out about an array there still holds. For
        hosts, where no kernel may still use what was dropped.
        """
        dropped = self._dropped
        if len(dropped) > _AT_ONCE:
            return None
        for place in range(len(dropped)):  # it may grow at its end meanwhile
            block = dropped[place]
            if block.nbytes == nbytes and not (block.shared or block.freed or block.handles):
                break
        else:
            return None
        if self._blocks.get(block.address) is not block or block.unused:
            return None
        fence = self.transport.fence()
        if fence is None or not fence.passed():
            return None
        del dropped[place]
        return block

    def _next_in_turn(self, nbytes: int, many: int) -> Block | None:
        """The block of this size whose turn it is, or None; for GPUs, which may still use it."""
        small = nbytes <= _SMALL
        if many * nbytes >= _TOGETHER:
            many = max(_TOGETHER // (nbytes + 1), 2)
        collects = len(self._dropped) >= (many if small else 1)
        if collects:
            self._collect()
        turn, waiting = self._turns.get(nbytes), many if small else _IN_TURN
        while turn is not None and len(turn) > waiting:
            # Large ones stay in a few places, equal on all ranks: each takes another graph.
            place = 0 if small else -waiting - 1
            block = turn[place]
            if block in self._retired and not (block.shared or block.handles):
                if block.fence is not self._passed:
                    if not self._is_due(block, len(turn), collects):
                        return None
                    self._passed = block.fence
                del turn[place]
                if not self.groups.may_write(block.announced_to):
                    del self._retired[block]
                    block.unused, block.fence = False, None
                    return block
            else:
                del turn[place]
        return None

    def _is_due(self, block: Block, waiting: int, ask: bool) -> bool:
        """Whether the device is done with a block.

        The host waits a little for a large one, and where many small ones are `waiting`. Where few
        are, the device is not asked each time, but when `ask` is set.
        """
        if block.reserved > _SMALL:
            return _await(block, time.monotonic() + _FENCE_WAIT)
        most = max(_MOST_WAITING, self.transport.runs_ahead_by)
        if waiting > _MOST_IN_TURN or waiting * block.reserved > most:
            return _await(block, time.monotonic() + _AHEAD)
        if block.fence is self._late and not ask:
            return False
        if block.idle:
            return True
        self._late = block.fence
        return False

    def find(self, address: int) -> Block | None:
        """The block that holds `address`, freed or not, or None for ordinary memory."""
        with self._lock:
            if self.changing:
                self.restore_order()
            place = bisect_right(self._addresses, address) - 1
            if place < 0:
                return None
            block = self._blocks[self._addresses[place]]
            return block if address < block.address + block.reserved else None

    def free(self, block: Block) -> None:
        """Free `block` for the user: its memory is given back once no peer can read it."""
        with self._lock, self._change:
            self.version += 1
            block.freed = True
            self.freed.add(block)
            block.fence = None
            self._retired[block] = None
            self._fresh.append(block)
            self._recycle()

    def restore(self, block: Block) -> None:
        """Take back a `free` of a block whose buffer is still held. Raises HeapExhausted."""
        with self._lock, self._change:
            self._commit(block.location, block.reserved)
            self.version += 1
            block.freed = False
            self.freed.discard(block)
            self._retired.pop(block, None)

    # -- marks: which blocks the ranks of a group no longer use -----------------------------------

    def share(self, block: Block, group: int, number: int) -> None:
        """Let `block` be reused only after every rank of `group` has marked `number`."""
        with self._lock:
            block.shared.add((group, number))

    def marks(self, group: int) -> list[int]:
        """The numbers of this rank's blocks of `group` that it no longer uses."""
        with self._lock, self._change:
            self._collect()
            released = [block for block in self._retired if block.released and block.idle]
            return [n for block in released for g, n in block.shared if g == group]

    def apply_marks(self, group: int, marks: Iterable[Iterable[int]]) -> None:
        """Remove the marks that every rank of `group` has set, given all ranks' `marks`."""
        common = set.intersection(*(set(numbers) for numbers in marks))
        set_by_all = {(group, number) for number in common}
        with self._lock, self._change:
            for block in self._retired:
                block.shared -= set_by_all
            self._recycle()

    def recycle(self) -> None:
        """Give back the memory of all retired blocks that nobody needs any more."""
        with self._lock, self._change:
            self._recycle()

    def _recycle(self) -> None:
        self._collect()
        self._reclaim()

    def _reclaim(self, larger_than: int = 0) -> None:
        """`recycle` of blocks with more bytes than `larger_than`, whose fences have passed."""
        waiting: dict[Block, None] = {}
        busy = False  # a fence has not passed: later ones have not either
        for block in self._retired:
            kept = block.shared or block.reserved <= larger_than
            busy = busy or not (kept or block.idle)
            if kept or busy or self.groups.may_write(block.announced_to):
                waiting[block] = None
            elif block.unused:
                self._reuse(block)
            elif block.freed:
                self._decommit(block)  # addresses stay until the last array is gone
        self._retired = waiting

    def _collect(self) -> None:
        """Retire dropped blocks behind a fence, and forget the groups that have ended."""
        ended = self.groups.ended()
        if ended:
            for block in self._blocks.values():
                block.shared = {mark for mark in block.shared if mark[0] not in ended}
            self.groups.forget(ended)  # it drops the memory that was kept for them
        while self._dropped:
            block = self._dropped.popleft()
            if self._blocks.get(block.address) is not block:
                continue  # `restore_order` has found it already
            block.unused = True
            block.fence = None
            self._retired[block] = None
            self._fresh.append(block)
        fence = self.transport.fence() if self._fresh else None
        if fence is None:
            return
        for block in self._fresh:
            block.fence = fence
        if self.transport.drops_at_once:
            if len(self._turns) > _SIZES:
                self._turns.clear()
            for block in self._fresh:
                if block.unused and not block.freed:
                    self._turns.setdefault(block.nbytes, deque()).append(block)
        self._fresh = []

    def _reuse(self, block: Block) -> None:
        """Give the memory of a block to other arrays."""
        self.version += 1
        self.freed.discard(block)
        del self._blocks[block.address]
        del self._addresses[bisect_left(self._addresses, block.address)]
        self._segments[block.location.segment].ranges.give(block.location.offset, block.reserved)

    # -- interrupts --------------------------------------------------------------------------------

    def restore_order(self) -> None:
        """Rebuild the books from `_blocks`."""
        self.version += 1
        blocks = dict(sorted(self._blocks.items()))
        self._addresses = list(blocks)
        for index, segment in self._segments.items():
            segment.ranges = FreeRanges(segment.nbytes)
            for block in blocks.values():
                if block.location.segment == index:
                    segment.ranges.reserve(block.location.offset, block.reserved)
        retired = {block: None for block in self._retired if block.address in blocks}
        dropped = set(self._dropped)
        for block in blocks.values():
            if block.buffer() is None and block not in retired and block not in dropped:
                block.unused, block.fence = True, None  # nobody got it, or has it any more
                retired[block] = None
        self._retired = retired
        self._fresh = [block for block in retired if block.fence is None]
        self._turns.clear()
        self.changing = False

    # -- segments ----------------------------------------------------------------------------------

    def _take(self, reserved: int) -> Location | None:
        for index, segment in self._segments.items():
            offset = segment.ranges.take(reserved)
            if offset is not None:
                return Location(index, offset)
        return None

    def _reuse_small_blocks(self, many: int) -> None:
        """Let dropped small blocks share fences, and reuse all but the last `many`."""
        if len(self._dropped) >= many:
            self._collect()
        if len(self._retired) < self._full_at:
            return
        reusable = [b for b in self._retired if b.unused and b.fence and not b.shared]
        for block in [b for b in reusable if b.reserved <= _SMALL][:-many]:
            if self.groups.may_write(block.announced_to):
                continue
            if not block.idle:
                break
            del self._retired[block]
            self._reuse(block)
        self._full_at = max(2 * many, len(self._retired) + many)

    def _may_run_ahead(self, reserved: int) -> bool:
        """Whether the heap grows by `reserved` rather than wait for the device."""
        waiting = sum(block.reserved for block in self._retired if block.unused)
        return self.transport.grows and waiting + reserved <= self.transport.runs_ahead_by

    def _take_after_fences(self, reserved: int) -> Location | None:
        """Wait briefly for fences: kernels ahead of one may wait for this rank's next call."""
        wait = _FENCE_WAIT if self.transport.grows or not self._segments else _LAST_FENCE_WAIT
        give_up = time.monotonic() + wait
        for block in [b for b in self._retired if b.unused and not b.shared and b.fence]:
            if not _await(block, give_up):
                return None
            self._recycle()
            location = self._take(reserved)
            if location is not None:
                return location
        return None

    def _grow(self, reserved: int) -> None:
        """Add a segment as large as all before it together, so that there are never many."""
        if self._segments and not self.transport.grows:
            raise self._full(reserved)
        self.version += 1
        total = sum(segment.nbytes for segment in self._segments.values())
        wanted = min(max(self._segment_bytes, total), reserved + self.transport.spare_bytes)
        wanted = up(max(reserved, wanted), GRANULE)
        try:
            made = self.transport.reserve(wanted)
        except HeapExhausted:
            made = self.transport.reserve(up(reserved, GRANULE))
        address = self.transport.address(self.rank, made.index, 0, made.nbytes)
        assert address is not None, "a rank has an address for its own memory"
        lease = self.transport.lease(made.index)
        self._segments[made.index] = OwnSegment(address, made.nbytes, lease)

    def _full(self, reserved: int) -> HeapExhausted:
        """The error where no segment has room and the heap cannot grow."""
        segments = self._segments.values()
        total = sum(segment.nbytes for segment in segments)
        free = sum(segment.ranges.free for segment in segments)
        longest = max(segment.ranges.longest for segment in segments)
        more = up(reserved - longest, GRANULE)
        return HeapExhausted(
            f"rank {self.rank}: symmetric memory needs {reserved:,} bytes in one piece, and of its "
            f"{total:,} bytes {free:,} are free, {longest:,} in one piece; between hosts it cannot "
            f"grow: start all ranks with SHARDMATH_GPU_HEAP_BYTES larger by {more}, or free arrays",
            need=reserved,
            have=longest,
        )

    def _commit(self, location: Location, reserved: int) -> None:
        segment = self._segments[location.segment]
        for offset, size in segment.uncommitted(location.offset, reserved):
            self.transport.commit(location.segment, offset, size)
            segment.note(offset, size, committed=True)

    def _decommit(self, block: Block) -> None:
        """Give back the memory of granules that lie wholly inside a block."""
        location = block.location
        first = up(location.offset, GRANULE)
        last = (location.offset + block.reserved) // GRANULE * GRANULE
        if first < last:
            self.transport.decommit(location.segment, first, last - first)
            self._segments[location.segment].note(first, last - first, committed=False)


class _Change:
    """A `with` for changes of a heap's books, by one thread at a time; not nested."""

    __slots__ = ("_heap",)

    def __init__(self, heap: Heap) -> None:
        self._heap = weakref.proxy(heap)

    def __enter__(self) -> None:
        if self._heap.changing:
            self._heap.restore_order()
        self._heap.changing = True

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # after an exception the next change restores order
            self._heap.changing = False
