"""Where a rank's array lies, in the few numbers that its peers need to reach it."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from shardmath.symmetric.heap import Block, Location

__all__ = ["Exposed"]

_HEAD = struct.Struct("<IQQq")


@dataclass(frozen=True, slots=True)
class Exposed:
    """`nbytes` at `location` of a rank's memory hold its local array, or the part that is read.

    Element 0 is, or would be, `origin` bytes from there. Strides are bytes.
    """

    location: Location
    nbytes: int
    origin: int
    strides: tuple[int, ...]

    @classmethod
    def within(
        cls, block: Block, address: int, span: tuple[int, int], strides: tuple[int, ...]
    ) -> Exposed:
        """An array in `block` whose element 0 is at `address`, its bytes in `span` from there."""
        low, high = span
        first = address + low - block.address
        location = Location(block.location.segment, block.location.offset + first)
        return cls(location, high - low, -low, strides)

    def pack(self) -> bytes:
        """The bytes that `unpack` takes."""
        at = self.location
        head = _HEAD.pack(at.segment, at.offset, self.nbytes, self.origin)
        return head + struct.pack(f"<{len(self.strides)}q", *self.strides)

    @classmethod
    def unpack(cls, data: bytes) -> Exposed:
        """What a peer packed. Raises struct.error for data of another form."""
        segment, offset, nbytes, origin = _HEAD.unpack_from(data)
        strides = struct.unpack(f"<{(len(data) - _HEAD.size) // 8}q", data[_HEAD.size :])
        return cls(Location(segment, offset), nbytes, origin, strides)
