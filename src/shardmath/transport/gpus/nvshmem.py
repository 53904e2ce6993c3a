"""Memory of the GPUs of many hosts, through NVSHMEM.

NVSHMEM allocates on all ranks at once. So each rank takes one heap of fixed size when the ranks
start together, and hands out parts of it alone after that. A rank on this host has an address where
NVSHMEM maps it; every rank is served by `put` and `get` on the user's stream. NVSHMEM can neither
be left by one rank nor started again with others: it runs until the process ends, and a heap that
nothing refers to any more serves the next context of the same ranks. Multicast is never used.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from shardmath.base.config import Settings, environment, export
from shardmath.base.integers import up
from shardmath.cuda import stream as streams
from shardmath.cuda.device import Device
from shardmath.cuda.driver import call
from shardmath.cuda.fence import DeviceFence
from shardmath.cuda.packages import unavailable
from shardmath.errors import BackendUnavailable, HeapExhausted
from shardmath.group.base import ProcessGroup
from shardmath.transport.base import DeviceBytes, Fence, Memory, Segment, Transport, require_within
from shardmath.transport.mesh import Mesh

_BOUNCE = 16 << 20  # bytes at the end of a heap through which ordinary memory passes
_OWN_BYTES = 256 << 20  # what NVSHMEM takes of its memory for itself
_GRANULE = 2 << 20
_VARIABLES = {"NVSHMEM_DISABLE_NVLS": "1"}


class _HeapMemory:
    """One heap while anything refers to it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes


@dataclass
class _Running:
    """NVSHMEM in this process: whose ranks it has, and the heaps taken of it."""

    members: tuple[tuple[str, int], ...]  # host and process of every rank
    heaps: list[tuple[int, int, weakref.ref[_HeapMemory]]] = field(default_factory=list)


