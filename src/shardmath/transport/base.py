"""The verbs that every transport supplies, and the facts that it tells about itself.

Layers above ask the table for a view or an address; they never ask which transport they have. A
peer without an address, on another host, answers None, and is then reached by `put` and `get`
alone, which serve every attached segment.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from shardmath.arrays.base import described_bytes
from shardmath.base.immutable import Immutable
from shardmath.errors import CollectiveMismatch
from shardmath.group.base import ProcessGroup

if TYPE_CHECKING:
    from shardmath.base.config import Settings
    from shardmath.cuda.device import Device
    from shardmath.transport.mesh import Mesh

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class DeviceBytes:
    """Bytes of a GPU's memory for the array libraries. Keeps nothing alive by itself."""

    def __init__(self, address: int, nbytes: int, device: str) -> None:
        self.address = address
        self.nbytes = nbytes
        self.device = device
        self.__cuda_array_interface__ = described_bytes(address, nbytes)


Memory = Bytes | DeviceBytes


class Fence(Protocol):
    """The work that was asked of a device up to a moment."""

    def passed(self) -> bool:
        """Whether all of it is done. Never blocks."""


class _NonePending(Fence):
    """A fence of cores, which leave no work behind."""

    def passed(self) -> bool:
        return True


_NONE_PENDING = _NonePending()


class Segment(Immutable):
    """`nbytes` of memory that one rank exports: its `index`-th segment."""

    rank: int
    index: int
    nbytes: int


class Transport(ABC):
    """One way to reach peers' memory, for the ranks of one group.

    The order is: the owner calls `reserve`, then `announce` to the peers that will use the segment;
    once the owner has told them so by other means (an exchange on the board), a peer calls `attach`
    and then `view`. None of these is collective.
    """

    name: ClassVar[str]  # that of its module too
    preference: ClassVar[int]  # of several that can be used, the one with the least is
    interface: ClassVar[str]  # the protocol by which array libraries take its memory
    spare_bytes: ClassVar[int]  # the most that a segment should exceed what was asked for
    drops_at_once: ClassVar[int] = 0  # so many small blocks that were dropped share a fence
    grows: ClassVar[bool] = True  # whether there can be more segments than one
    runs_ahead_by: int = 0  # bytes that may wait for the device before the host does
    device: str  # where the memory is: "cpu", or like "cuda:0"

    @classmethod
    @abstractmethod
    def probe(cls, ordinal: int = 0) -> str:
        """Why it does not work on this machine, or with its GPU `ordinal`; empty if it works.

        Found out by trying.
        """

    @classmethod
    def unreached(cls, mesh: Mesh, group: ProcessGroup) -> str:
        """Why it does not reach all ranks; empty if it does. By default one machine is reached."""
        if mesh.real_hosts == 1:
            return ""
        return (
            f"it reaches the memory of one machine only, and the ranks are on {mesh.real_hosts}: "
            f"{', '.join(dict.fromkeys(mesh.hosts))}"
        )

    @classmethod
    @abstractmethod
    def create(cls, mesh: Mesh, device: Device | None, settings: Settings) -> Transport:
        """The transport of this rank. Local: `join` is what ranks do together."""

    def join(self, group: ProcessGroup) -> None:  # noqa: B027 - most have nothing to do
        """Set up what all ranks make together, before the first `reserve`. Collective."""

    @abstractmethod
    def reserve(self, nbytes: int) -> Segment:
        """A new segment of this rank, of at least `nbytes`; its memory is there after `commit`.

        Raises HeapExhausted when there is no room for it; nothing is then reserved.
        """

    @abstractmethod
    def release(self) -> None:
        """Take back the last `reserve`, of a segment that no peer was told of."""

    def commit(self, index: int, offset: int, nbytes: int) -> None:  # noqa: B027
        """Back a range of an own segment with memory if it has none yet. Raises HeapExhausted.

        By default `reserve` has already done so.
        """

    def decommit(self, index: int, offset: int, nbytes: int) -> None:  # noqa: B027
        """Give a range's memory back to the system, where it can be; the addresses stay valid."""

    def announce(self, index: int, peers: Iterable[int]) -> None:  # noqa: B027 - all may know it
        """Hand the peers what they need to attach an own segment. Sends once per peer."""

    def held(self) -> list[tuple[int, int]]:
        """(rank, index) of the peers' segments that this rank can attach, or has attached."""
        return []

    def forget_announcements(self, rank: int, held: Container[int]) -> None:  # noqa: B027
        """Announce to `rank` anew, when they are next used, own segments that are not `held` there.

        An exception in the receiving rank may have lost what was sent.
        """

    @abstractmethod
    def attach(self, rank: int, index: int) -> Segment:
        """Map a segment that `rank` has announced. Cheap when it is mapped already."""

    @abstractmethod
    def address(self, rank: int, index: int, offset: int, nbytes: int) -> int | None:
        """Where bytes of an attached segment lie for this process and its device, or None.

        Raises CollectiveMismatch when the segment does not hold them.
        """

    @abstractmethod
    def lease(self, index: int) -> object:
        """An object that keeps an own segment mapped for as long as it is referred to."""

    def view(self, rank: int, index: int, offset: int, nbytes: int) -> Memory | None:
        """The bytes of an attached segment, for arrays to lie on, or None without an address.

        By default on a GPU.
        """
        address = self.address(rank, index, offset, nbytes)
        return None if address is None else DeviceBytes(address, nbytes, self.device)

    def fence(self) -> Fence | None:
        """A fence behind all that this process has asked of its device; None if none can be set.

        None can be set while a CUDA graph is captured.
        """
        return _NONE_PENDING

    @abstractmethod
    def get(self, rank: int, index: int, offset: int, into: Memory, stream: int = 0) -> None:
        """Fill `into` with the bytes at `offset` of an attached segment.

        On the host they are there on return; on a GPU, once `stream` gets there. Raises
        CollectiveMismatch when the segment does not hold them, RankFailure or OpTimeout when its
        owner does not serve them.
        """

    @abstractmethod
    def put(self, rank: int, index: int, offset: int, data: Memory, stream: int = 0) -> None:
        """Write `data` to an attached segment. Its owner sees all of it after `quiet`.

        On the host `data` can be reused on return; on a GPU, once `stream` gets there. Raises as
        `get`.
        """

    def quiet(self, rank: int, stream: int = 0) -> None:  # noqa: B027 - most `put` at once
        """Wait until `rank` would see what was `put` there; on a GPU, make `stream` wait."""

    @abstractmethod
    def close(self) -> None:
        """Drop all descriptors. Mappings that arrays still use stay until the arrays go."""


