"""An array in blocks of the size of a cache: what a pass over memory does to one at a time. Pure.

A block is gathered from where it lies, transformed before it leaves the cache, and written. Axes
that are transformed are whole in every block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Literal

from shardmath.geometry import Move, Run
from shardmath.geometry.integers import slices
from shardmath.local.fft import Kind
from shardmath.redistribution import StridedCopy, Transfer, lowered

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
        if self.kind == "C2C":
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
            itemsize, rank = self.transfer.itemsize, self.rank
            copies = [
                lowered(move, itemsize, src_strides[move.src], dst_strides)
                for whole in self.transfer.into(rank)
                for move in clipped(whole, self[number])
            ]
            copies.sort(key=lambda copy: (copy.src < rank, copy.src))
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


def clipped(move: Move, block: Block) -> Iterator[Move]:
    """The part of a move that ends in `block` of the destination, seen from the block's corner."""
    columns = [_clip(run, cut.start, cut.stop) for run, cut in zip(move.runs, block, strict=True)]
    for runs in itertools.product(*columns):
        yield Move(move.src, move.dst, runs)


def _clip(run: Run, lo: int, hi: int) -> list[Run]:
    """The part of a run written to lo, ..., hi - 1: whole blocks as one run, cut ones alone."""
    step, length = max(run.dst_step, 1), run.length
    first = max(0, -(-(lo - run.dst_start) // step)) if run.count > 1 else 0
    clipped: list[Run] = []
    singles: list[int] = []
    if run.count == 1:
        singles.append(0)
    else:
        # Blocks first, ..., last - 1 start and end within the limits.
        last = min(run.count, (hi - length - run.dst_start) // step + 1)
        if last > first:
            src = run.src_start + first * run.src_step
            dst = run.dst_start + first * run.dst_step - lo
            several = last - first > 1
            clipped.append(
                Run(last - first, length, src, run.src_step * several, dst, step * several)
            )
            singles += [first - 1, last]
        else:
            near = range(max(0, first - 1), min(run.count, first + 2))
            singles += list(near)
    for index in singles:
        if not 0 <= index < run.count:
            continue
        start = run.dst_start + index * run.dst_step
        begin, end = max(lo, start), min(hi, start + length)
        if begin < end:
            src = run.src_start + index * run.src_step + begin - start
            clipped.append(Run(1, end - begin, src, 0, begin - lo, 0))
    return clipped