class NVSHMEMTransport(Transport):
    """One segment on the device of every rank, which all ranks know of. See `join`."""

    name: ClassVar[str] = "nvshmem"
    preference: ClassVar[int] = 1
    interface: ClassVar[str] = "__cuda_array_interface__"
    drops_at_once: ClassVar[int] = 4  # so that results of a loop lie in few places
    spare_bytes: ClassVar[int] = 0  # there is one segment, of the size of the heap
    grows: ClassVar[bool] = False

    def __init__(self, mesh: Mesh, device: Device, *, heap_bytes: int) -> None:
        """Raises BackendUnavailable where the library is missing."""
        self.device = device.name
        self._device = device
        self._mesh = mesh
        self._heap_bytes = up(heap_bytes, _GRANULE)
        self._heap_memory: _HeapMemory | None = None
        self._reserved = False
        self._bindings = _bindings()
        # Of the streams that the bounce buffer serves.
        self._bounce_order = streams.StreamOrder(device)

    @classmethod
    def probe(cls, ordinal: int = 0) -> str:
        """It works where the library can be loaded."""
        try:
            _bindings()
        except BackendUnavailable as error:
            return str(error)
        return ""

    @classmethod
    def unreached(cls, mesh: Mesh, group: ProcessGroup) -> str:
        """See Transport. Whether ranks connect, `join` finds out."""
        return ""

    @classmethod
    def create(cls, mesh: Mesh, device: Device | None, settings: Settings) -> Transport:
        assert device is not None, "for GPUs"
        return cls(mesh, device, heap_bytes=settings.gpu_heap_bytes)

    def join(self, group: ProcessGroup) -> None:
        """Start NVSHMEM with the ranks of `group`, and take a heap. Collective.

        Raises BackendUnavailable when it runs with other ranks or does not start, HeapExhausted.
        """
        mesh = self._mesh
        self._device.activate()
        members = tuple(zip(mesh.hosts, mesh.pids, strict=True))
        running = _running[0] if _running else None
        free = self._free_heap(running)
        cards = group.allgather_values((running is not None and running.members != members, free))
        if any(other for other, _ in cards):
            raise BackendUnavailable(
                "NVSHMEM runs already with other ranks in one of the processes, and cannot be "
                "started again: use the same ranks, or new processes"
            )
        if running is None:
            self._start(group)
            running = _Running(members)
            _running.append(running)
        address = cards[mesh.rank][1] if all(known for _, known in cards) else 0
        if not address:
            address = int(self._bindings.malloc(self._heap_bytes))
        if not address:
            raise HeapExhausted(
                f"NVSHMEM has no {self._heap_bytes:,} bytes for the symmetric heap; lower "
                "SHARDMATH_GPU_HEAP_BYTES",
                need=self._heap_bytes,
            )
        self._heap_memory = _HeapMemory(address, self._heap_bytes)
        running.heaps = [known for known in running.heaps if known[0] != address]
        running.heaps.append((address, self._heap_bytes, weakref.ref(self._heap_memory)))

    def _free_heap(self, running: _Running | None) -> int:
        """The address of a heap of this size that nothing refers to any more; 0 without one."""
        for address, nbytes, taken in running.heaps if running is not None else ():
            if nbytes == self._heap_bytes and taken() is None:
                return address
        return 0

    def _start(self, group: ProcessGroup) -> None:
        nvshmem = self._bindings
        known = environment()
        variables = {**_VARIABLES, "NVSHMEM_SYMMETRIC_SIZE": str(self._heap_bytes + _OWN_BYTES)}
        export({name: value for name, value in variables.items() if name not in known})
        record = np.zeros(1, nvshmem.uniqueid_dtype)
        identity, raw = nvshmem.uniqueid.from_data(record), record.view(np.int8)
        if group.rank == 0:
            nvshmem.get_uniqueid(identity.ptr)
        first = group.allgather_bytes(raw.tobytes())[0]
        raw[:] = np.frombuffer(first, np.int8)
        attributes = nvshmem.InitAttr()
        try:
            nvshmem.set_attr_uniqueid_args(group.rank, group.nranks, identity.ptr, attributes.ptr)
            nvshmem.hostlib_init_attr(nvshmem.Flags.INIT_WITH_UNIQUEID, attributes.ptr)
        except nvshmem.NVSHMEMError as error:
            raise BackendUnavailable(
                f"rank {group.rank}: NVSHMEM does not start ({error}); NVSHMEM_DEBUG=INFO says why"
            ) from None
        self._device.activate()

    # -- memory ------------------------------------------------------------------------------------

    def reserve(self, nbytes: int) -> Segment:
        """See Transport: the whole heap at first, and nothing after that."""
        have = 0 if self._reserved else self._heap_bytes - _BOUNCE
        if nbytes > have:
            raise HeapExhausted(
                f"symmetric memory needs {nbytes:,} bytes more, and {have:,} are left: among hosts "
                "a GPU's heap cannot grow; raise SHARDMATH_GPU_HEAP_BYTES",
                need=nbytes,
                have=have,
            )
        self._reserved = True
        return self._segment(self._mesh.rank)

    def release(self) -> None:
        self._reserved = False

    def attach(self, rank: int, index: int) -> Segment:
        return self._segment(rank)

    def address(self, rank: int, index: int, offset: int, nbytes: int) -> int | None:
        place = self._place(rank, offset, nbytes)
        if rank == self._mesh.rank:
            return place
        if not self._mesh.same_host(rank):
            return None
        return int(self._bindings.ptr(place, rank)) or None

    def fence(self) -> Fence | None:
        return DeviceFence.behind(self._device)

    def lease(self, index: int) -> object:
        return self._heap

    # -- copies ------------------------------------------------------------------------------------

    def get(self, rank: int, index: int, offset: int, into: Memory, stream: int = 0) -> None:
        self._copy(rank, offset, into, stream, writes=False)

    def put(self, rank: int, index: int, offset: int, data: Memory, stream: int = 0) -> None:
        self._copy(rank, offset, data, stream, writes=True)

    def quiet(self, rank: int, stream: int = 0) -> None:
        self._bindings.quiet_on_stream(stream)

    def _copy(self, rank: int, offset: int, memory: Memory, stream: int, *, writes: bool) -> None:
        assert isinstance(memory, DeviceBytes), "memory of the device"
        place, nbytes = self._place(rank, offset, memory.nbytes), memory.nbytes
        self._device.activate()
        copy = self._bindings.putmem_on_stream if writes else self._bindings.getmem_on_stream
        heap = self._heap
        if heap.address <= memory.address <= heap.address + heap.nbytes - nbytes:
            there, here = (place, memory.address) if writes else (memory.address, place)
            if nbytes:
                copy(there, here, nbytes, rank, stream)
            return
        # Networks read and write registered memory only: ordinary memory passes through the heap.
        bounce = heap.address + self._heap_bytes - _BOUNCE
        with self._bounce_order.section(stream):
            for start in range(0, nbytes, _BOUNCE):
                size = min(_BOUNCE, nbytes - start)
                if writes:
                    call("cuMemcpyAsync", bounce, memory.address + start, size, stream)
                    copy(place + start, bounce, size, rank, stream)
                else:
                    copy(bounce, place + start, size, rank, stream)
                    call("cuMemcpyAsync", memory.address + start, bounce, size, stream)

    @property
    def _heap(self) -> _HeapMemory:
        assert self._heap_memory is not None, "after join"
        return self._heap_memory

    def _segment(self, rank: int) -> Segment:
        return Segment(rank, 0, self._heap_bytes - _BOUNCE)

    def _place(self, rank: int, offset: int, nbytes: int) -> int:
        """Where NVSHMEM finds bytes of any rank: at this rank's own address."""
        require_within(self._segment(rank), offset, nbytes)
        return self._heap.address + offset

    def close(self) -> None:
        """See Transport. Waits for the kernels that may still use the memory; each is bounded."""
        self._device.synchronize()
        self._heap_memory = None  # free once the arrays are gone, too


def _bindings() -> Any:
    """The module `nvshmem.bindings`, its library loaded."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib
        from nvshmem import bindings
    except ImportError as error:
        raise unavailable("GPUs of several hosts need NVSHMEM", error, "hosts-cu13") from None
    try:
        load_nvidia_dynamic_lib("nvshmem_host")
    except RuntimeError as error:  # DynamicLibNotFoundError
        raise unavailable("the library of NVSHMEM cannot be loaded", error, "hosts-cu13") from None
    return bindings


_running: list[_Running] = []  # at most one: the library allows no second in a process
