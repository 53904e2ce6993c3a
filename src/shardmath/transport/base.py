"""The verbs that every transport supplies, and the facts that it tells about itself.

Layers above ask the table for a view or an address; they never ask which transport they have. A
peer without an address answers None, and is then reached by `put` and `get` alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

__all__ = ["Bytes", "Probe", "Segment", "Transport"]

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Probe:
    """Whether a transport works here, and if not, why not."""

    name: str
    available: bool
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {'available' if self.available else self.reason}"


@dataclass(frozen=True)
class Segment:
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

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def probe(cls) -> Probe:
        """What works on this machine, found out by trying."""

    @abstractmethod
    def reserve(self, nbytes: int) -> Segment:
        """A new segment of this rank, of at least `nbytes`; pages are committed by `commit`.

        Raises HeapExhausted when the address space does not suffice; nothing is then reserved.
        """

    @abstractmethod
    def release(self) -> None:
        """Take back the last `reserve`, of a segment that no peer was told of."""

    @abstractmethod
    def commit(self, index: int, offset: int, nbytes: int) -> None:
        """Back a range of an own segment with memory, or raise HeapExhausted."""

    @abstractmethod
    def decommit(self, index: int, offset: int, nbytes: int) -> None:
        """Give a range's memory back to the system; the addresses stay valid."""

    @abstractmethod
    def announce(self, index: int, peers: Iterable[int]) -> None:
        """Hand the peers what they need to attach an own segment. Sends once per peer."""

    @abstractmethod
    def attach(self, rank: int, index: int) -> Segment:
        """Map a segment that `rank` has announced. Cheap when it is mapped already."""

    @abstractmethod
    def view(self, rank: int, index: int, offset: int, nbytes: int) -> Bytes | None:
        """The bytes of an attached segment in this process, or None where there is no address."""

    @abstractmethod
    def close(self) -> None:
        """Drop all descriptors. Mappings that arrays still use stay until the arrays go."""
