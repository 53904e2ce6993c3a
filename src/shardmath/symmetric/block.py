"""A block of the heap: where it lies, and who may still use it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardmath.transport.base import Fence

__all__ = ["Block", "Location"]


@dataclass(frozen=True)
class Location:
    """Where a block lies in its owner's memory."""

    segment: int
    offset: int


class Block:
    """`nbytes` of the heap.

    `shared` holds the marks, (group, number), that every rank of the group must set before the
    block can be reused; `announced_to`, for each group of GPUs that knows where it lies, says
    whether an operation there was given up. `freed`: the user has freed it. `unused`: no array of
    this rank refers to it. `fence`: behind what the device was doing when either was seen.
    `buffer()` is the heap's Buffer while there is one; `handles` are the weakly held objects
    through which this rank reaches the peers' blocks of the same number.
    """

    __slots__ = (
        "__weakref__",
        "address",
        "announced_to",
        "buffer",
        "fence",
        "freed",
        "handles",
        "location",
        "nbytes",
        "reserved",
        "shared",
        "unused",
    )

    def __init__(self, location: Location, nbytes: int, reserved: int, address: int) -> None:
        self.location = location
        self.nbytes = nbytes
        self.reserved = reserved
        self.address = address
        self.freed = False
        self.unused = False
        self.fence: Fence | None = None
        self.shared: set[tuple[int, int]] = set()
        self.announced_to: set[Callable[[], bool]] = set()
        self.buffer: Callable[[], Any] = _nothing
        self.handles: list[weakref.ref[Any]] = []

    @property
    def released(self) -> bool:
        """Whether this rank will touch neither the block nor its peers' blocks again."""
        return self.unused or (self.freed and not any(handle() for handle in self.handles))

    @property
    def idle(self) -> bool:
        """Whether the device does nothing more with a block that was dropped or freed."""
        return self.fence is not None and self.fence.passed()

    @property
    def is_lost(self) -> bool:
        """Whether a rank that is late may still write to the block, at any time."""
        return any(gave_up() for gave_up in self.announced_to)

    def __repr__(self) -> str:
        return f"Block({self.nbytes} bytes at {self.location.segment}:{self.location.offset})"


def _nothing() -> None:
    return None
