"""Performing a product whose factors come while it runs: see `paneled` for the order.

What this rank has itself is copied first, by a kernel on the product's stream. What peers have is
pulled by copy engines on a second stream, which writes after each piece how far it has come; the
product, which fills every multiprocessor, only reads these words. No kernel may be needed beside
it: it would not find room. Every wait of the product has a deadline.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardmath.arrays import dtypes
from shardmath.cuda.driver import call
from shardmath.cuda.kernel import Argument
from shardmath.cuda.tensormap import ALIGNMENT, NBYTES, tensor_map
from shardmath.geometry import Move
from shardmath.local.epilog import MatmulEpilog
from shardmath.local.gpu import Matrix
from shardmath.operators.lanes import Lane
from shardmath.operators.matmul.gpu.engines import EngineCopies, engine_copies
from shardmath.operators.matmul.gpu.gathering import Places
from shardmath.operators.matmul.gpu.paneled import (
    DEPTH,
    MOST_REGIONS,
    TILE_ROWS,
    Fetch,
    Walk,
    walk,
)
from shardmath.operators.matmul.gpu.share import Operands, Share
from shardmath.operators.matmul.panels import clip
from shardmath.operators.showing import matrix_of
from shardmath.redistribution.copies import lowered
from shardmath.redistribution.device import Box, BoxCopies

__all__ = ["Arriving"]

_WIDTH, _CLUSTER, _STAGES, _THREADS = 256, 2, 4, 384
_DTYPES = ("float16", "bfloat16")
_LEAST_FLOPS = 2e11  # of a rank: below, gathering first and cuBLASLt are as fast
_ROOM = 8 << 30  # bytes of panels
_LEAST_WIDTH = 1024  # rows and columns of a rank


@dataclass(frozen=True)
class _Side:
    """A factor as the kernel sees it: rows x k (side 0) or k x columns (side 1)."""

    index: int  # 0: op(A), 1: op(B)
    own: Matrix  # this rank's local array, in this orientation
    moves: tuple[Move, ...]
    place: tuple[int, int] | None  # where it lies in `own`, if nothing needs to move
    shape: tuple[int, int]
    turned: bool  # against the operand

    @property
    def along_k(self) -> bool:
        return self.own.by_columns == (self.shape_k_axis == 0)

    @property
    def shape_k_axis(self) -> int:
        return 0 if self.is_right else 1

    @property
    def is_right(self) -> bool:
        return (self.index == 1) != self.turned

    def panel(self, address: int) -> Matrix:
        """Memory for all of it, in the order of the operand, its lines 16 bytes aligned."""
        rows, columns = self.shape
        pitch = -(-(rows if self.own.by_columns else columns) // 8) * 8
        strides = (1, pitch) if self.own.by_columns else (pitch, 1)
        return Matrix(address, rows, columns, *strides, self.own.dtype)

    def nbytes(self) -> int:
        """Of that memory."""
        panel = self.panel(0)
        lines = panel.columns if self.own.by_columns else panel.rows
        return 2 * lines * max(panel.row_stride, panel.column_stride)

    def lying(self) -> Matrix:
        """Where it lies, if nothing needs to move."""
        assert self.place is not None
        (row, column), (rows, columns) = self.place, self.shape
        return self.own.part((row, row + rows), (column, column + columns))

    def clipped(self, fetch: Fetch) -> list[Move]:
        """The moves of a fetch, within its own part of the panel."""
        across, k = (1, 0) if self.is_right else (0, 1)
        found = [part for move in self.moves for part in clip(move, across, fetch.lo, fetch.hi)]
        return [part for move in found for part in clip(move, k, fetch.k_lo, fetch.k_hi)]

    def part(self, panel: Matrix, fetch: Fetch) -> Matrix:
        """A fetch's part of the panel."""
        across, k = (fetch.lo, fetch.hi), (fetch.k_lo, fetch.k_hi)
        return panel.part(k, across) if self.is_right else panel.part(across, k)


