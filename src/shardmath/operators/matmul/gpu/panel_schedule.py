"""A product whose factors come while it runs: what comes in which order, for which tiles.

What this rank lacks of the factors of its share is gathered, and one kernel computes all tiles;
each waits for the rows and columns that it needs, as far along k as it has come: `k_order` has the
order. The first wave of tiles is fetched in pieces of k, so that it can begin soon; then rows and
columns come in parts that grow, as each unlocks more tiles than the last.

            columns 0     1   2       fetched            unlocks
    rows 0  [ 1st wave ][ 2 ][ 4 ]    rows 0, columns 0  1st wave, piece by piece
         1  [    1     ][ 2 ][ 4 ]    rows 1             regions 1
         2  [    3     ][ 3 ][ 4 ]    columns 1, ...     regions 2, ...

Pure: no address and no rank is known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod, sqrt

__all__ = ["MOST_REGIONS", "TILE_ROWS", "Fetch", "PanelSchedule", "Region", "Tiles", "walk"]

TILE_ROWS = 128
_LEAST_PART, _MOST_PARTS = 2, 5  # units in a part, and parts after the first
_GROWTH = 1.3  # from part to part: the first ones are waited for, later ones come in time
_CUTS = 2  # pieces of k of each part after the first

MOST_REGIONS = (1 + _MOST_PARTS) ** 2


@dataclass(frozen=True)
class Fetch:
    """Rows (side 0) or columns (side 1) number `part`, from `lo` to `hi`, for the steps along k
    from `first` to before `last`.
    """

    side: int
    part: int
    lo: int
    hi: int
    first: int
    last: int


@dataclass(frozen=True)
class Region:
    """Tiles that need the same rows and columns; in units of `cluster` tiles, and in tiles."""

    first: int  # its first unit in the walk
    row: int
    heights: int
    column: int
    across: int
    rows_part: int
    columns_part: int


@dataclass(frozen=True)
class PanelSchedule:
    """What is fetched, in this order, and the regions in the order in which they are computed. The
    first `whole` of all `units` are computed by one cluster each, the steps of the others are
    shared out among all clusters.
    """

    fetches: tuple[Fetch, ...]
    regions: tuple[Region, ...]
    parts: tuple[int, int]
    units: int
    whole: int

    @property
    def shares_none(self) -> bool:
        """Whether each unit is computed by one cluster."""
        return self.whole == self.units

    @property
    def first_wave(self) -> tuple[Fetch, ...]:
        """What comes before the second rows or columns do."""
        return tuple(fetch for fetch in self.fetches if fetch.part == 0)


@dataclass(frozen=True)
class Tiles:
    """An m x n result in tiles of TILE_ROWS x `width`, of which `clusters` times `cluster` above
    each other are computed at once; a row of A and a column of B cost so many bytes to fetch, 0 if
    the factor is here. To add up sums of several clusters takes as long as `sharing` steps.
    """

    m: int
    n: int
    costs: tuple[float, float]
    width: int
    cluster: int
    clusters: int
    sharing: int = 1 << 30

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
        """Units of rows and of columns that keep all clusters busy and come soonest."""
        (high, wide), clusters = self.shape, self.clusters
        costs = [cost * unit for cost, unit in zip(self.costs, self.units, strict=True)]
        if not costs[0]:
            return high, min(wide, max(1, round(clusters / high)))
        if not costs[1]:
            return min(high, max(1, round(clusters / wide))), wide
        rows = min(high, max(1, round(sqrt(clusters * costs[1] / costs[0]))))
        columns = min(wide, max(1, -(-clusters // rows)))
        return min(high, max(1, -(-clusters // columns))), columns

    def whole(self, steps: int) -> int:
        """How many units of `steps` are not shared out: rounds of one for each cluster.

        Otherwise some clusters would have nothing to do in the last round. Of what is shared each
        has half a unit at least, so that few add to one; a whole one where that is as good: then
        what it adds has been there for long.
        """
        count, clusters = prod(self.shape), self.clusters
        over = count % clusters
        whole = count - over - (clusters if 2 * over < clusters else 0)
        idle = (clusters - over) / clusters * steps
        return whole if over and whole >= 0 and idle >= self.sharing else count


def walk(tiles: Tiles, pieces: Sequence[tuple[int, int]], steps: int) -> PanelSchedule:
    """The walk over the tiles. The first wave comes in `pieces` of the `steps` along k."""
    first = tiles.first_wave
    bounds = [
        _cuts(extent, first[side], tiles.costs[side] > 0) for side, extent in enumerate(tiles.shape)
    ]
    extents = tiles.m, tiles.n
    fetches: list[Fetch] = []
    regions: list[Region] = []
    for start, end in pieces:
        for side in (0, 1):
            lo, hi = _extent(bounds[side], 0, tiles.units[side], extents[side])
            fetches.append(Fetch(side, 0, lo, hi, start, end))
    come, units = [1, 1], 0
    served = [(0, 0)]
    while served:
        for row_part, column_part in served:
            top, left = bounds[0][row_part], bounds[1][column_part]
            heights, across = bounds[0][row_part + 1] - top, bounds[1][column_part + 1] - left
            regions.append(Region(units, top, heights, left, across, row_part, column_part))
            units += heights * across
        served = []
        waiting = [side for side in (0, 1) if come[side] < len(bounds[side]) - 1]
        if waiting:  # what unlocks most for its bytes
            side = max(waiting, key=lambda s: _unlocks(tiles, bounds, come, s))
            part = come[side]
            lo, hi = _extent(bounds[side], part, tiles.units[side], extents[side])
            cuts = sorted({steps * cut // _CUTS for cut in range(_CUTS + 1)})
            fetches += [Fetch(side, part, lo, hi, *cut) for cut in pairwise(cuts)]
            others = range(come[1 - side])
            served = [(part, other) if side == 0 else (other, part) for other in others]
            come[side] += 1
    parts = len(bounds[0]) - 1, len(bounds[1]) - 1
    return PanelSchedule(tuple(fetches), tuple(regions), parts, units, tiles.whole(steps))


def _unlocks(tiles: Tiles, bounds: Sequence[list[int]], come: Sequence[int], side: int) -> float:
    """Tiles for a byte of the next rows or columns."""
    return bounds[1 - side][come[1 - side]] / (tiles.costs[side] * tiles.units[side])


def _cuts(extent: int, first: int, comes: bool) -> list[int]:
    """Bounds of the parts: all at once for a factor that is here."""
    if not comes or first >= extent:
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
