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


@pytest.mark.parametrize("tile_order", WALKS, ids=repr)
def test_every_rank_computes_each_tile_once(tile_order: TileOrder) -> None:
    first = np.concatenate([[0], np.cumsum(tile_order.rows)])
    wanted = {
        (int(first[owner]) + i * TILE_ROWS, j * TILE_COLUMNS)
        for owner, rows in enumerate(tile_order.rows)
        for i in range(-(-rows // TILE_ROWS))
        for j in range(-(-tile_order.columns // TILE_COLUMNS))
    }
    for rank in range(len(tile_order.rows)):
        row, column, *_ = fields(tile_order.of(rank))
        assert len(row) == tile_order.count == len(wanted)
        assert set(zip(row.tolist(), column.tolist(), strict=True)) == wanted


@pytest.mark.parametrize("tile_order", WALKS, ids=repr)
def test_senders_and_owners_mean_the_same_slots(tile_order: TileOrder) -> None:
    first = np.concatenate([[0], np.cumsum(tile_order.rows)])
    for rank in range(len(tile_order.rows)):
        row, column, owner, rows, chunk, slot = fields(tile_order.of(rank))
        for dst in range(len(tile_order.rows)):
            mine = owner == dst
            order = np.argsort(slot[mine])
            sent = np.stack([x[mine][order] for x in (row - first[dst], column, rows, chunk, slot)])
            kept = fields(tile_order.owned(dst))
            assert (sent == np.stack([kept[0], kept[1], kept[3], kept[4], kept[5]])).all()
            assert (kept[5] == np.arange(tile_order.tiles(dst))).all()
            assert (kept[4] == np.sort(kept[4])).all()
            assert (kept[3] == np.minimum(tile_order.rows[dst] - kept[0], TILE_ROWS)).all()
            ends = np.searchsorted(kept[4], np.arange(tile_order.chunks), "right")
            halves = [
                2 * int((kept[4] == c).sum()) - int((kept[3][kept[4] == c] <= 64).sum())
                for c in range(tile_order.chunks)
            ]
            assert tile_order.table(dst).tolist() == np.column_stack([halves, ends]).tolist()


@pytest.mark.parametrize("tile_order", WALKS, ids=repr)
def test_chunks_follow_each_other(tile_order: TileOrder) -> None:
    for rank in range(len(tile_order.rows)):
        chunk = fields(tile_order.of(rank))[4]
        assert (np.diff(chunk) >= 0).all()


@pytest.mark.parametrize("tile_order", WALKS, ids=repr)
def test_a_cluster_has_tiles_of_the_same_columns(tile_order: TileOrder) -> None:
    for rank in range(len(tile_order.rows)):
        alone, pairs = tile_order.of(rank), tile_order.of(rank, 2)
        assert len(pairs) % 2 == 0
        assert (pairs[::2, 1] == pairs[1::2, 1]).all()
        real = pairs[fields(pairs)[3] > 0]
        assert (real == alone).all()
        assert len(pairs) <= 2 * len(alone)


def test_a_rank_begins_with_the_next_one_and_ends_with_itself() -> None:
    tile_order = TileOrder((1024,) * 4, 256, 1)
    owner = fields(tile_order.of(1))[2]
    assert list(dict.fromkeys(owner.tolist())) == [2, 3, 0, 1]


def test_rows_of_tiles_are_walked_in_groups() -> None:
    tile_order = TileOrder((4096,), 1024, 1)
    row, column, *_ = fields(tile_order.of(0))
    assert list(row[:32] // TILE_ROWS) == list(range(16)) * 2
    assert list(column[:32] // TILE_COLUMNS) == [0] * 16 + [1] * 16
