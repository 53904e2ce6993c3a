"""A strategy as passes over memory: gather a block, transform it in the cache, write it.

An exchange is fused with the transform that follows: a block is pulled from the ranks that hold it
and transformed before it leaves the cache. Axes that do not fit in a block together are transformed
in several passes. All of this is data, the same on every rank but for `rank`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from shardmath.arrays import dtypes
from shardmath.geometry import Layout, Move, Run
from shardmath.geometry.integers import slices
from shardmath.local.fft import Kind
from shardmath.operators.fft.strategy import Strategy, Transform
from shardmath.redistribution import StridedCopy, TransferPlan, lowered

__all__ = ["Block", "Pass", "passes"]

BLOCK_BYTES = 1 << 20  # of a block: it and its source fit in the second cache of a core
_LINE = 64  # bytes of a cache line

Order = Literal["C", "F"]
Strides = tuple[int, ...]
Block = tuple[slice, ...]  # of a local array


@dataclass(frozen=True)
class Pass:
    """Take the array from layout `source` to `layout`, and transform `axes` there.

    `kind` is not C2C where the last of `axes` turns from real to hermitian or back; `result` and
    `made` are the layout and the type afterwards.
    """

    source: Layout
    layout: Layout
    axes: tuple[int, ...]
    kind: Kind
    result: Layout
    dtype: str
    made: str
    order: Order

    @cached_property
    def transfer(self) -> TransferPlan:
        """What moves first."""
        return TransferPlan(self.source, self.layout, dtypes.of(self.dtype).itemsize)

    @cached_property
    def stays(self) -> bool:
        """Whether every rank has all that it needs, in the shape in which it needs it."""
        return self.source.same_as(self.layout)

    def blocks(self, rank: int) -> list[Block]:
        """The blocks of `rank`'s local array, in the order of its memory."""
        if rank not in self._blocks:
            self._blocks[rank] = list(self._cut(self.layout.local_shape(rank)))
        return self._blocks[rank]

    def exceeds(self, nbytes: int) -> bool:
        """Whether a block of so many bytes, one that cannot be cut, is too large for a cache."""
        return nbytes > 8 * BLOCK_BYTES

    def whole(self, block: Block) -> Block:
        """The same block after the transform, which may have changed the length of an axis."""
        if self.kind == "C2C":
            return block
        last = self.axes[-1]
        return tuple(slice(None) if axis == last else cut for axis, cut in enumerate(block))

    def copies(
        self, rank: int, block: int, src_strides: Mapping[int, Strides], dst_strides: Strides
    ) -> list[StridedCopy]:
        """What gathers a block of `rank` into an array of these strides in bytes, own part first.

        The answer is kept until strides change.
        """
        key = (tuple(src_strides.items()), dst_strides)
        held = self._copies.get((rank, block))
        if held is None or held[0] != key:
            itemsize = self.transfer.itemsize
            found = [
                lowered(move, itemsize, src_strides[move.src], dst_strides)
                for whole in self.transfer.into(rank)
                for move in clipped(whole, self.blocks(rank)[block])
            ]
            found.sort(key=lambda copy: (copy.src < rank, copy.src))
            held = self._copies[rank, block] = (key, found)
        return held[1]

    def __str__(self) -> str:
        taken = "" if self.stays else "take this rank's part from all ranks, "
        axes = ", ".join(map(str, self.axes))
        return f"{taken}{self.kind} along {axes}" if self.axes else f"{taken}no transform"

    def _cut(self, shape: tuple[int, ...]) -> Iterator[Block]:
        if 0 in shape:
            return
        itemsize = dtypes.of(self.made if self.kind == "R2C" else self.dtype).itemsize
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

    # What has been worked out so far; a pass is compared and printed by its fields alone.

    @cached_property
    def _blocks(self) -> dict[int, list[Block]]:
        return {}

    @cached_property
    def _copies(
        self,
    ) -> dict[tuple[int, int], tuple[tuple[object, ...], list[StridedCopy]]]:
        return {}


def passes(strategy: Strategy) -> tuple[Pass, ...]:
    """The passes that perform a strategy; at least one."""
    problem = strategy.problem
    found: list[Pass] = []
    at, dtype = problem.source, problem.dtype
    for step in strategy.steps:
        if not isinstance(step, Transform):
            continue  # a move is fused with the transform after it
        layout = step.layout
        halving = problem.kind == "R2C" and dtype == problem.dtype
        doubling = problem.kind == "C2R" and problem.axes[-1] in step.axes
        itemsize = max(dtypes.of(name).itemsize for name in (dtype, problem.result))
        groups = _groups(step.axes, layout.global_shape, itemsize, problem.order, halving, doubling)
        for index, group in enumerate(groups):
            real = (halving and index == 0) or (doubling and index == len(groups) - 1)
            result, made = (step.result, problem.result) if real else (layout, dtype)
            kind = problem.kind if real else "C2C"
            found.append(Pass(at, layout, group, kind, result, dtype, made, problem.order))
            at, layout, dtype = result, result, made
    if not at.same_as(problem.target):
        target = problem.target
        found.append(Pass(at, target, (), "C2C", target, dtype, dtype, problem.order))
    return tuple(found)


def _groups(
    axes: Sequence[int],
    shape: Sequence[int],
    itemsize: int,
    order: Order,
    halving: bool,
    doubling: bool,
) -> list[tuple[int, ...]]:
    """Axes that are transformed in one pass, since a block of all of them fits in the cache.

    The fastest in memory come first; but a real axis is the first to be halved, and the last to be
    completed. Within a group the real axis is last, as the transforms of libraries have it.
    """
    real = axes[0] if halving else axes[-1] if doubling else None
    rest = sorted((axis for axis in axes if axis != real), reverse=order == "C")
    ordered = rest if real is None else [real, *rest]
    groups: list[tuple[int, ...]] = []
    held = 0
    for axis in ordered:
        if groups and held * shape[axis] <= 2 * BLOCK_BYTES:  # better than one more pass
            held *= shape[axis]
            groups[-1] = (axis, *groups[-1])
        else:
            held = itemsize * shape[axis]
            groups.append((axis,))
    return groups[::-1] if doubling else groups


def clipped(move: Move, block: Block) -> Iterator[Move]:
    """The part of a move that ends in `block` of the destination, seen from the block's corner."""
    columns = [_clip(run, cut.start, cut.stop) for run, cut in zip(move.runs, block, strict=True)]
    for runs in itertools.product(*columns):
        yield Move(move.src, move.dst, runs)


def _clip(run: Run, lo: int, hi: int) -> list[Run]:
    """What of a run is written to lo, ..., hi - 1: whole blocks as one run, cut blocks alone."""
    step, length = max(run.dst_step, 1), run.length
    first = max(0, -(-(lo - run.dst_start) // step)) if run.count > 1 else 0
    found: list[Run] = []
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
            found.append(
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
            found.append(Run(1, end - begin, src, 0, begin - lo, 0))
    return found
