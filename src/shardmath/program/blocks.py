"""An array in blocks of the size of a cache: what a pass over memory does to one at a time. Pure.

A block is gathered from where it lies, transformed before it leaves the cache, and written. Axes
that are transformed are whole in every block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Literal

from shardmath.geometry import Move
from shardmath.geometry.integers import slices
from shardmath.local.fft import Kind, keeps_shape
from shardmath.redistribution import StridedCopy, Transfer
from shardmath.redistribution.copies import own_first

BLOCK_BYTES = 1 << 20  # of a block: it and its source fit in the second cache of a core
_LINE = 64  # bytes of a cache line

Strides = tuple[int, ...]
Block = tuple[slice, ...]  # of a local array


class Blocks:
    """The blocks of what `transfer` brings `rank`, in the order of its memory.

    `axes` are transformed there; R2C and C2R change the length of the last. An element is of
    `itemsize` bytes, before or after, whichever is more for R2C.
    """

    def __init__(
        self,
        transfer: Transfer,
        rank: int,
        *,
        axes: tuple[int, ...] = (),
        kind: Kind = "C2C",
        order: Literal["C", "F"],
        itemsize: int,
    ) -> None:
        self.transfer, self.rank = transfer, rank
        self.axes, self.kind, self.order = axes, kind, order
        self.stays = transfer.stays
        self._blocks = list(self._cut(transfer.result_shape(rank), itemsize))
        self._copies: dict[int, tuple[object, list[StridedCopy]]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, number: int) -> Block:
        return self._blocks[number]

    def exceeds(self, nbytes: int) -> bool:
        """Whether a block of so many bytes, one that cannot be cut, is too large for a cache."""
        return nbytes > 8 * BLOCK_BYTES

    def whole(self, block: Block) -> Block:
        """The block after the transform, which may have changed the length of an axis."""
        if keeps_shape(self.kind):
            return block
        last = self.axes[-1]
        return tuple(slice(None) if axis == last else cut for axis, cut in enumerate(block))

    def copies(
        self, number: int, src_strides: Mapping[int, Strides], dst_strides: Strides
    ) -> list[StridedCopy]:
        """The copies that gather a block into an array of these strides in bytes, own part first.

        The answer is kept until strides change.
        """
        key = (tuple(src_strides.items()), dst_strides)
        held = self._copies.get(number)
        if held is None or held[0] != key:
            rank, itemsize = self.rank, self.transfer.itemsize
            moves = [m for whole in self.transfer.into(rank) for m in clipped(whole, self[number])]
            copies = own_first(moves, rank, itemsize, src_strides, dst_strides)
            held = self._copies[number] = (key, copies)
        return held[1]

    def _cut(self, shape: tuple[int, ...], itemsize: int) -> Iterator[Block]:
        if 0 in shape:
            return
        fixed = math.prod(shape[axis] for axis in self.axes)
        room = max(1, BLOCK_BYTES // (fixed * itemsize))
        extents = list(shape)
        fastest_first = range(len(shape))[:: 1 if self.order == "F" else -1]
        for axis in fastest_first:
            if axis not in self.axes:
                least = max(1, _LINE // itemsize) if axis == fastest_first[0] else 1
                extents[axis] = min(shape[axis], max(room, least))
                room = max(1, room // extents[axis])
        cuts = [slices(n, most) for n, most in zip(shape, extents, strict=True)]
        if self.order == "F":
            yield from (block[::-1] for block in itertools.product(*cuts[::-1]))
        else:
            yield from itertools.product(*cuts)


def clipped(move: Move, block: Block) -> list[Move]:
    """The part of a move that ends in `block` of the destination, seen from the block's corner."""
    moves = [move]
    for axis, cut in enumerate(block):
        moves = [part for whole in moves for part in whole.clipped(axis, cut.start, cut.stop)]
    return moves
