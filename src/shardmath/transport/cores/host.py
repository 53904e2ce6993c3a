"""Memory of one machine's processes: anonymous segments, mapped by every rank that is given them.

A segment is a sealed memfd: it has no name, cannot shrink under a reader, and ends with the last
process that maps it, so a process killed at any moment leaves nothing behind. Segments are sparse;
`commit` allocates their pages, after checking that the machine and its control groups can afford
them, so that exhaustion is an error rather than a signal.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from shardmath.errors import CollectiveMismatch, HeapExhausted
from shardmath.transport.available import available_memory, in_turn, limit_reached
from shardmath.transport.base import (
    Bytes,
    DescriptorTransport,
    Memory,
    Segment,
    Transport,
    require_within,
)
from shardmath.transport.mesh import Mesh

if TYPE_CHECKING:
    from shardmath.base.config import Settings
    from shardmath.cuda.device import Device

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class HostTransport(DescriptorTransport):
    """Segments of the ranks that `mesh` connects.

    Ranks on pretended other hosts have no address here: their mappings serve `put` and `get` alone.
    """

    name: ClassVar[str] = "host"
    preference: ClassVar[int] = 0
    interface: ClassVar[str] = "__array_interface__"
    spare_bytes: ClassVar[int] = 1 << 62  # segments are sparse: the spare costs nothing
    device = "cpu"

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self._own: list[tuple[int, Segment]] = []  # (descriptor, segment)
        self._maps: dict[tuple[int, int], mmap.mmap] = {}
        self._bytes: dict[tuple[int, int], Bytes] = {}

    @classmethod
    def probe(cls, ordinal: int = 0) -> str:
        """It works on Linux with memfd and pidfd."""
        missing = [name for name in ("memfd_create", "pidfd_open") if not hasattr(os, name)]
        return f"this system has no {' and no '.join(missing)}" if missing else ""

    @classmethod
    def create(cls, mesh: Mesh, device: Device | None, settings: Settings) -> Transport:
        return cls(mesh)

    def reserve(self, nbytes: int) -> Segment:
        rank, index = self._mesh.rank, len(self._own)
        fd, mapping = export_memory(f"shardmath-{rank}-{index}", nbytes)
        segment = Segment(rank, index, nbytes)
        self._own.append((fd, segment))
        self._keep(segment, mapping)
        return segment

    def release(self) -> None:
        fd, segment = self._own.pop()
        key = (segment.rank, segment.index)
        assert not any(index == segment.index for _, index in self._announced), segment
        del self._bytes[key], self._maps[key]
        os.close(fd)

    def commit(self, index: int, offset: int, nbytes: int) -> None:
        """See Transport. `offset` and `nbytes` are multiples of the page size."""
        fd, mesh = self._own[index][0], self._mesh
        try:
            # All ranks of the machine may ask at once: each for itself where there is not enough.
            is_short = nbytes * len(mesh.neighbours) > available_memory()
            with in_turn(mesh.common_file) if is_short else contextlib.nullcontext():
                have = available_memory() if is_short else nbytes
                if nbytes > have:
                    raise _exhausted(nbytes, have)
                os.posix_fallocate(fd, offset, nbytes)
        except OSError as error:
            self.decommit(index, offset, nbytes)
            raise _refused(nbytes, error) from None

    def decommit(self, index: int, offset: int, nbytes: int) -> None:
        self._maps[self._mesh.rank, index].madvise(mmap.MADV_REMOVE, offset, nbytes)

    def _introduce(self, index: int, peers: Sequence[int]) -> None:
        for peer in peers:
            self._mesh.send(peer, self._tag(index), self._own[index][0])
            self._announced.add((peer, index))

    def _known_segments(self) -> Iterable[tuple[int, int]]:
        return self._bytes

    def attach(self, rank: int, index: int) -> Segment:
        if (rank, index) not in self._bytes:
            with self._introducing:
                if (rank, index) not in self._bytes:
                    mapping = map_memory(self._mesh.receive(rank, self._tag(index)))
                    self._keep(Segment(rank, index, len(mapping)), mapping)
        return self._segment(rank, index)

    def view(self, rank: int, index: int, offset: int, nbytes: int) -> Bytes | None:
        require_within(self._segment(rank, index), offset, nbytes)
        if not self._mesh.same_host(rank):
            return None
        return self._bytes[rank, index][offset : offset + nbytes]

    def address(self, rank: int, index: int, offset: int, nbytes: int) -> int | None:
        view = self.view(rank, index, offset, nbytes)
        return None if view is None else int(view.ctypes.data)

    def get(self, rank: int, index: int, offset: int, into: Memory, stream: int = 0) -> None:
        assert isinstance(into, np.ndarray), "memory of the host"
        into[:] = self._part(rank, index, offset, len(into))

    def put(self, rank: int, index: int, offset: int, data: Memory, stream: int = 0) -> None:
        assert isinstance(data, np.ndarray), "memory of the host"
        self._part(rank, index, offset, len(data))[:] = data

    def _part(self, rank: int, index: int, offset: int, nbytes: int) -> Bytes:
        require_within(self._segment(rank, index), offset, nbytes)
        return self._bytes[rank, index][offset : offset + nbytes]

    def _segment(self, rank: int, index: int) -> Segment:
        """A segment that is attached, as its owner has announced it."""
        return Segment(rank, index, len(self._bytes[rank, index]))

    def lease(self, index: int) -> Bytes:
        return self._bytes[self._mesh.rank, index]

    def _keep(self, segment: Segment, mapping: mmap.mmap) -> None:
        self._maps[segment.rank, segment.index] = mapping
        self._bytes[segment.rank, segment.index] = np.frombuffer(mapping, np.uint8)

    def close(self) -> None:
        while self._own:
            os.close(self._own.pop()[0])
        self._bytes.clear()
        self._maps.clear()


def export_memory(name: str, nbytes: int) -> tuple[int, mmap.mmap]:
    """A sparse anonymous segment: its descriptor, and its mapping here."""
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise _refused(nbytes, error) from None
    try:
        try:
            os.ftruncate(fd, nbytes)
        except OverflowError:
            raise _exhausted(nbytes, available_memory()) from None
        except OSError as error:
            raise _refused(nbytes, error) from None
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return fd, _mapped(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise


def map_memory(fd: int) -> mmap.mmap:
    """Map a peer's segment and close its descriptor.

    The size is the descriptor's own, never what the peer says, and the seal is checked: a segment
    that its owner could shrink would kill whoever reads it.
    """
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise CollectiveMismatch("a peer sent a segment that is not sealed")
        return _mapped(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def _mapped(fd: int, nbytes: int) -> mmap.mmap:
    try:
        mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED)
    except (OSError, ValueError, OverflowError) as error:
        if isinstance(error, OSError) and limit_reached(error):
            raise _refused(nbytes, error) from None
        have = available_memory()
        if nbytes > have:
            raise _exhausted(nbytes, have) from None
        raise HeapExhausted(
            f"cannot map {nbytes:,} bytes: the address space (ulimit -v) is exhausted",
            need=nbytes,
        ) from None
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)  # fewer page faults where the system allows it
    return mapping


def _refused(need: int, error: OSError) -> HeapExhausted:
    """The error for `need` bytes that the system refuses, naming the limit that was reached."""
    reached = limit_reached(error)
    if not reached:
        return _exhausted(need, available_memory())
    return HeapExhausted(f"symmetric memory needs {need:,} bytes more: {reached}", need=need)


def _exhausted(need: int, have: int) -> HeapExhausted:
    return HeapExhausted(
        f"symmetric memory needs {need:,} bytes more, and {have:,} are available; "
        "free arrays, or use more ranks on more memory",
        need=need,
        have=have,
    )
