"""One array of a call, as this rank's cores or GPU reach it: the descriptor that operators share.

It says where elements lie, and in which block of the heap, and so where peers find them. A
descriptor that is kept from one call to the next keeps no memory alive: the caller has the array.
"""

from __future__ import annotations

import struct
from dataclasses import field, replace
from functools import cached_property
from math import prod

from shardmath.arrays import dtypes
from shardmath.arrays.spec import Order, byte_span, order_of
from shardmath.base.immutable import Immutable
from shardmath.context.context import Context
from shardmath.symmetric.heap import Block, Location

_HEAD = struct.Struct("<IQQq")  # segment, offset, bytes, origin


class Exposed(Immutable):
    """The `nbytes` at `location` of a rank's memory that hold its array, or the part that is read.

    Element (0, 0, ...) is, or would be, `origin` bytes from there. Strides are in bytes.
    """

    location: Location
    nbytes: int
    origin: int
    strides: tuple[int, ...]

    def pack(self) -> bytes:
        """The bytes that `unpack` takes."""
        location = self.location
        head = _HEAD.pack(location.segment, location.offset, self.nbytes, self.origin)
        return head + struct.pack(f"<{len(self.strides)}q", *self.strides)

    @classmethod
    def unpack(cls, data: bytes) -> Exposed:
        """What a peer has packed. Raises struct.error for malformed data."""
        segment, offset, nbytes, origin = _HEAD.unpack_from(data)
        strides = struct.unpack(f"<{(len(data) - _HEAD.size) // 8}q", data[_HEAD.size :])
        return cls(Location(segment, offset), nbytes, origin, strides)


class Operand(Immutable):
    """Memory of this rank's cores or GPU, seen as an array.

    `address` is that of element (0, 0, ...), `strides` are in bytes. `block` is the heap block that
    it lies in, which peers can attach, None for ordinary memory; `keep` keeps the memory alive.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    block: Block | None = field(default=None, repr=False)
    keep: object = field(default=None, repr=False, compare=False)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return dtypes.of(self.dtype).itemsize

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.size * self.itemsize

    @property
    def order(self) -> Order:
        """How the elements lie in memory; see `order_of`."""
        return order_of(self.shape, tuple(stride // self.itemsize for stride in self.strides))

    @cached_property
    def span(self) -> tuple[int, int]:
        """The first byte and the one behind the last, counted from `address`; (0, 0) if empty."""
        return byte_span(self.shape, self.strides, self.itemsize)

    @cached_property
    def exposed(self) -> Exposed:
        """Where peers find this array, which is on the heap."""
        assert self.block is not None, "on the heap"
        (low, high), start = self.span, self.block.location
        if self.size:
            start = start.behind(self.address + low - self.block.address)
        return Exposed(start, high - low, -low, self.strides)

    @cached_property
    def packed_place(self) -> bytes:
        """`exposed`, packed, for peers; b"" for ordinary memory."""
        return b"" if self.block is None else self.exposed.pack()

    def is_there(self, context: Context) -> bool:
        """Whether its address is still in the same block of the heap, which was not freed."""
        block = context.heap.find(self.address)
        return block is self.block and not (block is not None and block.freed)

    def without_memory(self) -> Operand:
        """This operand without a reference to its array, which the caller keeps."""
        return replace(self, keep=None)

    def transposed(self) -> Operand:
        """This operand with its axes reversed, on the same memory."""
        return Operand(
            self.address, self.shape[::-1], self.strides[::-1], self.dtype, self.block, self.keep
        )

    def overlaps(self, other: Operand) -> bool:
        """Whether the bytes between the first and the last of one reach into the other's."""
        (low, high), (first, last) = self.span, other.span
        return (
            self.address + low < other.address + last
            and other.address + first < self.address + high
        )
