"""The schedule of a panel GEMM: which panels are fetched in which order, for which tiles.

What this rank lacks of its operands is prefetched into panels while one persistent kernel computes
all tiles. A tile waits for the rows and columns that it needs, step by step along k, in the order
of `k_order`. The first wave of tiles is fetched in pieces of k, so that it can begin soon; then
rows and columns are fetched in parts that grow, as each unlocks more tiles than the last.

            columns 0     1   2       fetched            unlocks
    rows 0  [ 1st wave ][ 2 ][ 4 ]    rows 0, columns 0  1st wave, piece by piece
         1  [    1     ][ 2 ][ 4 ]    rows 1             regions 1
         2  [    3     ][ 3 ][ 4 ]    columns 1, ...     regions 2, ...

Pure: no address and no rank is known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod, sqrt

from shardmath.arrays.dtypes import HALVES
from shardmath.base.immutable import Immutable
from shardmath.cuda.tensormap import BOX_BYTES

TILE_ROWS = 128
_LEAST_PART, _MOST_PARTS = 2, 5  # units in a part, and parts after the first
_GROWTH = 1.3  # from part to part: the first ones are waited for, later ones are in time
_K_PIECES = 2  # pieces of k of each part after the first

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
    """What is fetched, in this order, and the regions in the order in which they are computed. The
    first `data_parallel_units` of all `units` are computed by one cluster each; the steps of the
    others are split evenly among all clusters (stream-K).
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
    """An m x n result in tiles of TILE_ROWS x `width`, of which `clusters` times `cluster` above
    each other are computed at once; a row of A and a column of B cost so many bytes to fetch, 0 if
    the operand is local. Reducing the partial sums of several clusters takes as long as
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
        """Rows and columns of a unit, which a cluster computes at a time."""
        return TILE_ROWS * self.cluster, self.width

    @property
    def shape(self) -> tuple[int, int]:
        """Of the result, in units."""
        return -(-self.m // self.units[0]), -(-self.n // self.width)

    @property
    def first_wave(self) -> tuple[int, int]:
        """Units of rows and of columns that keep all clusters busy and are fetched soonest."""
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

        The rest is split by stream-K, as some clusters would idle in the last wave. Each cluster
        gets half a unit of it at least, so that few add to one; a whole one where that is as good:
        then the partial sums it waits for have long been written.
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
        if waiting:  # what unlocks most for its bytes
            operand = max(waiting, key=lambda s: _unlocks(tiles, bounds, loaded, s))
            part = loaded[operand]
            lo, hi = _extent(bounds[operand], part, tiles.units[operand], extents[operand])
            cuts = sorted({steps * cut // _K_PIECES for cut in range(_K_PIECES + 1)})
            fetches += [Fetch(operand, part, lo, hi, *cut) for cut in pairwise(cuts)]
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
    """Tiles for a byte of the next rows or columns."""
    return bounds[1 - operand][loaded[1 - operand]] / (tiles.costs[operand] * tiles.units[operand])


def _part_bounds(extent: int, first: int, is_fetched: bool) -> list[int]:
    """Bounds of the parts: one part for an operand that is local."""
    if not is_fetched or first >= extent:
        return [0, extent]
    weights, bounds = [_GROWTH**i for i in range(_MOST_PARTS)], [0, first]
    for i, weight in enumerate(weights):
        at = bounds[-1]
        step = max(_LEAST_PART, round((extent - at) * weight / sum(weights[i:])))
        bounds.append(at + step if at + step + _LEAST_PART <= extent else extent)
        if bounds[-1] == extent:
            break
    return bounds


def _extent(bounds: list[int], part: int, step: int, extent: int) -> tuple[int, int]:
    return bounds[part] * step, min(extent, bounds[part + 1] * step)