class Arriving:
    """One execution of a product on arrival, of op(A) and op(B) into `out`."""

    def __init__(self, share: Share, operands: Operands, lane: Lane, out: Matrix) -> None:
        self._share = share
        self._operands = operands
        self._lane = lane
        self._device = lane.team.device
        self._turned = out.column_stride != 1
        self._out = out.transposed() if self._turned else out
        first = 1 if self._turned else 0
        self._sides = (self._side(first), self._side(1 - first))
        self._depth = self._sides[0].shape[1]

    def _side(self, index: int) -> _Side:
        feed, own = self._share.feeds[index], matrix_of(self._operands.factors[index])
        moves, place, shape = feed.moves, feed.place, feed.shape(0, feed.extent)
        if self._turned:
            own, shape = own.transposed(), shape[::-1]
            moves = tuple(Move(move.src, move.dst, move.runs[::-1]) for move in moves)
            place = None if place is None else place[::-1]
        return _Side(index, own, moves, place, shape, self._turned)

    @property
    def misfit(self) -> str:
        """Why the product cannot, or should not, be computed so; "" where it can."""
        return self._misfit_of_kind() or self._misfit_of_size()

    def _misfit_of_kind(self) -> str:
        strategy, operands, out = self._share.strategy, self._operands, self._out
        problem = strategy.problem
        if self._device.arch != "sm_90" or problem.dtype not in _DTYPES:
            return "the kernel multiplies halves on GPUs of capability 9.0"
        if strategy.reduces or strategy.moves_result or not strategy.sums.disjoint():
            return "ranks share elements of the result"
        if out.dtype != problem.dtype or out.column_stride != 1 or out.row_stride < out.columns:
            return "the kernel writes halves, row by row or column by column"
        if problem.epilog is not MatmulEpilog.DEFAULT or operands.alpha != 1:
            return "the kernel has no epilog and no alpha"
        if operands.c is not None and operands.beta != 0:
            return "the kernel adds no C"
        return ""

    def _misfit_of_size(self) -> str:
        out = self._out
        if not any(feed.gathers for feed in self._share.feeds):
            return "all lies here"
        flops = 2.0 * out.rows * out.columns * self._depth
        if flops < _LEAST_FLOPS or min(out.rows, out.columns, self._depth) < _LEAST_WIDTH:
            return "the product is small"
        if sum(side.nbytes() for side in self._sides if side.place is None) > _ROOM:
            return "the panels are large"
        here = [side.lying() for side in self._sides if side.place is not None]
        return "" if all(map(_is_loadable, here)) else "a factor is not aligned for the kernel"

    def prepare(self) -> None:
        """Take memory for the panels and the words. Raises HeapExhausted."""
        for side in self._sides:
            if side.place is None:
                self._lane.buffer(f"panel {'ab'[side.index]}", side.nbytes())
        self._lane.buffer("come", 8 * 64)

    def run(self, places: Callable[[int], Places]) -> bool:
        """Put it on the stream; false, with nothing done, where copy engines do not suit.

        `places(index)` says where each rank's part of a factor lies.
        """
        stream, lane = self._operands.stream, self._lane
        found = [self._oriented(places(side.index)) for side in self._sides]
        panels = [
            side.panel(lane.address(f"panel {'ab'[side.index]}"))
            if side.place is None
            else side.lying()
            for side in self._sides
        ]
        plan = self._plan(found)
        if plan is None:
            return False
        words = lane.address("come")
        call("cuMemsetD8Async", words, 0, 8 * sum(plan.walk.parts), stream)
        for side, at in zip(self._sides, (0, plan.walk.parts[0]), strict=True):
            if side.place is not None:
                call("cuMemsetD32Async", words + 8 * at, self._depth, 1, stream)
        side_stream = lane.side
        call("cuEventRecord", lane.event("fork"), stream)
        call("cuStreamWaitEvent", side_stream, lane.event("fork"), 0)
        for own, panel, address in zip(plan.own, panels, self._own_addresses(), strict=True):
            if own is not None:
                own.launch(stream, [address], [panel.address])
        sources = [
            [place(rank)[0] if needed else 0 for rank, needed in enumerate(ranks)]
            for place, ranks in zip(found, plan.needed, strict=True)
        ]
        for fetch, copies, number in plan.fetches:
            target = self._sides[fetch.side].part(panels[fetch.side], fetch)
            if copies is not None:
                copies.launch(side_stream, sources[fetch.side], target.address)
            call("cuStreamWriteValue64", side_stream, words + 8 * number, fetch.k_hi, 0)
        self._launch(plan.walk, panels, words)
        call("cuEventRecord", lane.event("join"), side_stream)
        call("cuStreamWaitEvent", stream, lane.event("join"), 0)
        return True

    def _oriented(self, places: Places) -> Places:
        """The same for factors that are turned."""
        if not self._turned:
            return places

        def turned(rank: int) -> tuple[int, tuple[int, ...]]:
            address, strides = places(rank)
            return address, strides[::-1]

        return turned

    def _own_addresses(self) -> list[int]:
        return [side.own.address for side in self._sides]

    # -- the plan, kept with the share -------------------------------------------------------------

    def _plan(self, found: Sequence[Places]) -> _Plan | None:
        ranks = range(self._lane.team.size)
        needed = [
            {move.src for move in side.moves} if side.place is None else set()
            for side in self._sides
        ]
        strides = tuple(
            tuple((rank, place(rank)[1]) for rank in sorted(need))
            for need, place in zip(needed, found, strict=True)
        )
        key = ("arriving", self._turned, strides)
        kept = self._share.kept
        if key not in kept:
            kept[key] = self._planned(found, needed, ranks)
        plan: _Plan | None = kept[key]
        return plan

    def _planned(
        self, found: Sequence[Places], needed: Sequence[set[int]], ranks: Sequence[int]
    ) -> _Plan | None:
        own_rank, item = self._lane.team.rank, dtypes.of(self._out.dtype).itemsize
        costs = []
        for side, extent in zip(self._sides, (self._out.rows, self._out.columns), strict=True):
            remote = sum(move.elements for move in side.moves if move.src != own_rank)
            costs.append(item * remote / extent if side.place is None else 0.0)
        processors = self._device.processors // _CLUSTER * _CLUSTER
        shape = self._out.rows, self._out.columns, self._depth
        made = walk(shape, (costs[0], costs[1]), width=_WIDTH, cluster=_CLUSTER, blocks=processors)
        fetches = []
        for fetch in made.fetches:
            side = self._sides[fetch.side]
            if side.place is not None:
                continue
            panel, place = side.panel(0), found[fetch.side]
            steps = panel.row_stride * item, panel.column_stride * item
            moves = [move for move in side.clipped(fetch) if move.src != own_rank]
            moves.sort(key=lambda move: (move.src < own_rank, move.src))
            copies = [lowered(move, item, place(move.src)[1], steps) for move in moves]
            engines = engine_copies(copies)
            if engines is None:
                return None
            number = fetch.part + (made.parts[0] if fetch.side else 0)
            fetches.append((fetch, engines if copies else None, number))
        own = []
        for side, place in zip(self._sides, found, strict=True):
            panel = side.panel(0)
            steps = panel.row_stride * item, panel.column_stride * item
            mine = [move for move in side.moves if move.src == own_rank and move.elements]
            boxes = [
                Box.of(lowered(Move(0, 0, m.runs), item, place(own_rank)[1], steps), 0)
                for m in mine
            ]
            own.append(BoxCopies(self._device, boxes) if boxes and side.place is None else None)
        reached = tuple(tuple(rank in need for rank in ranks) for need in needed)
        return _Plan(made, tuple(fetches), tuple(own), reached)

    # -- the kernel --------------------------------------------------------------------------------

    def _launch(self, made: Walk, panels: Sequence[Matrix], words: int) -> None:
        out, team = self._out, self._lane.team
        left, right = self._sides
        boxes = out.address % ALIGNMENT == 0 and 2 * out.row_stride % ALIGNMENT == 0
        defines = (
            f"ELEMENT={out.dtype.capitalize()}",
            f"A_ALONG_K={left.along_k:d}",
            f"B_ALONG_K={right.along_k:d}",
            f"WIDTH={_WIDTH}",
            f"CLUSTER={_CLUSTER}",
            f"STAGES={_STAGES}",
            f"BOXES={boxes:d}",
            f"REGIONS={MOST_REGIONS}",
        )
        shared = 1024 + _STAGES * (TILE_ROWS + _WIDTH) * DEPTH * 2 + 2 * 2 * 64 * 32 * 2
        kernel = team.kernel("paneled", "paneled", defines, shared=shared, features="a")
        pitch = out.row_stride
        c_map = (out.address, out.dtype, out.columns, out.rows, pitch, 64, 32)
        packed = self._map(left, panels[0]) + self._map(right, panels[1])
        packed += tensor_map(*c_map) if boxes else bytes(NBYTES)
        packed += team.packed()
        packed += struct.pack("QQQ", words, out.address, 2 * pitch)
        counts = (len(made.regions), made.units, self._depth, out.columns, out.rows, 0)
        packed += struct.pack("6I", *counts)
        for region in made.regions:
            numbers = (
                *(region.first, region.row, region.heights, region.column, region.across),
                *(region.rows_part, made.parts[0] + region.columns_part, 0),
            )
            packed += struct.pack("8I", *numbers)
        packed += bytes(32 * (MOST_REGIONS - len(made.regions)))
        packed += bytes(-len(packed) % 64)
        blocks = min(self._device.processors // _CLUSTER, made.units) * _CLUSTER
        kernel.launch(self._operands.stream, blocks, _THREADS, Argument(packed))

    def _map(self, side: _Side, panel: Matrix) -> bytes:
        """The struct `TensorMap` of a factor, in boxes as paneled.cu loads them."""
        rows, columns = (
            (panel.columns, panel.rows)
            if panel.by_columns
            else (
                panel.rows,
                panel.columns,
            )
        )
        pitch = max(panel.row_stride, panel.column_stride)
        if side.is_right:
            height = (_WIDTH if side.along_k else DEPTH) // _CLUSTER
        else:
            height = TILE_ROWS if side.along_k else DEPTH
        return tensor_map(panel.address, panel.dtype, columns, rows, pitch, height)


@dataclass(frozen=True)
class _Plan:
    """What is launched: the walk, copies and the number of the word of each fetch, own copies, and
    by side and rank whether its part is read.
    """

    walk: Walk
    fetches: tuple[tuple[Fetch, EngineCopies | None, int], ...]
    own: tuple[BoxCopies | None, ...]
    needed: tuple[tuple[bool, ...], ...]


def _is_loadable(x: Matrix) -> bool:
    """Whether boxes of it can be loaded where it lies."""
    if min(abs(x.row_stride), abs(x.column_stride)) != 1:
        return False
    pitch = x.column_stride if x.by_columns else x.row_stride
    width = x.rows if x.by_columns else x.columns
    return pitch >= width and 2 * pitch % ALIGNMENT == 0 and x.address % ALIGNMENT == 0
