"""Passes over memory on cores, block by block: gathered, transformed in a cache, and written.

`Blocks` says, from geometry alone, which blocks there are: axes that are transformed are whole in
each. A `Pass` binds them to memory, and is shared by the threads of the rank. One of few blocks is
bound whole: every copy and every call of the library that transforms is ready when the ranks agree.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from shardmath.arrays.base import HostArray
from shardmath.base.immutable import Immutable
from shardmath.base.integers import slices
from shardmath.base.recorder import spanned
from shardmath.context.context import Context
from shardmath.geometry import Move
from shardmath.local.fft import (
    COMPLETING,
    HALVING,
    Kind,
    Norm,
    bound_transform,
    keeps_shape,
    starts_threads,
)
from shardmath.redistribution import StridedCopy, Transfer, Window
from shardmath.redistribution.bound_copies import Calls, bind, bind_array, part_of, run
from shardmath.redistribution.copies import Strides, own_first

BLOCK_BYTES = 1 << 20  # of a block: it and its source fit in the second cache of a core
_LINE = 64  # bytes of a cache line
_BOUND_BLOCKS = 64  # of a pass that is bound whole
_CACHED = 32 << 10  # bytes of a block that is transformed where it is wanted
_KEPT_SCRATCH = 16 << 20  # bytes, for what cannot be cut; more is taken when it is needed

Block = tuple[slice, ...]  # of a local array


class Blocks:
    """The blocks of what `transfer` brings `rank`, in the order of its memory. Pure.

    `axes` are transformed there; a real transform changes the length of the last. Elements have
    `itemsize` bytes: before the transform, or after it where that is more, as for R2C. Without
    `cut` all is one block.
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
        cut: bool = True,
    ) -> None:
        self.transfer, self.rank = transfer, rank
        self.axes, self.kind, self.order = axes, kind, order
        self.stays = transfer.stays
        shape = transfer.result_shape(rank)
        self._blocks = (
            list(self._cut(shape, itemsize)) if cut else [tuple([slice(0, n) for n in shape])]
        )
        self._copies: dict[int, tuple[object, list[StridedCopy]]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, number: int) -> Block:
        return self._blocks[number]

    def transformed(self, number: int) -> Block:
        """The block after the transform, which may have changed the length of an axis."""
        block = self[number]
        if keeps_shape(self.kind):
            return block
        last = self.axes[-1]
        return tuple(slice(None) if axis == last else cut for axis, cut in enumerate(block))

    def copies(
        self, number: int, src_strides: Mapping[int, Strides], dst_strides: Strides
    ) -> list[StridedCopy]:
        """The copies that gather a block into an array of these strides in bytes, own part first.

        `src_strides` has those of every rank that something comes from. The answer is kept until
        strides change.
        """
        key = (tuple(src_strides.items()), dst_strides)
        held = self._copies.get(number)
        if held is None or held[0] != key:
            moves: Sequence[Move] = self.transfer.into(self.rank)
            if len(self) > 1:
                moves = [part for whole in moves for part in clipped(whole, self[number])]
            itemsize = self.transfer.itemsize
            copies = own_first(moves, self.rank, itemsize, src_strides, dst_strides)
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


