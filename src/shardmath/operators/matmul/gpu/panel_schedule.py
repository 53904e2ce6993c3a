"""The schedule of a panel GEMM: which panels are fetched in which order, for which tiles. Pure.

Parts of the operands that peers have are prefetched into panels while one persistent kernel
computes all tiles. A tile waits for its rows and columns, step by step along k, in the order of
`KOrder`. Those of the first wave of tiles are fetched in pieces of k, so that it can begin soon.
Then come rows and columns in parts that grow, as each unlocks more tiles than the last.

            columns 0     1   2       fetched            unlocks
    rows 0  [ 1st wave ][ 2 ][ 4 ]    rows 0, columns 0  1st wave, piece by piece
         1  [    1     ][ 2 ][ 4 ]    rows 1             regions 1
         2  [    3     ][ 3 ][ 4 ]    columns 1, ...     regions 2, ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod, sqrt

import numpy as np
import numpy.typing as npt

from shardmath.arrays.dtypes import HALVES
from shardmath.base.immutable import Immutable
from shardmath.base.integers import bounds as even_bounds
from shardmath.cuda.tensormap import BOX_BYTES
from shardmath.geometry import Move, Run
from shardmath.geometry.spans import joined

OWN = 1 << 31  # highest bit of a step's offset: it is in this rank's array (kOwn of panel_gemm.cuh)
_SEVERAL, _LOCAL = -1, -2  # in place of a step's source: several ranks, or a local operand

Integers = npt.NDArray[np.int64]


class OperandSteps(Immutable, eq=False):
    """One operand along k: by step, its source rank, and its offset along k in the source's array.

    `reads_own`: the steps of `rank` itself are read in place. `width` is the panel's extent along
    k. `panel_offsets[src]` is added to an index of a source's array to get that of the panel, and
    `source_ends[src]` is the end of the needed part of that array. Both are empty where the panel
    is in the order of k.
    """

    axis: int  # of the operand, which is k
    moves: tuple[Move, ...]
    rank: int
    reads_own: bool
    width: int
    panel_offsets: dict[int, int]
    source_ends: dict[int, int]
    sources: Integers
    offsets: Integers

    @classmethod
    def local(cls, axis: int, extent: int, step: int) -> OperandSteps:
        """An operand that is local: all of k, in its own order."""
        offsets = np.arange(0, extent, step)
        return cls(axis, (), -1, True, 0, {}, {}, np.full(len(offsets), _LOCAL), offsets)

    @classmethod
    def of(
        cls,
        moves: Sequence[Move],
        rank: int,
        *,
        axis: int,
        extent: int,
        step: int,
        loadable: bool,
    ) -> OperandSteps:
        """An operand that `moves` bring to `rank`; if `loadable`, its own is read in place."""
        moves = tuple(move for move in moves if move.elements)
        width = moves[0].shape[1 - axis] if moves else 0
        by_step = _sources(moves, axis, extent, step)
        if by_step is None:
            offsets = np.arange(0, extent, step)
            sources = np.full(len(offsets), _SEVERAL)
            return cls(axis, moves, rank, False, extent, {}, {}, sources, offsets)
        sources, offsets = by_step
        reads_own = loadable and _is_dense([m for m in moves if m.src == rank], 1 - axis, width)
        last = int(sources[-1])  # it ends the panel: what is beyond is read as zeros
        panel_offsets, source_ends, width_so_far = {}, {}, 0
        for src in sorted(set(sources.tolist()), key=lambda src: (src == last, src)):
            runs = [move.runs[axis] for move in moves if move.src == src]
            start = min(run.src_start for run in runs)
            source_ends[src] = max(run.src_stop for run in runs)
            if not (reads_own and src == rank):
                width_so_far = -(-width_so_far // step) * step
                panel_offsets[src] = width_so_far - start
                width_so_far += source_ends[src] - start
        return cls(
            axis, moves, rank, reads_own, width_so_far, panel_offsets, source_ends, sources, offsets
        )

    @property
    def is_remote(self) -> npt.NDArray[np.bool_]:
        """Whether each step has to be fetched from a peer."""
        return np.not_equal(self.sources, _LOCAL) & np.not_equal(self.sources, self.rank)

    @property
    def in_order(self) -> bool:
        """Whether steps have to be fetched in the order of k."""
        return bool((self.sources == _SEVERAL).any())

    def table(self, order: Integers) -> npt.NDArray[np.uint32]:
        """The offsets of the steps in that order, as the kernel reads them."""
        offsets = self.offsets.copy()
        for src, base in self.panel_offsets.items():
            offsets[self.sources == src] += base
        if self.reads_own:
            mine = (self.sources == self.rank) | (self.sources == _LOCAL)
            offsets[mine] |= OWN
        return offsets[order].astype(np.uint32)

    def gather_moves(self, chosen: Integers, across: tuple[int, int], step: int) -> list[Move]:
        """The moves that bring the chosen steps of rows or columns `across` to the beginning of a
        panel. Steps that are read in place are left out.
        """
        if self.in_order:
            lo, hi = int(chosen[0]) * step, (int(chosen[-1]) + 1) * step
            cut = [part for move in self.moves for part in move.clipped(self.axis, lo, hi)]
            runs = [move.runs[self.axis] for move in cut]
            runs = [replace(run, dst_start=run.dst_start + lo) for run in runs]
            whole = [move.with_run(self.axis, run) for move, run in zip(cut, runs, strict=True)]
        else:
            lines = {(move.src, move.runs[1 - self.axis]): move for move in self.moves}
            whole = [
                move.with_run(self.axis, run)
                for (src, _), move in lines.items()
                if not (self.reads_own and src == self.rank)
                for run in self._runs(src, chosen[self.sources[chosen] == src], step)
            ]
        return [part for move in whole for part in move.clipped(1 - self.axis, *across)]

    def _runs(self, src: int, chosen: Integers, step: int) -> list[Run]:
        """The runs of the chosen steps, which are all in the array of `src`, into the panel."""
        if not len(chosen):
            return []
        starts, base, end = (
            np.sort(self.offsets[chosen]),
            self.panel_offsets[src],
            self.source_ends[src],
        )
        cuts = np.flatnonzero(np.diff(starts) != step) + 1
        firsts = starts[np.concatenate([[0], cuts])]
        lasts = starts[np.concatenate([cuts, [len(starts)]]) - 1]
        return joined(
            Run(1, min(last + step, end) - first, first, 0, first + base, 0)
            for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)
        )


class KOrder(Immutable, eq=False):
    """k in steps of `step` indices: the `order` in which they are multiplied, and the operands.

    The kernel multiplies a step at once. Where each step of an operand comes from one rank, the
    operand's panel holds its sources one after another, each in its own order, so that it is
    fetched in long rows; this rank's own part is read in place. Steps for which nothing has to be
    fetched come first, those for which both operands have to be fetched last:

        k in blocks    0 1 2 3 4 5 6 7      rank (0, 0) of a grid of 2 x 4
        of A, from     0 1 2 3 0 1 2 3      its own: blocks 0 and 4
        of B, from     0 1 0 1 0 1 0 1      its own: blocks 0, 2, 4 and 6
        order          0 4 | 2 6 | 1 5 | 3 7

    If a step of an operand has several sources, that is gathered, and multiplied, in order of k.
    """

    step: int
    order: Integers
    operands: tuple[OperandSteps, OperandSteps]

    @classmethod
    def plan(
        cls, operands: tuple[OperandSteps, OperandSteps], costs: tuple[float, float], step: int
    ) -> KOrder:
        """`costs[i]` is the cost of fetching one index of k of operand i, for the first wave."""
        a, b = operands
        count = len(a.offsets)
        if a.in_order or b.in_order:
            return cls(step, np.arange(count), operands)
        cost = a.is_remote * costs[0] + b.is_remote * costs[1]
        distances = [_ring_distance(one) for one in operands]
        return cls(step, np.lexsort((np.arange(count), distances[1], distances[0], cost)), operands)

    @property
    def steps(self) -> int:
        """The number of steps."""
        return len(self.order)

    def local_steps(self, operand: int) -> int:
        """How many steps can be multiplied before anything of an operand has been fetched."""
        is_remote = self.operands[operand].is_remote[self.order]
        return int(np.argmax(is_remote)) if is_remote.any() else self.steps

    def table(self) -> npt.NDArray[np.uint32]:
        """The struct `Step` of panel_gemm.cuh for each step."""
        return np.column_stack([one.table(self.order) for one in self.operands])

    def gather_moves(
        self, operand: int, first: int, last: int, across: tuple[int, int]
    ) -> list[Move]:
        """The moves from peers that bring steps `first` to `last` of the order of an operand."""
        steps = self.operands[operand]
        if first >= last:
            return []
        moves = steps.gather_moves(self.order[first:last], across, self.step)
        return [move for move in moves if move.src != steps.rank]

    def pieces(self, costs: tuple[float, float], first_bytes: float) -> list[tuple[int, int]]:
        """Ranges of steps that are fetched together: the first of about `first_bytes`, each later
        one of twice as many. Nothing is fetched for the steps before the first range.
        """
        a, b = self.operands
        cost = (a.is_remote * costs[0] + b.is_remote * costs[1])[self.order] * self.step
        received = np.concatenate([[0.0], np.cumsum(cost)])
        start, pieces = min(self.local_steps(0), self.local_steps(1)), []
        if start:
            first_bytes *= 2  # it is fetched while the steps before it are multiplied
        while start < self.steps:
            end = int(np.searchsorted(received, received[start] + first_bytes, "left"))
            end = min(max(end, start + 1), self.steps)
            if received[-1] - received[end] < first_bytes / 2:
                end = self.steps
            pieces.append((start, end))
            start, first_bytes = end, first_bytes * 2
        return pieces


def _sources(
    moves: Sequence[Move], axis: int, extent: int, step: int
) -> tuple[Integers, Integers] | None:
    """The rank that each step comes from, and its index there; None if one has several sources."""
    source = np.full(extent, _LOCAL, np.int64)
    place = np.zeros(extent, np.int64)
    for src, run in {(move.src, move.runs[axis]) for move in moves}:
        blocks = np.arange(run.count)[:, None], np.arange(run.length)[None]
        index = (run.dst_start + blocks[0] * run.dst_step + blocks[1]).reshape(-1)
        if (source[index] != _LOCAL).any():
            return None
        source[index] = src
        place[index] = (run.src_start + blocks[0] * run.src_step + blocks[1]).reshape(-1)
    inside = np.arange(1, extent) % step != 0
    same = (source[1:] == source[:-1]) & (place[1:] == place[:-1] + 1)
    if (source == _LOCAL).any() or not same[inside].all():
        return None
    return source[::step], place[::step]


def _is_dense(mine: Sequence[Move], across: int, width: int) -> bool:
    """Whether this rank's own moves cover the whole other axis, from index 0 of its array on."""
    if not mine or len({move.runs[across] for move in mine}) > 1:
        return False
    run = mine[0].runs[across]
    return run.count == 1 and run.length == width and run.src_start == run.dst_start == 0


