"""Panel GEMM: one persistent kernel multiplies while copy engines prefetch operands into panels.

The order of tiles and the order along k are `panel_schedule`'s.

    copy stream      fetch, write progress, fetch, write progress, ...    copy engines, no kernel
    product's stream [ persistent kernel: wait for progress, load, multiply ]

After each fetch the copy stream writes to a progress counter how many steps have arrived. The
product fills every multiprocessor, so it may not wait for a kernel. This rank's own part is read in
place, or where TMA cannot do so, copied into the panel before the product. Every wait of the
product has a deadline.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from shardmath.arrays import dtypes
from shardmath.base.immutable import Immutable
from shardmath.base.integers import up
from shardmath.cuda.allocation import Constant
from shardmath.cuda.driver import call
from shardmath.cuda.kernel import Argument
from shardmath.cuda.tensormap import ALIGNMENT, NBYTES, tensor_map
from shardmath.geometry import Move
from shardmath.local.gpu import Matrix
from shardmath.machine import H200
from shardmath.operators.lanes import Lane
from shardmath.operators.matmul.gpu.copy_engines import EngineCopies, engine_copies
from shardmath.operators.matmul.gpu.panel_schedule import (
    MOST_REGIONS,
    SUMS_BYTES,
    TILE_ROWS,
    TILINGS,
    Fetch,
    KOrder,
    OperandSteps,
    PanelSchedule,
    Tiles,
    Tiling,
    make_schedule,
)
from shardmath.operators.matmul.gpu.panels import OperandPlan
from shardmath.operators.matmul.gpu.rank_plan import RankPlan
from shardmath.program.steps import Memory
from shardmath.redistribution.box_copies import BoxCopies
from shardmath.redistribution.copies import StridedCopy, lowered

Places = Mapping[int, tuple[int, tuple[int, ...]]]  # address and strides in bytes, by rank

_THREADS = 384
_LEAST_SECONDS = 2.5e-4  # of a rank's product: below, a gather and then cuBLASLt are as fast
_LEAST_WIDTH = 1024  # rows and columns of a rank
_LEAST_WAVE = 0.5  # the share of clusters that have a unit of tiles: stream-K splits it among all
_MOST_PANEL_BYTES = 8 << 30
_PROGRESS_COUNTERS = 64  # of arrived steps, by part; behind them one for the sums of each block
_FIRST_BYTES = 4 << 20  # of the first piece: a smaller one would come no sooner


class PanelGemm:
    """One execution of a panel GEMM, of this rank's `a` and `b` into `out`."""

    def __init__(self, rank_plan: RankPlan, a: Matrix, b: Matrix, out: Matrix, lane: Lane) -> None:
        self._rank_plan = rank_plan
        self._lane = lane
        self._device = lane.team.device
        self._transposed = out.column_stride != 1
        self._out = out.transposed() if self._transposed else out
        self._extent = rank_plan.operand_plans[0].extent  # of k
        self._ab = a, b

    @cached_property
    def _panel_operands(self) -> tuple[PanelOperand, PanelOperand]:
        """The left and the right operand."""
        first = int(self._transposed)
        return self._panel_operand(first), self._panel_operand(1 - first)

    def _panel_operand(self, index: int) -> PanelOperand:
        plan, own = self._rank_plan.operand_plans[index], self._ab[index]
        if self._transposed:
            own, plan = own.transposed(), plan.transposed()
        rank, tiling = self._lane.team.rank, TILINGS[self._out.dtype]
        return PanelOperand(index, own, plan, rank, tiling, self._rank_plan.cache)

    @property
    def unsupported(self) -> str:
        """Why the product cannot or should not be a panel GEMM; "" where it should."""
        out = self._out
        if self._device.arch != "sm_90":
            return "the kernels are for GPUs of capability 9.0"
        if out.column_stride != 1 or out.row_stride < out.columns:
            return "the kernels write row by row, or column by column"
        if self._lane.team.shares_device:
            # Copies within a GPU need processors that the kernel holds.
            return "a peer is on the same GPU"
        seconds = 2.0 * out.rows * out.columns * self._extent / H200.product(out.dtype)
        short = seconds < _LEAST_SECONDS or min(out.rows, out.columns, self._extent) < _LEAST_WIDTH
        if short or self._has_few_tiles():
            return "the product is small, or has few tiles"
        gathered = [operand for operand in self._panel_operands if operand.plan.place is None]
        if sum(operand.panel_bytes() for operand in gathered) > _MOST_PANEL_BYTES:
            return "the panels are large"
        fit = all(operand.is_loadable for operand in self._panel_operands)
        return "" if fit else "an operand is not aligned for the kernel"

    def _has_few_tiles(self) -> bool:
        tiles = self._tiles()
        return prod(tiles.shape) < _LEAST_WAVE * tiles.clusters

    def _tiles(self) -> Tiles:
        out, (left, right) = self._out, self._panel_operands
        return Tiles(
            out.rows,
            out.columns,
            (left.remote_bytes / out.rows, right.remote_bytes / out.columns),
            width=left.tiling.width,
            cluster=left.tiling.cluster,
            clusters=self._device.processors // left.tiling.cluster,
            fixup_steps=left.tiling.fixup_steps,
        )

    @property
    def memories(self) -> dict[str, Memory]:
        """The memories of the lane for progress counters, partial sums and panels."""
        counters = Memory(8 * (_PROGRESS_COUNTERS + self._device.processors), shared=True)
        sums = Memory(SUMS_BYTES * self._device.processors, shared=True)
        panels = {f"panel {'ab'[x.index]}": Memory(x.panel_bytes()) for x in self._panel_operands}
        return {"progress": counters, "sums": sums, **panels}

    def run(self, places_of: Sequence[Places], stream: int) -> bool:
        """Put the product on a stream. Returns False, having done nothing, where copy engines do
        not suit.

        `places_of[index]` are the ranks' parts of an operand.
        """
        lane = self._lane
        places = [places_of[operand.index] for operand in self._panel_operands]
        if self._transposed:
            places = [{rank: (address, strides[::-1]) for rank, (address, strides) in some.items()}
                      for some in places]  # fmt: skip
        plan = self._plan(places)
        if plan is None:
            return False
        panels = [
            operand.panel(
                lane.address(f"panel {'ab'[operand.index]}") if operand.plan.place is None else 0
            )
            for operand in self._panel_operands
        ]
        progress = lane.address("progress")
        call(
            "cuMemsetD8Async",
            progress,
            0,
            8 * (_PROGRESS_COUNTERS + self._device.processors),
            stream,
        )
        copy_stream = lane.stream("side")
        call("cuEventRecord", lane.event("fork"), stream)
        call("cuStreamWaitEvent", copy_stream, lane.event("fork"), 0)
        for operand, own, panel in zip(self._panel_operands, plan.own_copies, panels, strict=True):
            if own is not None:
                own.launch(stream, [operand.own.address], [panel.address])
        ranks = range(lane.team.size)
        sources = [[some[rank][0] if rank in some else 0 for rank in ranks] for some in places]
        for fetch, copies, number in plan.fetches:
            operand, panel = self._panel_operands[fetch.operand], panels[fetch.operand]
            target = operand.panel_slice(panel, fetch.lo, fetch.hi)
            copies.launch(copy_stream, sources[fetch.operand], target.address)
            call("cuStreamWriteValue64", copy_stream, progress + 8 * number, fetch.last, 0)
        self._launch(plan, panels, progress, stream)
        call("cuEventRecord", lane.event("join"), copy_stream)
        call("cuStreamWaitEvent", stream, lane.event("join"), 0)
        return True

    # -- the plan, cached with the rank plan -------------------------------------------------------

    def _plan(self, places: Sequence[Places]) -> _Plan | None:
        strides = tuple(tuple((rank, some[rank][1]) for rank in sorted(some)) for some in places)
        own = tuple(operand.k_steps.reads_own for operand in self._panel_operands)
        key = ("panel gemm", self._transposed, strides, own)
        cache = self._rank_plan.cache
        if key not in cache:
            cache[key] = self._make_plan(places)
        plan: _Plan | None = cache[key]
        return plan

    def _make_plan(self, places: Sequence[Places]) -> _Plan | None:
        out, (left, right), tiles = self._out, self._panel_operands, self._tiles()
        wave = [units * unit for units, unit in zip(tiles.first_wave, tiles.units, strict=True)]
        costs = wave[0] * float(out.itemsize), wave[1] * float(out.itemsize)
        k_order = KOrder.plan((left.k_steps, right.k_steps), costs, left.tiling.depth)
        schedule = make_schedule(tiles, k_order.pieces(costs, _FIRST_BYTES), k_order.steps)
        fetches, rank = [], self._lane.team.rank
        for fetch in schedule.fetches:
            if k_order.local_steps(fetch.operand) >= fetch.last:
                continue
            operand, place = self._panel_operands[fetch.operand], places[fetch.operand]
            moves = k_order.gather_moves(
                fetch.operand, fetch.first, fetch.last, (fetch.lo, fetch.hi)
            )
            # No two ranks begin with the same source.
            moves.sort(key=lambda move: (move.src < rank, move.src))
            engines = engine_copies(_lowered(operand, moves, place))
            if engines is None:
                return None
            fetches.append(
                (fetch, engines, fetch.part + (schedule.parts[0] if fetch.operand else 0))
            )
        own = [self._own_copies(*pair) for pair in zip(self._panel_operands, places, strict=True)]
        step_table = Constant(self._device, k_order.table())
        local_steps = k_order.local_steps(0), k_order.local_steps(1)
        return _Plan(schedule, tuple(fetches), tuple(own), k_order.steps, local_steps, step_table)

    def _own_copies(self, operand: PanelOperand, places: Places) -> BoxCopies | None:
        """The copies of this rank's own part into its panel, None where it is loaded in place."""
        if operand.plan.place is not None:
            return None
        every = np.arange(len(operand.k_steps.offsets))
        moves = operand.k_steps.gather_moves(every, (0, operand.plan.width), operand.tiling.depth)
        mine = [move for move in moves if move.src == operand.rank]
        boxes = [replace(copy, src=0) for copy in _lowered(operand, mine, places)]
        return BoxCopies(self._device, boxes) if boxes else None

    # -- the kernel --------------------------------------------------------------------------------

    def _launch(self, plan: _Plan, panels: Sequence[Matrix], progress: int, stream: int) -> None:
        out, team, schedule = self._out, self._lane.team, plan.schedule
        left, right = self._panel_operands
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
        kernel = team.kernel(
            tiling.kernel, tiling.kernel, defines, shared=tiling.shared, features="a"
        )
        packed = b"".join(
            operand.encode_map(panel)
            for operand, panel in zip(self._panel_operands, panels, strict=True)
        )
        packed += b"".join(
            operand.encode_map(operand.own_matrix()) for operand in self._panel_operands
        )
        packed += team.packed()
        packed += struct.pack(
            "QQQQ", progress, plan.step_table.address, out.address, out.itemsize * pitch
        )
        packed += struct.pack("QQ", progress + 8 * _PROGRESS_COUNTERS, self._lane.address("sums"))
        shape = schedule.units, plan.steps, out.columns, out.rows
        packed += struct.pack(
            "8I", len(schedule.regions), *shape, *plan.local_steps, schedule.data_parallel_units
        )
        for region in schedule.regions:
            numbers = (
                *(region.first, region.row, region.unit_rows, region.column, region.tile_columns),
                *(region.rows_part, schedule.parts[0] + region.columns_part, 0),
            )
            packed += struct.pack("8I", *numbers)
        packed += bytes(32 * (MOST_REGIONS - len(schedule.regions)))
        packed += bytes(-len(packed) % 64)
        clusters = self._device.processors // tiling.cluster
        blocks = tiling.cluster * (
            min(clusters, schedule.units) if schedule.is_data_parallel else clusters
        )
        kernel.launch(stream, blocks, _THREADS, Argument(packed))


