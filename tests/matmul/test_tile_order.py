"""The order of tiles, without ranks or GPUs: each tile once, each slot once, chunk after chunk."""

from __future__ import annotations

import numpy as np
import pytest

from shardmath.operators.matmul.gpu.tile_order import TILE_COLUMNS, TILE_ROWS, TileOrder

WALKS = [
    TileOrder((1024,) * 8, 8192, 4),
    TileOrder((128,) * 8, 8192, 2),
    TileOrder((130, 0, 7, 300), 601, 3),
    TileOrder((1, 129), 1, 5),
    TileOrder((64,), 256, 1),
    TileOrder((5000, 0, 0), 300, 8),
    TileOrder((1024,) * 4, 8192, 8, 2),
    TileOrder((130, 0, 7, 1300), 2601, 6, 3),
]


def fields(words):
    row, column, what, slot = (words[:, i].astype(np.int64) for i in range(4))
    return row, column, what & 0xFF, what >> 8 & 0xFF, what >> 16, slot


@pytest.mark.parametrize("walk", WALKS, ids=repr)
def test_every_rank_computes_each_tile_once(walk: TileOrder) -> None:
    first = np.concatenate([[0], np.cumsum(walk.rows)])
    wanted = {
        (int(first[owner]) + i * TILE_ROWS, j * TILE_COLUMNS)
        for owner, rows in enumerate(walk.rows)
        for i in range(-(-rows // TILE_ROWS))
        for j in range(-(-walk.columns // TILE_COLUMNS))
    }
    for rank in range(len(walk.rows)):
        row, column, *_ = fields(walk.of(rank))
        assert len(row) == walk.count == len(wanted)
        assert set(zip(row.tolist(), column.tolist(), strict=True)) == wanted


@pytest.mark.parametrize("walk", WALKS, ids=repr)
def test_senders_and_owners_mean_the_same_slots(walk: TileOrder) -> None:
    first = np.concatenate([[0], np.cumsum(walk.rows)])
    for rank in range(len(walk.rows)):
        row, column, owner, rows, chunk, slot = fields(walk.of(rank))
        for dst in range(len(walk.rows)):
            mine = owner == dst
            order = np.argsort(slot[mine])
            sent = np.stack([x[mine][order] for x in (row - first[dst], column, rows, chunk, slot)])
            kept = fields(walk.owned(dst))
            assert (sent == np.stack([kept[0], kept[1], kept[3], kept[4], kept[5]])).all()
            assert (kept[5] == np.arange(walk.tiles(dst))).all()
            assert (kept[4] == np.sort(kept[4])).all()
            assert (kept[3] == np.minimum(walk.rows[dst] - kept[0], TILE_ROWS)).all()
            ends = np.searchsorted(kept[4], np.arange(walk.chunks), "right")
            halves = [
                2 * int((kept[4] == c).sum()) - int((kept[3][kept[4] == c] <= 64).sum())
                for c in range(walk.chunks)
            ]
            assert walk.table(dst).tolist() == np.column_stack([halves, ends]).tolist()


@pytest.mark.parametrize("walk", WALKS, ids=repr)
def test_chunks_follow_each_other(walk: TileOrder) -> None:
    for rank in range(len(walk.rows)):
        chunk = fields(walk.of(rank))[4]
        assert (np.diff(chunk) >= 0).all()


@pytest.mark.parametrize("walk", WALKS, ids=repr)
def test_a_cluster_has_tiles_of_the_same_columns(walk: TileOrder) -> None:
    for rank in range(len(walk.rows)):
        alone, pairs = walk.of(rank), walk.of(rank, 2)
        assert len(pairs) % 2 == 0
        assert (pairs[::2, 1] == pairs[1::2, 1]).all()
        real = pairs[fields(pairs)[3] > 0]
        assert (real == alone).all()
        assert len(pairs) <= 2 * len(alone)


def test_a_rank_begins_with_the_next_one_and_ends_with_itself() -> None:
    walk = TileOrder((1024,) * 4, 256, 1)
    owner = fields(walk.of(1))[2]
    assert list(dict.fromkeys(owner.tolist())) == [2, 3, 0, 1]


def test_rows_of_tiles_are_walked_in_groups() -> None:
    walk = TileOrder((4096,), 1024, 1)
    row, column, *_ = fields(walk.of(0))
    assert list(row[:32] // TILE_ROWS) == list(range(16)) * 2
    assert list(column[:32] // TILE_COLUMNS) == [0] * 16 + [1] * 16