def _ring_distance(steps: OperandSteps) -> Integers:
    """The distance of each step's source from this rank: no two begin with the same peer."""
    size = max(int(steps.sources.max()), steps.rank, 0) + 1
    return (steps.sources - steps.rank) % size


TILE_ROWS = 128
_LEAST_PART, _MOST_PARTS = 2, 5  # units in a part, and parts after the first
_GROWTH = 1.3  # from part to part: tiles wait for the first ones, later ones are in time
_K_PIECES = 2  # pieces of k in which each part after the first is fetched

MOST_REGIONS = (1 + _MOST_PARTS) ** 2
SUMS_BYTES = 1 << 17  # of a block's tile (kSumsBytes of panel_gemm.cuh)


class Tiling(Immutable):
    """How `kernel` cuts its work: tiles of TILE_ROWS x `width`, steps of `depth` indices of k,
    pipelined through `stages` of shared memory, by clusters of `cluster` blocks. Each block of a
    cluster loads a part of B's columns for all of them; with `splits_k`, a part of k where B's
    columns are contiguous. Reducing a tile's partial sums (stream-K's fixup) costs as much as
    `fixup_steps` steps.
    """

    kernel: str
    width: int
    depth: int
    cluster: int
    stages: int
    splits_k: bool
    fixup_steps: int

    @property
    def shared(self) -> int:
        """Bytes of shared memory: a step's row of an operand is one of a box."""
        return 1024 + self.stages * (TILE_ROWS + self.width) * BOX_BYTES