class _Plan(Immutable):
    """The launches: the schedule; each fetch's copies and the index of its progress counter; copies
    of this rank's own parts; and the steps along k: how many, how many are local for each operand,
    and their table.
    """

    schedule: PanelSchedule
    fetches: tuple[tuple[Fetch, EngineCopies, int], ...]
    own_copies: tuple[BoxCopies | None, ...]
    steps: int
    local_steps: tuple[int, int]
    step_table: Constant


class PanelOperand(Immutable, eq=False):
    """Operand `index`, 0 for op(A), of this rank, whose local array is `own`. The array and the
    `plan` are oriented as the kernel takes them. `cache` lives as long as the rank plan.
    """

    index: int
    own: Matrix
    plan: OperandPlan
    rank: int
    tiling: Tiling
    cache: dict[Any, Any] = field(repr=False)

    @property
    def is_right(self) -> bool:
        """Whether it is the right factor, whose rows are indexed by k."""
        return self.plan.axis == 0

    @property
    def along_k(self) -> bool:
        """Whether neighbours in memory are neighbours along k."""
        return self.own.by_columns == self.is_right

    @property
    def remote_bytes(self) -> int:
        """Bytes of the operand that come from peers."""
        if self.plan.place is not None:
            return 0
        return self.own.itemsize * sum(m.elements for m in self.plan.moves if m.src != self.rank)

    @property
    def k_steps(self) -> OperandSteps:
        """The source of each step along k, and its place there."""
        plan = self.plan
        loadable = plan.place is not None or _is_loadable(self.own)
        key = ("k steps", self.index, self.is_right, loadable)
        if key not in self.cache:
            k = {"axis": plan.axis, "extent": plan.extent, "step": self.tiling.depth}
            self.cache[key] = (
                OperandSteps.local(**k)
                if plan.place is not None
                else OperandSteps.of(plan.moves, self.rank, loadable=loadable, **k)
            )
        k_steps: OperandSteps = self.cache[key]
        return k_steps

    @property
    def is_loadable(self) -> bool:
        """Whether a local operand, which has to be read in place, can be."""
        return self.plan.place is None or _is_loadable(self.own_matrix())

    def panel(self, address: int) -> Matrix:
        """The panel at this address: in the order of the operand, with aligned lines."""
        rows, columns = self.plan.shape(0, self.k_steps.width)
        unit = ALIGNMENT // self.own.itemsize
        pitch = up(rows if self.own.by_columns else columns, unit)
        strides = (1, pitch) if self.own.by_columns else (pitch, 1)
        return Matrix(address, rows, columns, *strides, self.own.dtype)

    def panel_bytes(self) -> int:
        """Bytes of a `panel`."""
        panel = self.panel(0)
        lines = panel.columns if self.own.by_columns else panel.rows
        return panel.itemsize * lines * max(panel.row_stride, panel.column_stride)

    def panel_slice(self, panel: Matrix, lo: int, hi: int) -> Matrix:
        """Rows `lo` to before `hi` of a left panel, or these columns of a right one."""
        whole = 0, self.k_steps.width
        return panel.part(whole, (lo, hi)) if self.is_right else panel.part((lo, hi), whole)

    def own_matrix(self) -> Matrix:
        """The part of the own array that is read in place; empty if none is."""
        place, axis = self.plan.place, self.plan.axis
        if place is not None:
            (row, column), (rows, columns) = place, self.plan.shape(0, self.plan.extent)
            return self.own.part((row, row + rows), (column, column + columns))
        if not self.k_steps.reads_own:
            return self.own.part((0, 0), (0, 0))
        run = next(m for m in self.plan.moves if m.src == self.rank).runs[1 - axis]
        ranges = [(run.src_start, run.src_start + run.length)] * 2
        ranges[axis] = 0, self.k_steps.source_ends[self.rank]
        return self.own.part(ranges[0], ranges[1])

    def encode_map(self, matrix: Matrix) -> bytes:
        """The struct `TensorMap` of the panel or of `own_matrix`, in the kernel's boxes."""
        if not matrix.size:
            return bytes(NBYTES)
        tiling = self.tiling
        pitch = max(abs(matrix.row_stride), abs(matrix.column_stride))
        extents = matrix.rows, matrix.columns
        width, height = extents if self.own.by_columns else extents[::-1]
        if self.along_k:
            box = tiling.width // tiling.cluster if self.is_right else TILE_ROWS
        else:
            shared = self.is_right and tiling.splits_k
            box = tiling.depth // tiling.cluster if shared else tiling.depth
        return tensor_map(matrix.address, matrix.dtype, width, height, pitch, box)


def _is_loadable(x: Matrix) -> bool:
    """Whether TMA can load boxes of it in place."""
    itemsize = dtypes.of(x.dtype).itemsize
    if (x.row_stride if x.by_columns else x.column_stride) != 1:
        return False
    pitch = x.column_stride if x.by_columns else x.row_stride
    width = x.rows if x.by_columns else x.columns
    aligned = x.address % ALIGNMENT == 0 and itemsize * pitch % ALIGNMENT == 0
    return pitch >= width and aligned


def _lowered(operand: PanelOperand, moves: Sequence[Move], places: Places) -> list[StridedCopy]:
    """Moves into an operand's panel as strided copies."""
    panel = operand.panel(0)
    item = panel.itemsize
    steps = panel.row_stride * item, panel.column_stride * item
    return [lowered(move, item, places[move.src][1], steps) for move in moves]
