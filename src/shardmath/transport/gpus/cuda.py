"""Memory of one machine's GPUs: physical allocations, mapped by every rank that is given them.

A segment is one allocation of the driver's virtual memory functions. It travels as a descriptor
over the mesh, has no name, and ends with the last process that maps it, so a process killed at any
moment leaves nothing behind and takes nothing from under its peers. Multicast is never used.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, ClassVar

from shardmath.base.config import Settings
from shardmath.base.immutable import Immutable
from shardmath.base.integers import up
from shardmath.cuda.device import Device
from shardmath.cuda.driver import bindings, call, call_for_memory
from shardmath.cuda.fence import DeviceFence
from shardmath.errors import BackendUnavailable, CudaError, HeapExhausted
from shardmath.transport.base import (
    DescriptorTransport,
    DeviceBytes,
    Fence,
    Memory,
    Segment,
    Transport,
    require_within,
)
from shardmath.transport.mesh import Mesh

GRANULE = 2 << 20
_RUNS_AHEAD_BY = 32  # of the GPU's memory, one part in so many


class Mapping:
    """An allocation, mapped for one device; unmapped when nothing refers to this any more."""

    def __init__(self, device: Device, handle: Any, nbytes: int) -> None:
        """Take over `handle`, whatever happens."""
        self.nbytes = nbytes
        with ExitStack() as undo:
            undo.callback(call, "cuMemRelease", handle)  # a mapping holds the memory by itself
            with ExitStack() as undo_mapping:
                address = call_for_memory(nbytes, "cuMemAddressReserve", nbytes, GRANULE, 0, 0)
                undo_mapping.callback(call, "cuMemAddressFree", address, nbytes)
                call("cuMemMap", address, nbytes, 0, handle, 0)
                undo_mapping.callback(call, "cuMemUnmap", address, nbytes)
                call("cuMemSetAccess", address, nbytes, [_access(device)], 1)
                undo_mapping.pop_all()
        self.address = int(address)
        weakref.finalize(self, _unmap, device, address, nbytes).atexit = False


class _Held(Immutable):
    segment: Segment
    mapping: Mapping


class CudaTransport(DescriptorTransport):
    """Segments on `device` of this rank and on the devices of the ranks that `mesh` connects.

    Ranks on pretended other hosts have no address here: their mappings serve `put` and `get` alone.
    """

    name: ClassVar[str] = "cuda"
    preference: ClassVar[int] = 0
    interface: ClassVar[str] = "__cuda_array_interface__"
    drops_at_once: ClassVar[int] = 8  # so that results of a loop lie in few places
    spare_bytes: ClassVar[int] = 1 << 30  # a segment has all its memory from the start

    def __init__(self, mesh: Mesh, device: Device) -> None:
        super().__init__(mesh)
        self.device = device.name
        self._device = device
        self._segments: dict[tuple[int, int], _Held] = {}
        self._own = 0
        device.activate()
        _require_support(device)
        self.runs_ahead_by = int(call("cuDeviceTotalMem", device.handle)) // _RUNS_AHEAD_BY

    @classmethod
    def probe(cls, ordinal: int = 0) -> str:
        """It works where a small allocation can be exported and mapped again."""
        try:
            device = Device.of(ordinal)
            device.activate()
            _require_support(device)
            handle = call_for_memory(GRANULE, "cuMemCreate", GRANULE, _properties(device), 0)
            fd = _exported(handle)
            Mapping(device, handle, GRANULE)
            Mapping(device, _imported(fd), GRANULE)
        except (BackendUnavailable, CudaError, HeapExhausted) as error:
            return str(error)
        return ""

    @classmethod
    def create(cls, mesh: Mesh, device: Device | None, settings: Settings) -> Transport:
        assert device is not None, "for GPUs"
        return cls(mesh, device)

    def reserve(self, nbytes: int) -> Segment:
        """See Transport. All of it has memory at once."""
        self._device.activate()
        nbytes = up(nbytes, GRANULE)
        handle = call_for_memory(nbytes, "cuMemCreate", nbytes, _properties(self._device), 0)
        segment = Segment(self._mesh.rank, self._own, nbytes)
        self._hold(segment, Mapping(self._device, handle, nbytes))
        self._own += 1
        return segment

    def release(self) -> None:
        self._own -= 1
        del self._segments[self._mesh.rank, self._own]

    def _introduce(self, index: int, peers: Sequence[int]) -> None:
        self._device.activate()
        held = self._segments[self._mesh.rank, index]
        handle = call("cuMemRetainAllocationHandle", held.mapping.address)
        fd = -1
        try:
            fd = _exported(handle)
            for peer in peers:
                self._mesh.send(peer, self._tag(index), fd, held.segment.nbytes)
                self._announced.add((peer, index))
        finally:
            if fd >= 0:
                os.close(fd)
            call("cuMemRelease", handle)

    def _known_segments(self) -> Iterable[tuple[int, int]]:
        return self._segments

    def attach(self, rank: int, index: int) -> Segment:
        """See Transport. Raises BackendUnavailable where this device cannot reach the peer's."""
        with self._introducing:
            held = self._segments.get((rank, index))
            return self._map(rank, index) if held is None else held.segment

    def _map(self, rank: int, index: int) -> Segment:
        fd, nbytes = self._mesh.receive_sized(rank, self._tag(index))
        self._device.activate()
        try:
            mapping = Mapping(self._device, _imported(fd), nbytes)
        except CudaError as error:
            raise BackendUnavailable(
                f"device {self._device.ordinal} of rank {self._mesh.rank} cannot reach the memory "
                f"of rank {rank}: {error}"
            ) from None
        segment = Segment(rank, index, nbytes)
        self._hold(segment, mapping)
        return segment

    def address(self, rank: int, index: int, offset: int, nbytes: int) -> int | None:
        address = self._at(rank, index, offset, nbytes)
        return address if self._mesh.same_host(rank) else None

    def get(self, rank: int, index: int, offset: int, into: Memory, stream: int = 0) -> None:
        assert isinstance(into, DeviceBytes), "memory of the device"
        source = self._at(rank, index, offset, into.nbytes)
        if into.nbytes:
            self._device.activate()
            call("cuMemcpyAsync", into.address, source, into.nbytes, stream)

    def put(self, rank: int, index: int, offset: int, data: Memory, stream: int = 0) -> None:
        assert isinstance(data, DeviceBytes), "memory of the device"
        target = self._at(rank, index, offset, data.nbytes)
        if data.nbytes:
            self._device.activate()
            call("cuMemcpyAsync", target, data.address, data.nbytes, stream)

    def _at(self, rank: int, index: int, offset: int, nbytes: int) -> int:
        held = self._segments[rank, index]
        require_within(held.segment, offset, nbytes)
        return held.mapping.address + offset

    def lease(self, index: int) -> Mapping:
        return self._segments[self._mesh.rank, index].mapping

    def fence(self) -> Fence | None:
        return DeviceFence.behind(self._device)

    def _hold(self, segment: Segment, mapping: Mapping) -> None:
        self._segments[segment.rank, segment.index] = _Held(segment, mapping)

    def close(self) -> None:
        """See Transport. Waits for the kernels that may still use the memory; each is bounded."""
        if self._segments:
            with suppress(CudaError):
                self._device.synchronize()
        self._segments.clear()


