"""Scales of float8 factors on their way to who multiplies: geometry alone, without ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from shardmath.geometry import BlockCyclic, Layout, ProcessGrid, Replicated, Slab
from shardmath.local.epilog import MatmulEpilog
from shardmath.machine import Machine
from shardmath.operators.matmul.gpu.scale_moves import (
    choose_strategy,
    keeps_blocks,
    modes,
    scale_moves,
)
from shardmath.operators.matmul.problem import Problem
from shardmath.operators.matmul.scaling import OUTER, SQUARES, TENSOR, VECTORS, Scaling
from shardmath.operators.matmul.strategy import candidates

SIZE = 4
GPUS, GPUS_OF_HOSTS = Machine("cuda", (0,) * SIZE), Machine("cuda", (0, 0, 1, 1))
BLOCKS = BlockCyclic(ProcessGrid(shape=(2, 2), layout=ProcessGrid.Layout.COL_MAJOR), (128, 128))
NARROW = BlockCyclic(ProcessGrid(shape=(1, 4)), (64, 64))
X, Y, R = Slab.X, Slab.Y, Replicated()
SHAPE = (1024, 768, 1024)
ODD = (1000, 520, 1100)


def problem(dists, a, b, shape=SHAPE, strategy=None, epilog=MatmulEpilog.DEFAULT):
    m, n, k = shape
    layouts = [
        Layout.bind([each] * SIZE, extents)
        for each, extents in zip(dists, ((m, k), (k, n), (m, n)), strict=True)
    ]
    e4 = "float8_e4m3fn"
    return Problem(
        *layouts,
        dtype=e4,
        result="bfloat16",
        transpose=(False, False),
        conjugate=(False, False),
        has_c=False,
        sums_c=False,
        epilog=epilog,
        strategy=strategy,
        scaling=Scaling((e4, e4), "bfloat16", a, b, c=False, d=False, amax=False),
    )


def indices(part):
    return np.array([i for lo, hi in part.ranges() for i in range(lo, hi)], int)


def scales_of(layout, rank, index, blocks):
    """Of a rank's part, lines first: the number of each block's first line and index of k."""
    part = layout.parts[rank]
    if 0 in layout.local_shape(rank):
        return np.zeros((0, 0), int)
    lines, k = indices(part[index]), indices(part[1 - index])
    first = lines[:: blocks.rows or len(lines)], k[:: blocks.columns or len(k)]
    if blocks.columns is None:
        first = first[0], np.zeros(1, int)
    return first[0][:, None] * 100_000 + first[1][None, :]


def moved(held, moves, shape):
    """What moves bring."""
    out = np.full(shape, -1)
    for move in moves:
        at = []
        for run in move.runs:
            steps = np.arange(run.count)[:, None]
            within = np.arange(run.length)
            at.append(
                (
                    (run.src_start + steps * run.src_step + within).ravel(),
                    (run.dst_start + steps * run.dst_step + within).ravel(),
                )
            )
        (src0, dst0), (src1, dst1) = at
        out[np.ix_(dst0, dst1)] = held[move.src][np.ix_(src0, src1)]
    return out


DISTS = [(X, X, X), (Y, X, X), (Y, Y, Y), (Y, X, R), (R, R, Y), (BLOCKS,) * 3, (X, BLOCKS, Y)]


@pytest.mark.parametrize("dists", DISTS)
@pytest.mark.parametrize(("a", "b"), list(itertools.product((OUTER, VECTORS, SQUARES), repeat=2)))
def test_scales_arrive_where_their_elements_do(dists, a, b):
    found = 0
    for strategy in candidates(problem(dists, a, b)):
        if not keeps_blocks(strategy):
            continue
        found += 1
        for index, (have, need) in enumerate(
            ((strategy.problem.a, strategy.a), (strategy.problem.b, strategy.b))
        ):
            made = scale_moves(strategy, index)
            held = [scales_of(have, rank, index, made.blocks) for rank in range(SIZE)]
            for rank in range(SIZE):
                assert held[rank].shape == made.transfer.src.local_shape(rank)
                want = scales_of(need, rank, index, made.blocks)
                got = moved(held, made.transfer.into(rank), want.shape)
                assert (got == want).all(), (strategy.label, index, rank)
                if made.stay:
                    assert (held[rank] == want).all()
    assert found


# The granularities, those that the product has, and what it multiplies.
WAYS = [
    ((X, X, X), TENSOR, TENSOR, SHAPE, ("tensor", "tensor"), "float8_e4m3fn"),
    ((X, X, X), TENSOR, OUTER, ODD, ("outer", "outer"), "float8_e4m3fn"),
    ((X, R, X), VECTORS, SQUARES, SHAPE, ("vectors", "squares"), "float8_e4m3fn"),
    ((X, R, X), SQUARES, SQUARES, SHAPE, ("vectors", "squares"), "float8_e4m3fn"),
    ((X, R, X), SQUARES, VECTORS, SHAPE, ("squares", "vectors"), "float8_e4m3fn"),
    ((X, R, X), SQUARES, OUTER, ODD, ("vectors", "vectors"), "float8_e4m3fn"),
    ((X, Y, Y), TENSOR, VECTORS, ODD, ("vectors", "vectors"), "float8_e4m3fn"),
    ((X, X, X), OUTER, VECTORS, ODD, None, "float32"),  # b is cut off multiples of 128 of k
    ((NARROW, R, X), VECTORS, OUTER, SHAPE, None, "float32"),
    ((NARROW, R, X), OUTER, VECTORS, SHAPE, ("vectors", "vectors"), "float8_e4m3fn"),
]


@pytest.mark.parametrize(("dists", "a", "b", "shape", "expected", "dtype"), WAYS)
def test_what_is_multiplied(dists, a, b, shape, expected, dtype):
    strategy, compared = choose_strategy(problem(dists, a, b, shape), GPUS)
    assert strategy.problem.dtype == dtype
    assert any(each is strategy for each, _ in compared)
    if expected is not None:
        assert modes(strategy) == expected


def test_a_strategy_by_name_and_sums_of_factors():
    for label in ("stationary c", "grid 2 x 1 x 2"):
        strategy, _ = choose_strategy(problem((X, X, X), VECTORS, SQUARES, ODD, label), GPUS)
        assert strategy.label == label and strategy.problem.dtype == "float32"
    given = problem((X, X, X), TENSOR, TENSOR, epilog=MatmulEpilog.BGRADA)
    assert choose_strategy(given, GPUS)[0].problem.dtype == "float32"


@pytest.mark.parametrize("layouts", [(X, X, X), (Y, X, X), (BLOCKS, BLOCKS, BLOCKS)])
def test_elements_are_multiplied_between_hosts_too(layouts):
    strategy, compared = choose_strategy(problem(layouts, VECTORS, SQUARES), GPUS_OF_HOSTS)
    assert strategy.problem.dtype == "float8_e4m3fn"
    assert strategy is min(compared, key=lambda each: each[1].seconds)[0]
    assert (
        choose_strategy(problem((NARROW, X, X), VECTORS, TENSOR), GPUS_OF_HOSTS)[0].problem.dtype
        == "float32"
    )