_HALF = Tiling("panel_gemm", 256, 64, 2, stages=4, splits_k=True, fixup_steps=40)
_DOUBLE = Tiling("panel_gemm_f64", 128, 16, 2, stages=6, splits_k=False, fixup_steps=10)
TILINGS = {**dict.fromkeys(HALVES, _HALF), "float64": _DOUBLE}


class Fetch(Immutable):
    """Rows of A (0) or columns of B (1), part number `part`, from `lo` to `hi`, for the
    steps along k from `first` to before `last`.
    """

    operand: int
    part: int
    lo: int
    hi: int
    first: int
    last: int


class Region(Immutable):
    """Tiles that need the same rows and columns; in units of `cluster` tiles, and in tiles."""

    first: int  # its first unit in the schedule
    row: int
    unit_rows: int
    column: int
    tile_columns: int
    rows_part: int
    columns_part: int


class PanelSchedule(Immutable):
    """The fetches in order, and the regions in the order in which they are computed. The first
    `data_parallel_units` of all `units` are computed by one cluster each; the steps of the others
    are split evenly among all clusters (stream-K).
    """

    fetches: tuple[Fetch, ...]
    regions: tuple[Region, ...]
    parts: tuple[int, int]
    units: int
    data_parallel_units: int

    @property
    def is_data_parallel(self) -> bool:
        """Whether each unit is computed by one cluster."""
        return self.data_parallel_units == self.units


