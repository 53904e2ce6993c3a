"""The handle that `rendezvous` returns: the memory of all ranks, and signals between them.

A handle keeps this rank's array alive, and every view made by it keeps the handle alive. A rank
marks a block as dropped only when array, handle and views are all gone there, so no view ever shows
memory that its owner has given to another array.

Signals are words and slots of the ranks' pads: see rendezvous_state.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any, NoReturn

import numpy as np

from shardmath.arrays import DType, Library, dtypes, library_of, raw_view
from shardmath.arrays.spec import packed_strides
from shardmath.base.collective_call import collective_call
from shardmath.base.integers import index
from shardmath.base.untraced import untraced_methods
from shardmath.context.context import Context
from shardmath.errors import UseAfterFree
from shardmath.handles.allocation import Owner, array_on
from shardmath.handles.rendezvous_state import SLOT_BYTES, PadSetting, RendezvousState
from shardmath.symmetric.heap import Buffer
from shardmath.symmetric.rows import order
from shardmath.transport.base import Memory


@untraced_methods
class SymmetricMemory(metaclass=PadSetting):
    """Every rank's memory behind one array, and signals between the ranks. Made by `rendezvous`.

    Views are arrays of the library whose array was brought to the rendezvous, on the peer's memory
    itself: writing into one writes into the peer's array. `barrier`, or `put_signal` and
    `wait_signal`, order accesses of different ranks. Every wait ends: after `timeout_ms`, or after
    SHARDMATH_TIMEOUT when that is 0, with OpTimeout, which names the ranks and leaves the handle
    usable; or with RankFailure when a peer has ended.

    Source: torch.distributed._symmetric_memory.
    """

    def __init__(
        self, context: Context, state: RendezvousState, buffer: Buffer, library: Library
    ) -> None:
        self._context = context
        self._state = state
        self._buffer = buffer
        self._library = library

    def __repr__(self) -> str:
        return f"SymmetricMemory(rank {self.rank} of {self.world_size}, {self.buffer_sizes} bytes)"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a SymmetricMemory is this process's own, and is neither copied nor pickled: pass the "
            "object itself; another process calls rendezvous"
        )

    # -- what it is --------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The number of this process in the group of the rendezvous."""
        return self._context.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the group of the rendezvous."""
        return self._context.size

    @property
    def device(self) -> Any:
        """Where the memory is: a torch.device for torch tensors, else the word "cpu"."""
        return self._library.device("cpu")

    @property
    def buffer_ptrs(self) -> list[int]:
        """The address here of each rank's allocation; 0 where it has none. Excludes `offset`."""
        return [int(address) for address in self._state.buffer_table]

    @property
    def buffer_ptrs_dev(self) -> int:
        """The address of an array of the `buffer_ptrs`, for compiled code; the handle's own."""
        return int(self._state.buffer_table.ctypes.data)

    @property
    def array_ptrs(self) -> list[int]:
        """The address here of the array that each rank brought; 0 where it has none."""
        places = zip(self.buffer_ptrs, self._state.peers, strict=True)
        return [address and address + place.array_offset for address, place in places]

    @property
    def signal_pad_ptrs(self) -> list[int]:
        """The address here of each rank's signal pad."""
        return [int(address) for address in self._state.pad_table]

    @property
    def signal_pad_ptrs_dev(self) -> int:
        """The address of an array of the `signal_pad_ptrs`, for compiled code."""
        return int(self._state.pad_table.ctypes.data)

    @property
    def buffer_size(self) -> int:
        """Bytes of this rank's allocation."""
        return self._state.peers[self.rank].nbytes

    @property
    def buffer_sizes(self) -> list[int]:
        """Bytes of each rank's allocation: they may differ."""
        return [location.nbytes for location in self._state.peers]

    @property
    def signal_pad_size(self) -> int:
        """Bytes of the signal slots of each rank."""
        return self._state.peers[self.rank].pad_size

    @property
    def offset(self) -> int:
        """Bytes from the start of this rank's allocation to its array."""
        return self._state.peers[self.rank].array_offset

    @property
    def multicast_ptr(self) -> int:
        """0: the host has no multicast."""
        return 0

    # -- views -------------------------------------------------------------------------------------

    def get_buffer(
        self, rank: int, sizes: Sequence[int], dtype: Any, storage_offset: int | None = 0
    ) -> Any:
        """An array of `sizes` on `rank`'s memory, `storage_offset` elements into its allocation.

        Raises RuntimeError when it would reach beyond the allocation, ValueError for a rank that
        does not exist, UseAfterFree when this rank's array was freed.
        """
        wanted = dtypes.of(dtype)
        start = _elements(storage_offset) * wanted.itemsize
        return self._allocation_view(self._peer(rank, "rank"), sizes, wanted, start)

    def get_remote_tensor(self, peer: int, sizes: Sequence[int], dtype: Any) -> Any:
        """An array of `sizes` on `peer`'s memory, from where the array that it brought starts.

        Raises as `get_buffer`.
        """
        start = self._state.peers[self._peer(peer, "peer")].array_offset
        return self._allocation_view(peer, sizes, dtypes.of(dtype), start)

    def get_signal_pad(
        self,
        rank: int,
        sizes: Sequence[int] = (),
        dtype: Any = None,
        storage_offset: int | None = 0,
    ) -> Any:
        """An array on `rank`'s signal pad, uint32 unless `dtype` is given.

        Without `sizes`, all of the pad from `storage_offset` on, in one dimension. Raises as
        `get_buffer`.
        """
        wanted = dtypes.of("uint32" if dtype is None else dtype)
        size = self._state.peers[self._peer(rank, "rank")].pad_size
        skipped = _elements(storage_offset)
        whole = isinstance(sizes, Sized) and len(sizes) == 0
        shape = [max(0, size // wanted.itemsize - skipped)] if whole else sizes
        start = skipped * wanted.itemsize
        if self._context.observer is not None:
            self._context.observer.look_away()
        return self._view(self._state.pads[rank], shape, wanted, start=start, limit=size)

    def _view(
        self, memory: Memory | None, sizes: Sequence[int], dtype: DType, *, start: int, limit: int
    ) -> Any:
        """A row-major array from byte `start` of a rank's memory on, of which it has `limit`."""
        if not isinstance(sizes, Iterable) or isinstance(sizes, str):
            raise TypeError(f"sizes is a sequence of integers, not {sizes!r}")
        shape = tuple(index(extent, "an extent of sizes") for extent in sizes)
        if start < 0 or any(extent < 0 for extent in shape):
            raise self._wrong(f"sizes {shape} and the offset, {start} bytes, must not be negative")
        end = start + math.prod(shape) * dtype.itemsize
        if end > limit:
            raise RuntimeError(
                f"rank {self.rank}: {dtype} {shape} from byte {start} on ends at byte {end}; the "
                f"peer's memory has {limit}"
            )
        if memory is None:
            raise RuntimeError(
                f"rank {self.rank}: the memory asked for is on another host, and has no address "
                "here; reach it with the handle's put and get"
            )
        strides = packed_strides(shape)
        return array_on(Owner(memory, self), self._library, dtype, shape, strides, start=start)

    def _allocation_view(self, rank: int, sizes: Sequence[int], dtype: DType, start: int) -> Any:
        """A view of a rank's allocation, which reports accesses where they are observed."""
        self._require_array()
        memory, peer = self._state.memory[rank], self._state.peers[rank]
        view = self._view(memory, sizes, dtype, start=start, limit=peer.nbytes)
        if self._context.observer is None:
            return view
        from shardmath.handles.watched import watched

        address = int(self._state.buffer_table[rank])
        return watched(self._context, view, rank, peer.location, address, peer.nbytes)

    def _require_array(self) -> None:
        if self._buffer.block.freed:
            raise UseAfterFree(f"rank {self.rank}: its array was freed; free it after its last use")

    def _peer(self, rank: int, name: str) -> int:
        """`rank`, the argument of that name, if there is such a rank."""
        if not 0 <= index(rank, name) < self.world_size:
            raise self._wrong(f"{name} {rank} does not exist; there are {self.world_size} ranks")
        return rank

    def _wrong(self, what: str) -> ValueError:
        return ValueError(f"rank {self.rank}: {what}")

    # -- copies ------------------------------------------------------------------------------------

    @collective_call
    def get(self, dst: Any, src_rank: int, offset: int = 0) -> None:
        """Fill `dst` with elements of the array that `src_rank` brought, from `offset` on.

        `dst` is contiguous, in ordinary or symmetric memory; its dtype is assumed of the peer's
        elements. Ranks on other hosts can be read, too. On the host the copy is done on return, on
        a GPU once the current stream gets there. It sees what the peer wrote before a signal or
        barrier that this rank has waited for.

        Raises ValueError for a `dst` that is not contiguous or not writable, for elements that the
        peer's allocation does not have and a rank that does not exist; UseAfterFree.
        Source: torch.distributed._symmetric_memory.get.
        """
        self._copy(dst, src_rank, offset, writes=False)

    @collective_call
    def put(self, src: Any, dst_rank: int, offset: int = 0) -> None:
        """Write `src` over elements of the array that `dst_rank` brought, from `offset` on.

        As `get`, the other way. The peer sees the elements after it has waited for a later signal
        or barrier of this rank.
        """
        self._copy(src, dst_rank, offset, writes=True)

    def _copy(self, array: Any, rank: int, offset: int, *, writes: bool) -> None:
        self._context.require_open()
        self._require_array()
        name, rank_name = ("src", "dst_rank") if writes else ("dst", "src_rank")
        peer = self._state.peers[self._peer(rank, rank_name)]
        library = library_of(array, name)
        spec = library.spec(array)
        skipped = index(offset, "offset") * spec.itemsize
        if spec.order not in ("C", "both"):
            raise self._wrong(f"{name} is a contiguous array, not {spec}")
        start = peer.array_offset + skipped
        if skipped < 0 or start + spec.nbytes > peer.nbytes:
            given = f"elements {offset} to {offset + spec.size} of {spec.dtype}"
            have = (peer.nbytes - peer.array_offset) // spec.itemsize
            raise self._wrong(f"{given}: rank {rank} has {have} of them")
        if not spec.nbytes:
            return
        there, observer = peer.location.behind(start), self._context.observer
        memory, stream = self._own_bytes(library, array, writable=not writes)
        move = self._context.put if writes else self._context.get
        move(rank, there, memory, stream)
        if observer is not None:
            from shardmath.handles.watched import tell_of
            from shardmath.symmetric.accesses import Extent

            what, extent = "put" if writes else "get", Extent.of(0, (spec.nbytes,), (1,), 1)
            observer.access(rank, there, extent, writes=writes, what=what)
            tell_of(array, writes=not writes, what=what)

    def _own_bytes(self, library: Library, array: Any, *, writable: bool) -> tuple[Memory, int]:
        """The bytes of an array of this rank, and the stream on which they are used."""
        host = library.host_view(array, writable=writable)
        return raw_view(host.reshape(-1)).view(np.uint8), 0

    # -- signals -----------------------------------------------------------------------------------

    @collective_call
    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Wait until every rank has called it for this channel. Collective.

        What a rank wrote before, every rank sees after. It uses no slot of the pads. After
        OpTimeout this rank has still arrived, and its next call waits for the same barrier again.
        """
        timeout = self._begun("barrier of a handle", channel, timeout_ms)
        state, words = self._state, self._state.words
        target = state.reached.get(channel, 0) + 1
        observer, name = self._context.observer, ("barrier", state.number, channel)
        if observer is not None:
            observer.come(name, target)
        order()  # after writing what peers will read: before the word that announces it
        words[self.rank][channel] = target
        if state.far is not None:
            state.far.reached(channel, target)
        self._context.board.ring()

        def missing() -> list[int]:
            return [r for r in range(self.world_size) if words[r][channel] < target]

        self._wait(lambda: not missing(), missing, "barrier", channel, timeout)
        state.reached[channel] = target
        if observer is not None:
            observer.met(name, target)

    @collective_call
    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Signal `dst_rank`, after waiting until it has consumed this channel's last signal."""
        self._flip_slot(self._peer(dst_rank, "dst_rank"), 1, channel, timeout_ms)

    @collective_call
    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Wait for a signal of `src_rank` on this channel, and consume it.

        What `src_rank` wrote before its `put_signal`, this rank sees after.
        """
        self._flip_slot(self._peer(src_rank, "src_rank"), 0, channel, timeout_ms)

    def _flip_slot(self, peer: int, value: int, channel: int, timeout_ms: int) -> None:
        """Wait until the slot of signals to `peer`, or from it where `value` is 0, has the other
        value, and set it.
        """
        operation, to = ("put_signal", "to") if value else ("wait_signal", "from")
        src, dst = (self.rank, peer) if value else (peer, self.rank)
        timeout = self._begun(operation, channel, timeout_ms)
        slots, slot, state = self._state.slots[dst], channel * self.world_size + src, self._state
        what = f"{operation} {to} rank {peer}"
        self._wait(lambda: slots[slot] != value, lambda: [peer], what, channel, timeout)
        self._observe_signal(src, dst, channel, raises=value == 1)
        order()  # after writing what `peer` will read, or reading what it may overwrite from now on
        slots[slot] = value
        if state.far is not None:
            state.far.flipped(peer, channel, value)
        self._context.board.ring()

    def _observe_signal(self, src: int, dst: int, channel: int, *, raises: bool) -> None:
        """Tell the observer, where there is one, that this rank has waited for the slot of signals
        from `src` to `dst`, and is about to raise or to consume one.
        """
        observer, signal = self._context.observer, (self._state.number, src, dst, channel)
        if observer is None or src == dst:
            return
        waited, comes = ("consumed", "raised") if raises else ("raised", "consumed")
        number = self._state.signals[signal] + 1
        before = number - raises  # before the first signal is raised, none has been consumed
        if before:
            observer.met((waited, *signal), before, [dst if raises else src])
        observer.come((comes, *signal), number)
        self._state.signals[signal] = number

    def _begun(self, operation: str, channel: int, timeout_ms: int) -> float | None:
        """Check the arguments and begin an operation: its timeout in seconds."""
        self._context.require_open()
        self._require_channel(channel)
        timeout = self._seconds(timeout_ms)
        self._context.board.enter(operation)
        return timeout

    def _wait(
        self,
        arrived: Callable[[], bool],
        missing: Callable[[], list[int]],
        operation: str,
        channel: int,
        timeout: float | None,
    ) -> None:
        if not arrived():
            self._context.board.wait(arrived, missing, f"{operation}, channel {channel}", timeout)
        order()  # before reading what peers wrote

    def synchronize(self) -> None:
        """Wait until what this handle has been asked to do is done. On the host it always is."""
        self._context.require_open()

    def check(self) -> None:
        """Raise what a kernel's wait has found. On the host every wait raises it itself."""
        self._context.require_open()

    def _seconds(self, timeout_ms: int) -> float | None:
        if index(timeout_ms, "timeout_ms") < 0:
            raise self._wrong(f"timeout_ms is 0, for SHARDMATH_TIMEOUT, or more; not {timeout_ms}")
        return timeout_ms / 1000 or None

    def _require_channel(self, channel: int) -> None:
        channels = self.signal_pad_size // (SLOT_BYTES * self.world_size)
        if not 0 <= index(channel, "channel") < channels:
            raise self._wrong(
                f"channel {channel} does not exist: a pad of {self.signal_pad_size} bytes has "
                f"{channels} channels for {self.world_size} ranks; see set_signal_pad_size"
            )


def _elements(storage_offset: int | None) -> int:
    return 0 if storage_offset is None else index(storage_offset, "storage_offset")