class DescriptorTransport(Transport):
    """A transport whose segments travel as descriptors over `mesh`, once to each peer."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._announced: set[tuple[int, int]] = set()  # (peer, index of an own segment)
        # Each segment is sent, and received, by one thread, which an exception before the release
        # of this lock must not keep from going on: so it may enter again.
        self._introducing = threading.RLock()

    @abstractmethod
    def _introduce(self, index: int, peers: Sequence[int]) -> None:
        """Send these peers an own segment, and note each in `_announced` once that is done."""

    @abstractmethod
    def _known_segments(self) -> Iterable[tuple[int, int]]:
        """(rank, index) of the segments that this rank can use: its own, and those attached."""

    @staticmethod
    def _tag(index: int | None = None) -> str:
        """The tag of a segment's descriptor, or without an index the prefix of all such tags."""
        return f"segment {'' if index is None else index}"

    def announce(self, index: int, peers: Iterable[int]) -> None:
        with self._introducing:
            known = self._announced
            new = [p for p in peers if p != self._mesh.rank and (p, index) not in known]
            if new:
                self._introduce(index, new)

    def held(self) -> list[tuple[int, int]]:
        return [*self._known_segments(), *self._mesh.arrived(self._tag())]

    def forget_announcements(self, rank: int, held: Container[int]) -> None:
        self._announced -= {
            (peer, index) for peer, index in self._announced if peer == rank and index not in held
        }


def require_within(segment: Segment, offset: int, nbytes: int) -> None:
    """Raise CollectiveMismatch unless `segment` holds the bytes that its owner has announced."""
    if not 0 <= offset <= offset + nbytes <= segment.nbytes:
        raise CollectiveMismatch(
            f"rank {segment.rank} announced bytes {offset} to {offset + nbytes} of its segment "
            f"{segment.index}, which has {segment.nbytes}"
        )