class Pass(Immutable):
    """One pass of this rank over memory: to `target`, from all ranks' arrays in `windows`.

    Where nothing moves it reads `source`, and no window. `engine` transforms.
    """

    context: Context
    blocks: Blocks
    source: HostArray
    target: HostArray
    windows: Mapping[int, Window]
    engine: str = ""
    forward: bool = True
    norm: Norm = None

    def bound(self) -> Calls:
        """The calls that perform it, each time that they are made."""
        count = len(self.blocks)
        # torch has threads of its own
        threads = min(1 if starts_threads(self.engine) else self.context.threads, count)
        if threads <= 1:
            return self._part(range(count), 0)
        ends = [count * i // threads for i in range(threads + 1)]
        parts = [
            self._part(range(lo, hi), worker)
            for worker, (lo, hi) in enumerate(itertools.pairwise(ends))
        ]
        return [partial(_share, self.context, parts)]

    def _part(self, numbers: range, worker: int) -> Calls:
        """The calls that perform these blocks, on one thread."""
        scratches: dict[int, _Scratch] = self.context.cache("scratch of passes", dict)
        scratch = scratches.setdefault(worker, _Scratch())
        needs_room = self.blocks.axes and any(_is_large(self._to(number)) for number in numbers)
        if len(self.blocks) <= _BOUND_BLOCKS and not needs_room:
            return list(self._calls(numbers, scratch))
        return [lambda: run(self._calls(numbers, scratch))]

    def _to(self, number: int) -> HostArray:
        """Where a block goes."""
        return part_of(self.target, self.blocks.transformed(number))

    def _calls(self, numbers: range, scratch: _Scratch) -> Iterator[Callable[[], object]]:
        blocks = self.blocks
        for number in numbers:
            target = self._to(number)
            if not blocks.axes:
                yield from self._gathering(number, target)
                continue
            large = _is_large(target)
            if large and blocks.stays and blocks.kind in HALVING:  # which leaves its input as it is
                taken = part_of(self.source, blocks[number])
            else:
                taken = target
                # A small block stays in the first cache wherever it lies.
                small = len(blocks) == 1 and target.nbytes <= _CACHED
                if not (keeps_shape(blocks.kind) and (large or small)):
                    shape = tuple(cut.stop - cut.start for cut in blocks[number])
                    taken = self._scratch(scratch, "taken", shape, self.source.dtype)
                yield from self._gathering(number, taken)
            out = taken
            if not keeps_shape(blocks.kind):
                out = target
                if not large:
                    out = self._scratch(scratch, "made", target.shape, target.dtype)
            transform = bound_transform(
                taken,
                blocks.axes,
                out=out,
                kind=blocks.kind,
                forward=self.forward,
                norm=self.norm,
                engine=self.engine,
            )
            yield spanned(transform, "transform")
            if out is not target:
                yield from bind_array(out, target)

    def _gathering(self, number: int, into: HostArray) -> Calls:
        """The calls that bring a block from where it lies."""
        blocks = self.blocks
        if blocks.stays:
            return bind_array(part_of(self.source, blocks[number]), into)
        strides = {src: window.strides for src, window in self.windows.items()}
        copies = blocks.copies(number, strides, into.strides)
        return bind(copies, self.windows, Window.of(into), rank=blocks.rank)

    def _scratch(
        self, scratch: _Scratch, role: str, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> HostArray:
        """Where a block passes through the cache: it is read from there by transforms, since memory
        is read faster by copies. What is only read or written row by row lies dense.
        """
        dense = self.blocks.kind in {"taken": HALVING, "made": COMPLETING}[role]
        return scratch.array(role, shape, dtype, self.blocks.order, apart=not dense)


class _Scratch:
    """Memory of one thread that blocks pass through, one after the other, by what it is for."""

    def __init__(self) -> None:
        self._memory: dict[str, HostArray] = {}

    def array(
        self, role: str, shape: tuple[int, ...], dtype: np.dtype[Any], order: str, *, apart: bool
    ) -> HostArray:
        """An array there, its rows a little `apart`.

        Lines of a power of two of rows would all fight for the same few places of the cache.
        """
        extents = shape if order == "C" else shape[::-1]
        meet = apart and extents[-1] * dtype.itemsize % 512 == 0
        rows = (*extents[:-1], extents[-1] + (64 // dtype.itemsize if meet else 0))
        nbytes = math.prod(rows) * dtype.itemsize
        memory = self._memory.get(role)
        if nbytes > _KEPT_SCRATCH:
            memory = np.empty(nbytes, np.uint8)
        elif memory is None or memory.nbytes < nbytes:
            memory = self._memory[role] = np.empty(nbytes, np.uint8)
        held = np.ndarray(rows, dtype, memory.data)[..., : extents[-1]]
        return held if order == "C" else held.transpose()


def _is_large(block: HostArray) -> bool:
    """Whether a block, one that cannot be cut, is too large for a cache."""
    return block.nbytes > 8 * BLOCK_BYTES


def _share(context: Context, parts: Sequence[Calls]) -> None:
    """Perform the parts of a pass, each on a thread."""
    from shardmath.base.workers import Workers  # which few calls need

    threads = context.cache("threads of passes", lambda: Workers(context.threads))
    threads.run(partial(run, part) for part in parts)


def clipped(move: Move, block: Block) -> list[Move]:
    """The part of a move that ends in `block` of the destination, seen from the block's corner."""
    moves = [move]
    for axis, cut in enumerate(block):
        moves = [part for whole in moves for part in whole.clipped(axis, cut.start, cut.stop)]
    return moves