class Tiles(Immutable):
    """An m x n result in tiles of TILE_ROWS x `width`, computed at once by `clusters` clusters of
    `cluster` tiles above each other. `costs` are the bytes to fetch for a row of A and a column of
    B, 0 if the operand is local. Reducing the partial sums of several clusters takes as long as
    `fixup_steps` steps.
    """

    m: int
    n: int
    costs: tuple[float, float]
    width: int
    cluster: int
    clusters: int
    fixup_steps: int = 1 << 30

    @property
    def units(self) -> tuple[int, int]:
        """Rows and columns of a unit, which is computed by one cluster."""
        return TILE_ROWS * self.cluster, self.width

    @property
    def shape(self) -> tuple[int, int]:
        """The extents of the result, in units."""
        return -(-self.m // self.units[0]), -(-self.n // self.width)

    @property
    def first_wave(self) -> tuple[int, int]:
        """The units of rows and columns that keep all clusters busy for the fewest bytes."""
        (high, wide), clusters = self.shape, self.clusters
        costs = [cost * unit for cost, unit in zip(self.costs, self.units, strict=True)]
        if not costs[0]:
            return high, min(wide, max(1, round(clusters / high)))
        if not costs[1]:
            return min(high, max(1, round(clusters / wide))), wide
        rows = min(high, max(1, round(sqrt(clusters * costs[1] / costs[0]))))
        columns = min(wide, max(1, -(-clusters // rows)))
        return min(high, max(1, -(-clusters // columns))), columns

    def data_parallel_units(self, steps: int) -> int:
        """How many units of `steps` are computed whole: full waves of one for each cluster.

        The rest is split by stream-K, since some clusters would idle in the last wave. Each cluster
        gets at least half a unit of it, so that few clusters add to one.
        """
        count, clusters = prod(self.shape), self.clusters
        over = count % clusters
        data_parallel_units = count - over - (clusters if 2 * over < clusters else 0)
        idle = (clusters - over) / clusters * steps
        return (
            data_parallel_units
            if over and data_parallel_units >= 0 and idle >= self.fixup_steps
            else count
        )


def make_schedule(tiles: Tiles, pieces: Sequence[tuple[int, int]], steps: int) -> PanelSchedule:
    """The schedule of the tiles. The first wave is fetched in `pieces` of the `steps` along k."""
    first = tiles.first_wave
    bounds = [
        _part_bounds(extent, first[operand], tiles.costs[operand] > 0)
        for operand, extent in enumerate(tiles.shape)
    ]
    extents = tiles.m, tiles.n
    fetches: list[Fetch] = []
    regions: list[Region] = []
    for start, end in pieces:
        for operand in (0, 1):
            lo, hi = _extent(bounds[operand], 0, tiles.units[operand], extents[operand])
            fetches.append(Fetch(operand, 0, lo, hi, start, end))
    loaded, units = [1, 1], 0
    ready = [(0, 0)]
    while ready:
        for row_part, column_part in ready:
            top, left = bounds[0][row_part], bounds[1][column_part]
            unit_rows, tile_columns = (
                bounds[0][row_part + 1] - top,
                bounds[1][column_part + 1] - left,
            )
            regions.append(Region(units, top, unit_rows, left, tile_columns, row_part, column_part))
            units += unit_rows * tile_columns
        ready = []
        waiting = [operand for operand in (0, 1) if loaded[operand] < len(bounds[operand]) - 1]
        if waiting:  # the operand that unlocks most tiles for its bytes
            operand = max(waiting, key=lambda s: _unlocks(tiles, bounds, loaded, s))
            part = loaded[operand]
            lo, hi = _extent(bounds[operand], part, tiles.units[operand], extents[operand])
            pieces_of_k = pairwise(sorted({*even_bounds(steps, _K_PIECES)}))
            fetches += [Fetch(operand, part, lo, hi, *piece) for piece in pieces_of_k]
            others = range(loaded[1 - operand])
            ready = [(part, other) if operand == 0 else (other, part) for other in others]
            loaded[operand] += 1
    parts = len(bounds[0]) - 1, len(bounds[1]) - 1
    return PanelSchedule(
        tuple(fetches), tuple(regions), parts, units, tiles.data_parallel_units(steps)
    )


def _unlocks(
    tiles: Tiles, bounds: Sequence[list[int]], loaded: Sequence[int], operand: int
) -> float:
    """Tiles that each byte of the next rows or columns unlocks."""
    return bounds[1 - operand][loaded[1 - operand]] / (tiles.costs[operand] * tiles.units[operand])


def _part_bounds(extent: int, first: int, is_fetched: bool) -> list[int]:
    """The bounds of the parts; a local operand is one part."""
    if not is_fetched or first >= extent:
        return [0, extent]
    weights, bounds = [_GROWTH**i for i in range(_MOST_PARTS)], [0, first]
    for i, weight in enumerate(weights):
        start = bounds[-1]
        step = max(_LEAST_PART, round((extent - start) * weight / sum(weights[i:])))
        bounds.append(start + step if start + step + _LEAST_PART <= extent else extent)
        if bounds[-1] == extent:
            break
    return bounds


def _extent(bounds: list[int], part: int, step: int, extent: int) -> tuple[int, int]:
    return bounds[part] * step, min(extent, bounds[part + 1] * step)