def _require_support(device: Device) -> None:
    attribute = bindings().CUdevice_attribute
    needed = {
        "virtual memory management": (
            attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        ),
        "memory handles that are descriptors": (
            attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        ),
    }
    missing = [what for what, which in needed.items() if not device.attribute(which)]
    if missing:
        raise BackendUnavailable(f"CUDA device {device.ordinal} has no {' and no '.join(missing)}")


def _properties(device: Device) -> Any:
    driver = bindings()
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = _descriptor_type()
    properties.location = _location(device)
    return properties


def _access(device: Device) -> Any:
    driver = bindings()
    access = driver.CUmemAccessDesc()
    access.location = _location(device)
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def _location(device: Device) -> Any:
    driver = bindings()
    location = driver.CUmemLocation()
    location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = device.ordinal
    return location


def _descriptor_type() -> Any:
    return bindings().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _exported(handle: Any) -> int:
    return int(call("cuMemExportToShareableHandle", handle, _descriptor_type(), 0))


def _imported(fd: int) -> Any:
    """The allocation behind a descriptor, which is closed."""
    try:
        return call("cuMemImportFromShareableHandle", fd, _descriptor_type())
    finally:
        os.close(fd)


def _unmap(device: Device, address: Any, nbytes: int) -> None:
    """Give an address range back once no kernel can be using it."""
    undo = (
        device.synchronize,
        partial(call, "cuMemUnmap", address, nbytes),
        partial(call, "cuMemAddressFree", address, nbytes),
    )
    for step in undo:
        with suppress(CudaError):  # at the end of a process the driver has gone already
            step()
