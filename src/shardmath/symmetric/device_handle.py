"""The handle on memory of GPUs: the host's table of names, with signals that are kernels.

Signals are put on the current stream of the array library that the handle's arrays are of, can be
captured in CUDA graphs, and return at once. A wait that expires is reported by the next call, or by
`synchronize`; the handle and the CUDA context stay usable.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from shardmath.cuda import stream as streams
from shardmath.cuda.driver import call
from shardmath.symmetric.handle import SymmetricMemory
from shardmath.transport.base import DeviceBytes, Memory

if TYPE_CHECKING:
    from shardmath.arrays import Library
    from shardmath.symmetric.heap import Buffer, Heap
    from shardmath.symmetric.share import Share
    from shardmath.symmetric.team import Team

__all__ = ["DeviceSymmetricMemory", "DeviceTables"]


class DeviceTables:
    """The addresses of all ranks' allocations and pads, in memory of the device."""

    def __init__(self, heap: Heap, team: Team, share: Share) -> None:
        self._kept: list[Buffer] = []
        self.buffers = self._on_device(heap, team, share.buffer_table.tolist())
        self.pads = self._on_device(heap, team, share.pad_table.tolist())

    def _on_device(self, heap: Heap, team: Team, addresses: list[int]) -> int:
        buffer = heap.allocate(8 * len(addresses))
        self._kept.append(buffer)
        team.device.activate()
        call(
            "cuMemcpyHtoD",
            buffer.block.address,
            struct.pack(f"{len(addresses)}Q", *addresses),
            8 * len(addresses),
        )
        return buffer.block.address


class DeviceSymmetricMemory(SymmetricMemory):
    """A handle whose memory is on GPUs. See SymmetricMemory."""

    @property
    def device(self) -> Any:
        """Where the memory is: a torch.device for torch tensors, else a word such as "cuda:0"."""
        return self._library.device(self._team.device.name)

    @property
    def buffer_ptrs_dev(self) -> int:
        """The device address of an array of the `buffer_ptrs`, for kernels; the handle's own."""
        return self._tables.buffers

    @property
    def signal_pad_ptrs_dev(self) -> int:
        """The device address of an array of the `signal_pad_ptrs`, for kernels."""
        return self._tables.pads

    @property
    def _team(self) -> Team:
        team = self._share.team
        assert team is not None, "made for GPUs"
        return team

    @property
    def _tables(self) -> DeviceTables:
        share = self._share
        if share.tables is None:
            share.tables = DeviceTables(self._context.heap, self._team, share)
        return share.tables

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Put a barrier of all ranks on the current stream. Collective.

        What a rank wrote on its stream before, every rank sees on its own after. It uses no slot of
        the pads. After OpTimeout the next call waits for the same barrier again.
        """
        timeout = self._ready(channel, timeout_ms)
        self._team.barrier(self._stream(), channel=channel, timeout=timeout)

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Signal `dst_rank` from the current stream, once it has consumed the last signal."""
        timeout = self._ready(channel, timeout_ms)
        slot = int(self._share.pad_table[self._peer(dst_rank)]) + self._slot(channel, self.rank)
        stream = self._stream()
        self._team.flag("raise_flag", dst_rank, stream, slot=slot, channel=channel, timeout=timeout)

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Make the current stream wait for a signal of `src_rank`, and consume it."""
        timeout = self._ready(channel, timeout_ms)
        slot = int(self._share.pad_table[self.rank]) + self._slot(channel, self._peer(src_rank))
        stream = self._stream()
        self._team.flag("lower_flag", src_rank, stream, slot=slot, channel=channel, timeout=timeout)

    def _own_bytes(self, library: Library, array: Any, *, writable: bool) -> tuple[Memory, int]:
        """See SymmetricMemory: an array on this rank's GPU, and the current stream."""
        spec, device = library.spec(array), self._team.device
        if spec.device != device.name:
            raise ValueError(f"an array on {device.name} was expected, not {spec}")
        memory = DeviceBytes(library.pointer(array), spec.nbytes, device.name)
        return memory, streams.current(library.name, device)

    def synchronize(self) -> None:
        """Wait for the current stream. Raises what a wait on it has found, as every call does."""
        self._team.synchronize(self._stream())

    def _ready(self, channel: int, timeout_ms: int) -> float | None:
        self._context.require_open()
        self._require_channel(channel)
        return self._seconds(timeout_ms)

    def _slot(self, channel: int, src: int) -> int:
        return 4 * (channel * self.world_size + src)

    def _stream(self) -> int:
        return streams.current(self._library.name, self._team.device)
