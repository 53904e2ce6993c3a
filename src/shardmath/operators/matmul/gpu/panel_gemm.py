"""Performing a product whose operands come while it runs, in panels.

The order of tiles is `panel_schedule`'s, the order along k is `k_order`'s.

What peers have is pulled by copy engines on a second stream, which writes after each piece how far
it has come; the product, which fills every multiprocessor, only reads these words. No kernel may be
needed beside it: it would not find room. What this rank has itself is read where it lies; where it
cannot be, a kernel on the product's stream copies it first. Every wait of the product has a
deadline.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from shardmath.cuda.constant import Constant
from shardmath.cuda.driver import call
from shardmath.cuda.kernel import Argument
from shardmath.cuda.tensormap import ALIGNMENT
from shardmath.geometry import Move
from shardmath.local.epilog import MatmulEpilog
from shardmath.local.gpu import Matrix
from shardmath.operators.lanes import Lane
from shardmath.operators.matmul.gpu.copy_engines import EngineCopies, engine_copies
from shardmath.operators.matmul.gpu.k_order import KOrder
from shardmath.operators.matmul.gpu.panel_operand import SUMS_BYTES, TILINGS, PanelOperand
from shardmath.operators.matmul.gpu.panel_schedule import (
    MOST_REGIONS,
    Fetch,
    PanelSchedule,
    Tiles,
    walk,
)
from shardmath.operators.matmul.gpu.rank_plan import Operands, RankPlan
from shardmath.operators.matmul.strategy import HOPPER
from shardmath.operators.published import Places, matrix_of
from shardmath.redistribution.copies import StridedCopy, lowered
from shardmath.redistribution.device import Box, BoxCopies

__all__ = ["PanelGemm"]

_THREADS = 384
_LEAST_SECONDS = 2.5e-4  # of a rank: below, gathering first and cuBLASLt are as fast
_LEAST_WIDTH = 1024  # rows and columns of a rank
_LEAST_ROUND = 0.5  # of the clusters of blocks have a unit of tiles: then all share out the steps
_ROOM = 8 << 30  # bytes of panels
_WORDS = 64  # how far fetches have come; behind them by block, whether its sums are there
_FIRST_BYTES = 4 << 20  # of the first piece: what comes sooner takes longer than its bytes


class PanelGemm:
    """One execution of a product on arrival, of op(A) and op(B) into `out`."""

    def __init__(self, rank_plan: RankPlan, operands: Operands, lane: Lane, out: Matrix) -> None:
        self._rank_plan = rank_plan
        self._operands = operands
        self._lane = lane
        self._device = lane.team.device
        self._turned = out.column_stride != 1
        self._out = out.transposed() if self._turned else out
        first = 1 if self._turned else 0
        self._extent = rank_plan.operand_plans[0].extent  # of k
        self._order = first, 1 - first  # which operand is on the left, which on the right

    @cached_property
    def _sides(self) -> tuple[PanelOperand, PanelOperand]:
        return self._side(self._order[0]), self._side(self._order[1])

    def _side(self, index: int) -> PanelOperand:
        operand_plan, own = (
            self._rank_plan.operand_plans[index],
            matrix_of(self._operands.factors[index]),
        )
        moves, place, shape = (
            operand_plan.moves,
            operand_plan.place,
            operand_plan.shape(0, operand_plan.extent),
        )
        if self._turned:
            own, shape = own.transposed(), shape[::-1]
            moves = tuple(Move(move.src, move.dst, move.runs[::-1]) for move in moves)
            place = None if place is None else place[::-1]
        is_right = (index == 1) != self._turned
        rank, tiling = self._lane.team.rank, TILINGS[self._out.dtype]
        return PanelOperand(
            index, is_right, own, moves, place, shape, rank, tiling, self._rank_plan.kept
        )

    @property
    def unsupported(self) -> str:
        """Why the product cannot, or should not, be computed so; "" where it can."""
        return self._unsupported_kind() or self._unsupported_size()

    def _unsupported_kind(self) -> str:
        strategy, operands, out = self._rank_plan.strategy, self._operands, self._out
        problem = strategy.problem
        if self._device.arch != "sm_90" or problem.dtype not in TILINGS:
            return "the kernels multiply halves and float64 on GPUs of capability 9.0"
        if strategy.reduces or strategy.moves_result or not strategy.sums.disjoint():
            return "ranks share elements of the result"
        if out.dtype != problem.dtype or out.column_stride != 1 or out.row_stride < out.columns:
            return "the kernels write the operands' type, row by row or column by column"
        if problem.epilog is not MatmulEpilog.DEFAULT or operands.alpha != 1:
            return "the kernels have no epilog and no alpha"
        if operands.c is not None and operands.beta != 0:
            return "the kernels add no C"
        return ""

    def _unsupported_size(self) -> str:
        out = self._out
        if not any(operand_plan.gathers for operand_plan in self._rank_plan.operand_plans):
            return "all lies here"
        seconds = 2.0 * out.rows * out.columns * self._extent / HOPPER.rate(out.dtype)
        if seconds < _LEAST_SECONDS or min(out.rows, out.columns, self._extent) < _LEAST_WIDTH:
            return "the product is small"
        tiles = self._tiles()
        if prod(tiles.shape) < _LEAST_ROUND * tiles.clusters:
            return "the product has few tiles"
        if sum(side.nbytes() for side in self._sides if side.place is None) > _ROOM:
            return "the panels are large"
        fit = all(side.fits for side in self._sides)
        return "" if fit else "a factor is not aligned for the kernel"

    def _tiles(self) -> Tiles:
        out, (left, right) = self._out, self._sides
        return Tiles(
            out.rows,
            out.columns,
            (left.remote / out.rows, right.remote / out.columns),
            width=left.tiling.width,
            cluster=left.tiling.cluster,
            clusters=self._processors // left.tiling.cluster,
            sharing=left.tiling.sharing,
        )

    def prepare(self) -> None:
        """Take memory for words and for sums of tiles by several blocks. Raises HeapExhausted."""
        self._lane.buffer("come", 8 * (_WORDS + self._processors))
        self._lane.buffer("sums", SUMS_BYTES * self._processors)

    @property
    def _processors(self) -> int:
        """Multiprocessors, and blocks at most."""
        return self._device.processors

    def room(self, index: int) -> int:
        """Bytes that the panel of a factor needs, in the lane's buffer for that."""
        return self._sides[self._order.index(index)].nbytes()

    def run(self, places: Callable[[int], Places]) -> bool:
        """Put it on the stream; false, with nothing done, where copy engines do not suit.

        `places(index)` says where each rank's part of a factor lies.
        """
        stream, lane = self._operands.stream, self._lane
        found = [self._oriented(places(side.index)) for side in self._sides]
        plan = self._plan(found)
        if plan is None:
            return False
        panels = [
            side.panel(lane.address(f"panel {'ab'[side.index]}") if side.place is None else 0)
            for side in self._sides
        ]
        words = lane.address("come")
        call("cuMemsetD8Async", words, 0, 8 * (_WORDS + self._processors), stream)
        side_stream = lane.side
        call("cuEventRecord", lane.event("fork"), stream)
        call("cuStreamWaitEvent", side_stream, lane.event("fork"), 0)
        for side, own, panel in zip(self._sides, plan.own, panels, strict=True):
            if own is not None:
                own.launch(stream, [side.own.address], [panel.address])
        sources = [
            [place(rank)[0] if needed else 0 for rank, needed in enumerate(ranks)]
            for place, ranks in zip(found, plan.needed, strict=True)
        ]
        for fetch, copies, number in plan.fetches:
            side, panel = self._sides[fetch.side], panels[fetch.side]
            target = side.across(panel, fetch.lo, fetch.hi)
            copies.launch(side_stream, sources[fetch.side], target.address)
            call("cuStreamWriteValue64", side_stream, words + 8 * number, fetch.last, 0)
        self._launch(plan, panels, words)
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

    # -- the plan, kept with the share -------------------------------------------------------------

    def _plan(self, found: Sequence[Places]) -> _Plan | None:
        needed = [
            {move.src for move in side.moves} if side.place is None else set()
            for side in self._sides
        ]
        strides = tuple(
            tuple((rank, place(rank)[1]) for rank in sorted(need))
            for need, place in zip(needed, found, strict=True)
        )
        own = tuple(side.lines.own for side in self._sides)
        key = ("arriving", self._turned, strides, own)
        kept = self._rank_plan.kept
        if key not in kept:
            kept[key] = self._planned(found, needed)
        plan: _Plan | None = kept[key]
        return plan

    def _planned(self, found: Sequence[Places], needed: Sequence[set[int]]) -> _Plan | None:
        out, (left, right), tiles = self._out, self._sides, self._tiles()
        wave = [units * unit for units, unit in zip(tiles.first_wave, tiles.units, strict=True)]
        costs = wave[0] * float(out.itemsize), wave[1] * float(out.itemsize)
        depth = KOrder.plan((left.lines, right.lines), costs, left.tiling.depth)
        made = walk(tiles, depth.pieces(costs, _FIRST_BYTES), depth.steps)
        fetches = []
        for fetch in made.fetches:
            if depth.here(fetch.side) >= fetch.last:
                continue
            side, place = self._sides[fetch.side], found[fetch.side]
            moves = depth.gather_moves(fetch.side, fetch.first, fetch.last, (fetch.lo, fetch.hi))
            moves.sort(key=side.turn)
            engines = engine_copies(_lowered(side, moves, place))
            if engines is None:
                return None
            fetches.append((fetch, engines, fetch.part + (made.parts[0] if fetch.side else 0)))
        own = [self._own_copies(*pair) for pair in zip(self._sides, found, strict=True)]
        ranks = range(self._lane.team.size)
        reached = tuple(tuple(rank in need for rank in ranks) for need in needed)
        steps = Constant(self._device, depth.table())
        here = depth.here(0), depth.here(1)
        return _Plan(made, tuple(fetches), tuple(own), reached, depth.steps, here, steps)

    def _own_copies(self, side: PanelOperand, place: Places) -> BoxCopies | None:
        """What this rank has, but cannot load where it lies, into its panel."""
        if side.place is not None:
            return None
        every = np.arange(len(side.lines.places))
        moves = side.lines.gather_moves(every, (0, side.extent), side.tiling.depth)
        mine = [move for move in moves if move.src == side.rank]
        boxes = [Box.of(replace(copy, src=0), 0) for copy in _lowered(side, mine, place)]
        return BoxCopies(self._device, boxes) if boxes else None

    # -- the kernel --------------------------------------------------------------------------------

    def _launch(self, plan: _Plan, panels: Sequence[Matrix], words: int) -> None:
        out, team, made = self._out, self._lane.team, plan.walk
        left, right = self._sides
        tiling, pitch = left.tiling, out.row_stride
        aligned = out.address % ALIGNMENT == 0 and out.itemsize * pitch % ALIGNMENT == 0
        if out.dtype == "float64":
            of_kind: tuple[str, ...] = (f"PAIRS={aligned:d}",)
        else:
            names = f"ELEMENT={out.dtype.capitalize()}", f"WIDTH={tiling.width}"
            whole = aligned and out.itemsize * out.columns % ALIGNMENT == 0
            of_kind = (*names, "C_ALONG_N=1", f"ALIGNED={whole:d}")
        defines = (
            f"A_ALONG_K={left.along_k:d}",
            f"B_ALONG_K={right.along_k:d}",
            f"CLUSTER={tiling.cluster}",
            f"STAGES={tiling.stages}",
            f"REGIONS={MOST_REGIONS}",
            *of_kind,
        )
        kernel = team.kernel(tiling.file, tiling.file, defines, shared=tiling.shared, features="a")
        packed = b"".join(side.map(panel) for side, panel in zip(self._sides, panels, strict=True))
        packed += b"".join(side.map(side.lying()) for side in self._sides)
        packed += team.packed()
        packed += struct.pack("QQQQ", words, plan.steps.address, out.address, out.itemsize * pitch)
        packed += struct.pack("QQ", words + 8 * _WORDS, self._lane.address("sums"))
        shape = made.units, plan.depth, out.columns, out.rows
        packed += struct.pack("8I", len(made.regions), *shape, *plan.here, made.whole)
        for region in made.regions:
            numbers = (
                *(region.first, region.row, region.heights, region.column, region.across),
                *(region.rows_part, made.parts[0] + region.columns_part, 0),
            )
            packed += struct.pack("8I", *numbers)
        packed += bytes(32 * (MOST_REGIONS - len(made.regions)))
        packed += bytes(-len(packed) % 64)
        clusters = self._processors // tiling.cluster
        blocks = tiling.cluster * (min(clusters, made.units) if made.shares_none else clusters)
        kernel.launch(self._operands.stream, blocks, _THREADS, Argument(packed))


@dataclass(frozen=True)
class _Plan:
    """What is launched: the walk, copies and the number of the word of each fetch, own copies, by
    side and rank whether its part is read, and the steps along k: how many, those for which nothing
    of a side has to come, and where each lies.
    """

    walk: PanelSchedule
    fetches: tuple[tuple[Fetch, EngineCopies, int], ...]
    own: tuple[BoxCopies | None, ...]
    needed: tuple[tuple[bool, ...], ...]
    depth: int
    here: tuple[int, int]
    steps: Constant


def _lowered(side: PanelOperand, moves: Sequence[Move], places: Places) -> list[StridedCopy]:
    """Moves into a side's panel as the machine sees them."""
    panel = side.panel(0)
    item = panel.itemsize
    steps = panel.row_stride * item, panel.column_stride * item
    return [lowered(move, item, places(move.src)[1], steps) for move in moves]
