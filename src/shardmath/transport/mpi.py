"""Memory of ranks on the cores of many hosts: segments of each host, behind one window of MPI.

Ranks of one host map each other's segments, as without MPI. A rank on another host reaches them by
one-sided copies through the window, to which every segment is attached as a whole. The window is
open to all from `join` on and no call here is collective after that. A library may serve a peer
only while this process is inside one of its calls: so every wait for other hosts looks into it.
"""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from shardmath.errors import BackendUnavailable, CollectiveMismatch, OpTimeout, RankFailure
from shardmath.group.base import ProcessGroup
from shardmath.group.mpi import MPIProcessGroup
from shardmath.transport.base import Bytes, Memory, Probe, Segment, require_within
from shardmath.transport.host import HostTransport
from shardmath.transport.mesh import Mesh

__all__ = ["MPITransport"]

_NOTE = struct.Struct("<QQ")  # address and bytes of a segment
_MOST = 1 << 30  # bytes of one copy: MPI counts in 32 bits
_SPINS = 1000  # looks without a pause
_PAUSE = 50e-6


class MPITransport(HostTransport):
    """Segments of the ranks of an MPI communicator. See `join`."""

    name: ClassVar[str] = "mpi"
    spare_bytes: ClassVar[int] = 1 << 30  # networks may pin what is attached

    def __init__(self, mesh: Mesh, *, timeout: float) -> None:
        super().__init__(mesh)
        self._timeout = timeout
        self._mpi: Any = None
        self._comm: Any = None
        self._window: Any = None
        self._attached: set[int] = set()
        self._far: dict[tuple[int, int], tuple[int, Segment]] = {}  # address there
        self._channel = None
        self._told: set[tuple[int, int]] = set()  # (far peer, index of an own segment)
        if mesh.wires is not None:
            self._channel = mesh.wires.open("segments", 0, self._hear)

    @classmethod
    def probe(cls) -> Probe:
        """Available where mpi4py can be imported and MPI runs."""
        try:
            from mpi4py import MPI
        except ImportError as error:
            return Probe(cls.name, False, f"{error}: pip install mpi4py mpich")
        if not MPI.Is_initialized() or MPI.Is_finalized():
            return Probe(cls.name, False, "MPI is not running in this process")
        return Probe(cls.name, True)

    def join(self, group: ProcessGroup) -> None:
        """Open the window. Collective. Raises BackendUnavailable for a group that is not MPI's."""
        if group.nranks == 1:
            return
        if not isinstance(group, MPIProcessGroup):
            raise BackendUnavailable(
                "the transport mpi needs the ranks of an mpi4py communicator: start the program "
                "with mpiexec, or pass one to initialize"
            )
        self._mpi = sys.modules["mpi4py.MPI"]
        self._comm = group.duplicate()
        self._window = self._mpi.Win.Create_dynamic(comm=self._comm)
        self._window.Lock_all(self._mpi.MODE_NOCHECK)
        if self._mesh.wires is not None:
            self._mesh.wires.also.append(self._look)

    def reserve(self, nbytes: int) -> Segment:
        """See Transport."""
        segment = super().reserve(nbytes)
        if self._channel is not None:
            self._window.Attach(self._bytes[segment.rank, segment.index])
            self._attached.add(segment.index)
        return segment

    def release(self) -> None:
        """See Transport."""
        _, segment = self._own[-1]
        self._detach(segment.index)
        super().release()

    def announce(self, index: int, peers: Iterable[int]) -> None:
        """See Transport. What ranks on other hosts need is sent over the wires."""
        peers = list(peers)
        super().announce(index, [peer for peer in peers if self._mesh.near(peer)])
        far = [p for p in peers if not self._mesh.near(p) and (p, index) not in self._told]
        if far:
            assert self._channel is not None, "there are ranks on other hosts"
            whole = self._bytes[self._mesh.rank, index]
            place = self._mpi.Get_address(whole)
            self._channel.send(far, [(index, _NOTE.pack(place, len(whole)))])
            self._told.update((peer, index) for peer in far)

    def attach(self, rank: int, index: int) -> Segment:
        """See Transport."""
        if self._mesh.near(rank):
            return super().attach(rank, index)
        key = (rank, index)
        if key not in self._far:
            self._wait(lambda: key in self._far, rank, f"its segment {index}")
        return self._far[key][1]

    def view(self, rank: int, index: int, offset: int, nbytes: int) -> Bytes | None:
        """See Transport."""
        if self._mesh.near(rank):
            return super().view(rank, index, offset, nbytes)
        require_within(self._far[rank, index][1], offset, nbytes)
        return None

    def address(self, rank: int, index: int, offset: int, nbytes: int) -> int | None:
        """See Transport."""
        if self._mesh.near(rank):
            return super().address(rank, index, offset, nbytes)
        require_within(self._far[rank, index][1], offset, nbytes)
        return None

    def get(self, rank: int, index: int, offset: int, into: Memory, stream: int = 0) -> None:
        """See Transport."""
        if self._mesh.near(rank):
            super().get(rank, index, offset, into)
            return
        self._copy("Rget", rank, index, offset, into, "a read of its memory")

    def put(self, rank: int, index: int, offset: int, data: Memory, stream: int = 0) -> None:
        """See Transport."""
        if self._mesh.near(rank):
            super().put(rank, index, offset, data)
            return
        self._copy("Rput", rank, index, offset, data, "a write to its memory")

    def quiet(self, rank: int, stream: int = 0) -> None:
        """See Transport."""
        if not self._mesh.near(rank):
            self._window.Flush(rank)

    def _copy(
        self, verb: str, rank: int, index: int, offset: int, memory: Memory, doing: str
    ) -> None:
        assert isinstance(memory, np.ndarray), "memory of the host"
        place, segment = self._far[rank, index]
        require_within(segment, offset, len(memory))
        byte = self._mpi.BYTE
        for start in range(0, len(memory), _MOST):
            piece = memory[start : start + _MOST]
            target = (place + offset + start, len(piece), byte)
            request = getattr(self._window, verb)([piece, byte], rank, target)
            self._wait(request.Test, rank, doing)

    def _wait(self, done: Any, rank: int, doing: str) -> None:
        """Return once `done()`, which lets MPI work. Raises RankFailure and OpTimeout."""
        wires, start, looks = self._mesh.wires, time.monotonic(), 0
        assert wires is not None, "there are ranks on other hosts"
        while not done():
            wires.look()
            looks += 1
            if looks < _SPINS:
                continue
            who = f"rank {self._mesh.rank} waited for {doing}, of rank {rank}"
            if rank in self._mesh.watch.dead() and not done():
                raise RankFailure(f"{who} on {self._mesh.hosts[rank]}, which has ended", [rank])
            if time.monotonic() - start > self._timeout:
                raise OpTimeout(
                    f"{who} for {self._timeout} s; raise SHARDMATH_TIMEOUT if it was only slow",
                    [rank],
                )
            time.sleep(_PAUSE)

    def _hear(self, rank: int, index: int, data: bytes) -> None:
        """What another rank has announced: where its segment lies there."""
        if len(data) != _NOTE.size:
            raise CollectiveMismatch(f"rank {rank} announced a segment in {len(data)} bytes")
        place, nbytes = _NOTE.unpack(data)
        self._far[rank, index] = place, Segment(rank, index, nbytes)

    def _look(self) -> None:
        """Let the library serve peers."""
        self._comm.Iprobe()

    def _detach(self, index: int) -> None:
        if index in self._attached:
            self._attached.remove(index)
            self._window.Detach(self._bytes[self._mesh.rank, index])

    def close(self) -> None:
        """See Transport. The window stays: to free it, all ranks would have to come."""
        if self._window is not None and not self._mpi.Is_finalized():
            for index in list(self._attached):
                self._detach(index)
        super().close()
