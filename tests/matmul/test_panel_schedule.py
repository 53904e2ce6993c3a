"""The walk over tiles whose factors come while they are multiplied: pure, without ranks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmath.operators.matmul.gpu.panel_schedule import MOST_REGIONS, TILE_ROWS, Tiles, walk

SIZES = st.integers(1, 9000)


@settings(max_examples=200, deadline=None, database=None)
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
    made = walk(tiles, list(pairwise(ends)), ends[-1])
    unit = TILE_ROWS * cluster
    computed = np.zeros((-(-m // unit), -(-n // width)), int)
    units = 0
    for region in made.regions:
        assert region.first == units
        units += region.heights * region.across
        rows = slice(region.row, region.row + region.heights)
        computed[rows, region.column : region.column + region.across] += 1
    assert (computed == 1).all() and units == made.units
    come = np.zeros((m + n, ends[-1]), int)
    for fetch in made.fetches:
        start = fetch.lo + (m if fetch.side else 0)
        come[start : start + fetch.hi - fetch.lo, fetch.first : fetch.last] += 1
    assert (come[:, 2:] == 1).all() and (come[:, :2] <= 1).all()
    assert len(made.regions) <= MOST_REGIONS


@pytest.mark.parametrize("shape", [(8192, 4096), (16384, 8192)])
def test_the_first_wave_comes_in_pieces_and_keeps_all_blocks_busy(shape):
    tiles = Tiles(*shape, (0.75, 0.5), width=256, cluster=2, clusters=66)
    made = walk(tiles, [(8, 24), (24, 64)], 64)
    assert len(made.first_wave) == 4
    first = made.regions[0]
    assert 66 <= first.heights * first.across <= 80


@pytest.mark.parametrize(
    ("shape", "steps", "whole"),
    [
        ((4096, 2048), 512, 198),  # 58 of 66 clusters have one more unit: shared by all
        ((8448, 1024), 512, 264),  # nobody is idle
        ((4096, 2048), 8, 256),  # too short to be shared
        ((16384, 8192), 512, 4026),  # 62 rounds and 4 units: all of them and a round are shared
        ((4352, 256), 512, 0),  # 34 units, more than half of the clusters
        ((4096, 256), 512, 32),  # fewer
    ],
)
def test_the_last_round_is_shared_by_all_clusters(shape, steps, whole):
    tiles = Tiles(*shape, (1.0, 1.0), width=128, cluster=2, clusters=66, sharing=10)
    assert tiles.whole(steps) == whole
