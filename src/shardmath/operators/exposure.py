"""Local arrays that peers read during one execution.

An array on the heap is read where it is. Any other is first copied into this context's workspace,
and only if a peer needs it. Where each array lies and how it is strided travels as a note of a few
bytes in an exchange that the operation makes anyway; that exchange is also the barrier after which
peers may read. The workspace is reused by the next operation: every operation ends with a barrier
of its own.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from shardmath.arrays.base import HostArray, raw_view
from shardmath.context import DistributedContext
from shardmath.symmetric.heap import Block, Buffer, Location

__all__ = ["Exposure", "Workspace"]

_ENTRY = struct.Struct("<qqqq")  # segment (-1: nothing), byte offset, strides in bytes


class Workspace:
    """Heap buffers by name, grown when needed, kept until released."""

    def __init__(self, context: DistributedContext) -> None:
        self._context = context
        self._buffers: dict[str, Buffer] = {}

    @classmethod
    def of(cls, context: DistributedContext) -> Workspace:
        """The one of a context, shared by its operations, which follow one another."""
        workspace: Workspace = context.cache("workspace", lambda: cls(context))
        return workspace

    def array(self, name: str, shape: tuple[int, ...], dtype: Any, order: Any = "C") -> HostArray:
        """An uninitialized array in the buffer of that name."""
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.block.nbytes < nbytes:
            self._buffers.pop(name, None)  # its memory first, then more
            del buffer
            buffer = self._buffers[name] = self._context.heap.allocate(nbytes)
        return np.ndarray(shape, dtype, np.asarray(buffer)[:nbytes].data, order=order)

    def block(self, name: str) -> Block:
        """The block of a buffer that `array` has made."""
        return self._buffers[name].block

    def buffer(self, name: str) -> Buffer:
        """The buffer itself that `array` has made."""
        return self._buffers[name]

    def release(self) -> None:
        """Give all buffers back."""
        self._buffers.clear()


class Exposure:
    """The 2-D arrays that this rank offers, in order, and after `read` those of its peers."""

    def __init__(self, context: DistributedContext) -> None:
        self._context = context
        self._workspace = Workspace.of(context)
        self._own: list[HostArray] = []
        self._entries: list[bytes] = []
        self._notes: list[bytes] = []

    def offer(self, array: HostArray, *, needed: bool, block: Block | None) -> None:
        """Add an array. `needed`: some peer reads it. `block`: where it lies, if on the heap."""
        self._own.append(array)
        if not needed:
            self._entries.append(_ENTRY.pack(-1, 0, 0, 0))
            return
        if block is None or any(stride < 0 for stride in array.strides):
            name = f"staged {len(self._own)}"
            order = "F" if array.flags.f_contiguous else "C"
            staged = self._workspace.array(name, array.shape, array.dtype, order)
            np.copyto(raw_view(staged), raw_view(array))
            array, block = staged, self._workspace.block(name)
        self._context.announce(block)
        offset = int(array.__array_interface__["data"][0]) - block.address
        at = block.location
        self._entries.append(_ENTRY.pack(at.segment, at.offset + offset, *array.strides))

    def note(self) -> bytes:
        """What to tell the peers."""
        return b"".join(self._entries)

    def read(self, notes: list[bytes]) -> None:
        """Take what all ranks told."""
        self._notes = notes

    def array(
        self, slot: int, rank: int, shape: tuple[int, int], dtype: np.dtype[Any]
    ) -> HostArray:
        """The array that `rank` offered in `slot`, of the given local shape, in its own memory."""
        if rank == self._context.rank:
            return self._own[slot]
        if 0 in shape:
            return np.empty(shape, dtype)
        entry = _ENTRY.unpack_from(self._notes[rank], slot * _ENTRY.size)
        segment, offset, strides = entry[0], entry[1], entry[2:]
        assert segment >= 0, f"rank {rank} was not asked to expose its operand {slot}"
        extent = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + dtype.itemsize
        view = self._context.peer_bytes(rank, Location(segment, offset), extent)
        assert view is not None, f"rank {rank} has no address here"
        return np.ndarray(shape, dtype, view.data, strides=strides)
