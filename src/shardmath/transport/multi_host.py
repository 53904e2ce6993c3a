"""Memory of ranks on the cores of several hosts: the common part of these transports.

Ranks of one host map each other's segments. Of a segment elsewhere a rank learns where it lies
there and how large it is, over the wires, and then reads and writes it by `_fetch` and `_send`.
"""

from __future__ import annotations

import struct
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from shardmath.base.config import Settings
from shardmath.errors import OpTimeout, RankFailure
from shardmath.group.base import ProcessGroup
from shardmath.transport.base import Bytes, Memory, Segment, Transport, require_within
from shardmath.transport.cores.host import HostTransport
from shardmath.transport.mesh import Mesh

if TYPE_CHECKING:
    from shardmath.cuda.device import Device

_ANNOUNCEMENT = struct.Struct("<QQ")  # address and bytes of a segment
_SPIN = 50e-6  # seconds of polls without a pause
_PAUSE = 1e-3  # seconds of rest between two looks at whether the peer is alive


class MultiHostTransport(HostTransport):
    """Segments of ranks of several hosts. `far[rank, index]`: address and size, once announced."""

    def __init__(self, mesh: Mesh, *, timeout: float) -> None:
        super().__init__(mesh)
        self.far: dict[tuple[int, int], tuple[int, Segment]] = {}
        self._timeout = timeout
        wires = mesh.wires
        self._announcements = (
            None if wires is None else wires.open("segments", 0, self._receive_announcement)
        )

    @classmethod
    def unreached(cls, mesh: Mesh, group: ProcessGroup) -> str:
        return ""

    @classmethod
    def create(cls, mesh: Mesh, device: Device | None, settings: Settings) -> Transport:
        return cls(mesh, timeout=settings.timeout)

    # -- what a subclass supplies ------------------------------------------------------------------

    @abstractmethod
    def _fetch(self, rank: int, index: int, offset: int, into: Bytes) -> None:
        """Fill `into` from a segment on another host, which holds the bytes. Done on return."""

    @abstractmethod
    def _send(self, rank: int, index: int, offset: int, data: Bytes) -> None:
        """Write to a segment on another host, which holds the bytes. See `Transport.put`."""

    # -- the verbs ---------------------------------------------------------------------------------

    def _introduce(self, index: int, peers: Sequence[int]) -> None:
        """Send a descriptor to peers of this host, and over the wires what the others need."""
        super()._introduce(index, [peer for peer in peers if self._mesh.same_host(peer)])
        far = [peer for peer in peers if not self._mesh.same_host(peer)]
        if far:
            assert self._announcements is not None, "there are ranks on other hosts"
            whole = self._bytes[self._mesh.rank, index]
            self._announcements.send(
                far, [(index, _ANNOUNCEMENT.pack(whole.ctypes.data, len(whole)))]
            )
            self._announced.update((peer, index) for peer in far)

    def _known_segments(self) -> Iterable[tuple[int, int]]:
        return [*super()._known_segments(), *self.far]

    def attach(self, rank: int, index: int) -> Segment:
        if self._mesh.same_host(rank):
            return super().attach(rank, index)
        key = (rank, index)
        if key not in self.far:
            self._wait(lambda: key in self.far, rank, f"its segment {index}")
        return self.far[key][1]

    def _segment(self, rank: int, index: int) -> Segment:
        if self._mesh.same_host(rank):
            return super()._segment(rank, index)
        return self.far[rank, index][1]

    def get(self, rank: int, index: int, offset: int, into: Memory, stream: int = 0) -> None:
        if self._mesh.same_host(rank):
            super().get(rank, index, offset, into)
            return
        assert isinstance(into, np.ndarray), "memory of the host"
        require_within(self.far[rank, index][1], offset, len(into))
        self._fetch(rank, index, offset, into)

    def put(self, rank: int, index: int, offset: int, data: Memory, stream: int = 0) -> None:
        if self._mesh.same_host(rank):
            super().put(rank, index, offset, data)
            return
        assert isinstance(data, np.ndarray), "memory of the host"
        require_within(self.far[rank, index][1], offset, len(data))
        self._send(rank, index, offset, data)

    def _wait(self, done: Callable[[], bool], rank: int, doing: str) -> None:
        """Poll the wires until `done()` is true. Raises RankFailure, OpTimeout."""
        wires, start = self._mesh.wires, time.monotonic()
        assert wires is not None, "there are ranks on other hosts"
        while not done():
            wires.poll()
            mesh, waited = self._mesh, time.monotonic() - start
            if waited < _SPIN or done():
                continue
            if rank in mesh.watch.dead() and not done():
                raise RankFailure(
                    f"waited for {doing}, of {mesh.name(rank)}, which has ended; call "
                    "recover() of the context on all ranks that remain, or finalize and initialize",
                    [rank],
                )
            if waited > self._timeout:
                raise OpTimeout(
                    f"waited {waited:.1f} s for {doing}, of {mesh.name(rank)}; raise "
                    "SHARDMATH_TIMEOUT if it was only slow",
                    [rank],
                )
            wires.rest(_PAUSE)

    def _receive_announcement(self, rank: int, index: int, data: bytes) -> None:
        """Note where a segment lies that another rank has announced."""
        if len(data) == _ANNOUNCEMENT.size:
            place, nbytes = _ANNOUNCEMENT.unpack(data)
            self.far[rank, index] = place, Segment(rank, index, nbytes)
