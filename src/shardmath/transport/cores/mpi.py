"""Memory of ranks on the cores of many hosts: segments of each host, behind one window of MPI.

Ranks of one host map each other's segments, as without MPI. A rank on another host reaches them by
one-sided copies through the window, to which every segment is attached as a whole. The window is
open to all from `join` on and no call here is collective after that. A library may serve a peer
only while this process is inside one of its calls: so every wait for other hosts looks into it.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from shardmath.base.config import Settings
from shardmath.group.base import ProcessGroup
from shardmath.transport.base import Bytes, Segment
from shardmath.transport.mesh import Mesh
from shardmath.transport.multi_host import MultiHostTransport

if TYPE_CHECKING:
    from shardmath.group.mpi import CallWatch

_LATE = 5.0  # seconds after which a call will not return that should have failed by itself
_ADVICE = "SHARDMATH_TRANSPORT=tcp does without MPI's windows"
_MOST = 1 << 30  # bytes of one copy: MPI counts in 32 bits


class MPITransport(MultiHostTransport):
    """Segments of the ranks of an MPI communicator. See `join`."""

    name: ClassVar[str] = "mpi"
    preference: ClassVar[int] = 1
    spare_bytes: ClassVar[int] = 1 << 30  # networks may pin what is attached

    def __init__(self, mesh: Mesh, *, timeout: float) -> None:
        super().__init__(mesh, timeout=timeout)
        self._mpi: Any = None
        self._comm: Any = None
        self._window: Any = None
        self._calls: CallWatch | None = None
        self._attached: set[int] = set()

    @classmethod
    def probe(cls, ordinal: int = 0) -> str:
        """It works where mpi4py can be imported and MPI runs."""
        try:
            from mpi4py import MPI
        except ModuleNotFoundError:
            return 'mpi4py is not installed: pip install "shardmath[mpi]"'
        except (ImportError, RuntimeError) as error:  # mpi4py may be there without an MPI
            return f"mpi4py cannot be imported: {error}"
        running = MPI.Is_initialized() and not MPI.Is_finalized()
        return "" if running else "MPI is not running in this process"

    @classmethod
    def unreached(cls, mesh: Mesh, group: ProcessGroup) -> str:
        """See Transport. One rank needs no MPI.

        Open MPI tells hosts apart by their short names. Where two have the same one, as containers
        may, it looks for memory that they share, and opening a window never returns.
        """
        if group.nranks == 1:
            return ""
        from shardmath.group.mpi import MPIProcessGroup

        if isinstance(group, MPIProcessGroup):
            names = {name.partition(".")[0] for name in mesh.hosts}
            if len(names) >= mesh.real_hosts:
                return ""
            return (
                f"MPI tells hosts apart by name, and {mesh.real_hosts} hosts are called "
                f"{', '.join(sorted(names))}: give each its own"
            )
        return (
            "it needs the ranks of an mpi4py communicator: start the program with mpiexec, or pass "
            "one to initialize"
        )

    def join(self, group: ProcessGroup) -> None:
        """Open the window. Collective."""
        from shardmath.group.mpi import CallWatch, MPIProcessGroup

        if not isinstance(group, MPIProcessGroup) or group.nranks == 1:
            return
        self._mpi = sys.modules["mpi4py.MPI"]
        settings = Settings.from_environment()
        self._calls = CallWatch(self._mesh.name(group.rank), notice=settings.notice)
        with self._calls.bounded(
            f"waiting for all {group.nranks} ranks to open MPI's windows",
            timeout=settings.startup_timeout,
            advice=f"{_ADVICE}; SHARDMATH_STARTUP_TIMEOUT sets the limit",
        ):
            self._comm = group.duplicate()
            self._window = self._mpi.Win.Create_dynamic(comm=self._comm)
            self._window.Lock_all(self._mpi.MODE_NOCHECK)
        if self._mesh.wires is not None:
            self._mesh.wires.progress_hooks.append(self._comm.Iprobe)  # lets MPI serve peers

    def reserve(self, nbytes: int) -> Segment:
        segment = super().reserve(nbytes)
        if self._mesh.wires is not None:
            self._window.Attach(self._bytes[segment.rank, segment.index])
            self._attached.add(segment.index)
        return segment

    def decommit(self, index: int, offset: int, nbytes: int) -> None:
        """See Transport. Attached memory stays: a network card may read its pages at any time."""
        if index not in self._attached:
            super().decommit(index, offset, nbytes)

    def release(self) -> None:
        _, segment = self._own[-1]
        self._detach(segment.index)
        super().release()

    def quiet(self, rank: int, stream: int = 0) -> None:
        if not self._mesh.same_host(rank):
            with self._bounded(rank, "its word that all is written"):
                self._window.Flush(rank)

    def _fetch(self, rank: int, index: int, offset: int, into: Bytes) -> None:
        self._copy("Rget", rank, index, offset, into, "a read of its memory")

    def _send(self, rank: int, index: int, offset: int, data: Bytes) -> None:
        self._copy("Rput", rank, index, offset, data, "a write to its memory")

    def _copy(
        self, verb: str, rank: int, index: int, offset: int, memory: Bytes, doing: str
    ) -> None:
        place, _ = self.far[rank, index]
        byte = self._mpi.BYTE
        for start in range(0, len(memory), _MOST):
            piece = memory[start : start + _MOST]
            target = (place + offset + start, len(piece), byte)
            with self._bounded(rank, doing):
                request = getattr(self._window, verb)([piece, byte], rank, target)
                self._wait(request.Test, rank, doing)

    def _bounded(self, rank: int, doing: str) -> AbstractContextManager[None]:
        """Around calls that a library may not leave until the peer is in one of its own."""
        assert self._calls is not None, "there is a window"
        return self._calls.bounded(
            f"waiting in MPI for {doing}, of {self._mesh.name(rank)}",
            timeout=self._timeout + _LATE,
            advice=f"{_ADVICE}; SHARDMATH_TIMEOUT sets the limit",
        )

    def _detach(self, index: int) -> None:
        if index in self._attached:
            self._attached.remove(index)
            self._window.Detach(self._bytes[self._mesh.rank, index])

    def close(self) -> None:
        """See Transport. The window stays: freeing it would be collective."""
        if self._calls is not None:
            self._calls.close()
        if self._window is not None and not self._mpi.Is_finalized():
            for index in list(self._attached):
                self._detach(index)
        super().close()
