"""The walk over tiles whose factors come while they are multiplied: pure, without ranks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draws import drawn
from shardmath.operators.matmul.gpu.panel_schedule import (
    MOST_REGIONS,
    TILE_ROWS,
    Tiles,
    make_schedule,
)

SIZES = st.integers(1, 9000)


@drawn(200)
@given(
    m=SIZES,
    n=SIZES,
    cuts=st.lists(st.integers(1, 30), min_size=0, max_size=5),
    costs=st.sampled_from([(1.0, 1.0), (3.0, 1.0), (0.0, 2.0), (2.0, 0.0), (0.0, 0.0)]),
    width=st.sampled_from([128, 256]),
    cluster=st.sampled_from([1, 2]),
)
def test_every_tile_is_computed_once_after_what_it_needs_is_fetched(
    m, n, cuts, costs, width, cluster
):
    tiles = Tiles(m, n, costs, width, cluster, 132 // cluster)
    ends = np.cumsum([2, *cuts]).tolist()  # nothing comes for the first two steps
    schedule = make_schedule(tiles, list(pairwise(ends)), ends[-1])
    unit = TILE_ROWS * cluster
    computed = np.zeros((-(-m // unit), -(-n // width)), int)
    units = 0
    for region in schedule.regions:
        assert region.first == units
        units += region.unit_rows * region.tile_columns
        rows = slice(region.row, region.row + region.unit_rows)
        computed[rows, region.column : region.column + region.tile_columns] += 1
    assert (computed == 1).all() and units == schedule.units
    loaded = np.zeros((m + n, ends[-1]), int)
    for fetch in schedule.fetches:
        start = fetch.lo + (m if fetch.operand else 0)
        loaded[start : start + fetch.hi - fetch.lo, fetch.first : fetch.last] += 1
    assert (loaded[:, 2:] == 1).all() and (loaded[:, :2] <= 1).all()
    assert len(schedule.regions) <= MOST_REGIONS


@pytest.mark.parametrize("shape", [(8192, 4096), (16384, 8192)])
def test_the_first_wave_comes_in_pieces_and_keeps_all_blocks_busy(shape):
    tiles = Tiles(*shape, (0.75, 0.5), width=256, cluster=2, clusters=66)
    schedule = make_schedule(tiles, [(8, 24), (24, 64)], 64)
    assert len([fetch for fetch in schedule.fetches if fetch.part == 0]) == 4
    first = schedule.regions[0]
    assert 66 <= first.unit_rows * first.tile_columns <= 80


@pytest.mark.parametrize(
    ("shape", "steps", "data_parallel_units"),
    [
        ((4096, 2048), 512, 198),  # 58 of 66 clusters have one more unit: shared by all
        ((8448, 1024), 512, 264),  # nobody is idle
        ((4096, 2048), 8, 256),  # too short to be shared
        ((16384, 8192), 512, 4026),  # 62 rounds and 4 units: all of them and a round are shared
        ((4352, 256), 512, 0),  # 34 units, more than half of the clusters
        ((4096, 256), 512, 32),  # fewer
    ],
)
def test_the_last_round_is_shared_by_all_clusters(shape, steps, data_parallel_units):
    tiles = Tiles(*shape, (1.0, 1.0), width=128, cluster=2, clusters=66, fixup_steps=10)
    assert tiles.data_parallel_units(steps) == data_parallel_units
