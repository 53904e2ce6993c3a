"""What decompositions compute on one rank: panels of QR, its tree, reflectors, random numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shardmath.distributed.dense import reflected, scattered
from shardmath.distributed.qr import panels, tree

ROWS = [
    [0], [1], [200], [7, 0, 5], [50, 50, 50, 50], [1, 1, 1, 1], [0, 0], [300, 299],
    [13, 200, 1, 0, 40, 7, 7, 7],
]  # fmt: skip


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("columns", [0, 1, 5, 64, 200])
@pytest.mark.parametrize("width", [1, 7, 128])
def test_panels_take_every_column_of_rows_that_there_are(rows, columns, width):
    starts, first = [0] * len(rows), 0
    for panel in panels(rows, columns, width):
        assert panel.first == first
        assert panel.starts == tuple(starts)
        assert 1 <= panel.width <= width
        starts[panel.owner] += panel.width
        assert starts[panel.owner] <= rows[panel.owner]
        first += panel.width
    assert first == min(columns, sum(rows))


def test_ranks_give_rows_in_turn():
    planned = panels([1000, 1000], 1000, 100)
    assert [panel.owner for panel in planned] == [0, 1] * 5


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 5), (5, 2), (1, 1), (40, 17)], ids=str)
def test_reflectors_make_a_triangle(shape, dtype):
    a = np.random.default_rng(3).standard_normal(shape).astype(dtype)
    a = a if a.dtype.kind == "f" else a * (1 + 2j)
    v, t, r = reflected(a)
    got = a - v @ (t.conj().T @ (v.conj().T @ a))
    count = min(shape)
    assert v.shape == (len(a), count)
    assert r.shape == (count, shape[1])
    bound = 100 * np.finfo(dtype).eps * (1 + np.linalg.norm(a))
    np.testing.assert_allclose(got[:count], r, atol=bound)
    np.testing.assert_allclose(got[count:], 0, atol=bound)
    assert not np.tril(r, -1).any()


@pytest.mark.parametrize("rows", [3, 100, 9_001])
def test_a_tall_part_is_a_tree_of_leaves(rows):
    """Each stage is of rows that the stages before have left, and R is left in the first rows."""
    a = np.random.default_rng(rows).standard_normal((rows, 96))
    stages, r = tree(a, 5)
    placed = np.concatenate([np.zeros((5, 96)), a])
    for stage in stages:
        x = np.concatenate([placed[part] for part in stage.rows])
        x -= stage.v @ (stage.t.T @ (stage.v.T @ x))
        for part, piece in (
            zip(stage.rows, np.split(x, len(stage.rows)), strict=True)
            if len(stage.rows) > 1
            else [(stage.rows[0], x)]
        ):
            placed[part] = piece
    count = min(rows, 96)
    np.testing.assert_allclose(placed[5 : 5 + count], r, atol=1e-10)
    np.testing.assert_allclose(placed[5 + count :], 0, atol=1e-10)
    assert (len(stages) > 3) == (rows >= 6_000)


def test_numbers_are_those_of_splitmix64():
    """Its published words for the seed 1234567, in any type and library; and rows of them."""
    words = np.array(
        [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431],
        np.uint64,
    )
    expected = words.astype(np.int64).reshape(2, 2) * 2.0**-63
    for like in (np.zeros(1), torch.zeros(1, dtype=torch.float64), np.zeros(1, "complex128")):
        made = scattered(range(2), 2, 1234567, like)
        assert made.dtype == like.dtype
        np.testing.assert_array_equal(np.asarray(made), expected)
        np.testing.assert_array_equal(scattered(range(1, 2), 2, 1234567, like), expected[1:])
    assert abs(scattered(range(500), 7, 1, np.zeros(1)).mean(axis=0)).max() < 0.1
