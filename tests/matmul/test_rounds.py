"""Rounds in which ranks send their lines to all others: pure, every rank here."""

from __future__ import annotations

import itertools

import pytest

from shardmath.geometry import Layout, Replicated, Slab
from shardmath.local.epilog import MatmulEpilog
from shardmath.machine import H200
from shardmath.operators.matmul.gpu.rounds import Rounds, cuts, rounds_of
from shardmath.operators.matmul.problem import Problem
from shardmath.operators.matmul.scaling import TENSOR, Scaling
from shardmath.operators.matmul.strategy import choose

X, Y, R = Slab.X, Slab.Y, Replicated()
SIZES = [2, 3, 4, 5, 8, 16]


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_hears_from_every_other_once(size):
    rounds = Rounds(0, (16,) * size, tuple(range(size)))
    for number in range(1, size):
        targets = [rounds.target(rank, number) for rank in range(size)]
        assert sorted(targets) == list(range(size))  # no two send to the same
        assert all(rounds.source(to, number) == rank for rank, to in enumerate(targets))
    for rank in range(size):
        heard = {rounds.source(rank, number) for number in range(1, size)}
        assert heard == set(range(size)) - {rank}


@pytest.mark.parametrize("size", SIZES)
def test_stages_are_all_lines_once_and_none_before_it_has_come(size):
    lines = tuple(16 * (3 * rank % 5) for rank in range(size))  # some have none
    inner = range(1, size - 1)
    for some in itertools.chain([inner, []], itertools.combinations(inner, 2)):
        rounds = Rounds(0, lines, (0, *some, size - 1))
        for rank in range(size):
            there: list[int] = []
            come = {rank: 0} | {rounds.source(rank, n): n for n in range(1, size)}
            for stage in rounds.stages(rank):
                assert stage.round in rounds.cuts and stage.lo < stage.hi
                there += range(stage.lo, stage.hi)
                for src, (lo, hi) in enumerate(itertools.pairwise(rounds.starts)):
                    if stage.lo < hi and lo < stage.hi and lo < hi:
                        assert stage.lo <= lo and hi <= stage.hi and come[src] <= stage.round
            assert sorted(there) == list(range(sum(lines)))


def test_neighbours_of_powers_of_two_are_multiplied_together():
    rounds = Rounds(0, (32,) * 4, (0, 1, 3))
    assert [(x.round, x.lo, x.hi) for x in rounds.stages(2)] == [
        (0, 64, 96), (1, 96, 128), (3, 0, 64),
    ]  # fmt: skip
    assert [(x.lo, x.hi) for x in Rounds(1, (32, 0, 5), ()).stages(1)] == [(0, 37)]


CHOICES = [
    ((8192, 2048, 8192), 4, (0, 1, 2, 3)),  # the links take as long as the products
    ((8192, 7168, 8192), 4, (0, 3)),  # products take longer: few
    ((1024, 256, 1024), 4, ()),  # there is nothing to hide behind
    ((8190, 2048, 8192), 2, ()),  # parts begin where the other factor's lines are not aligned
]


@pytest.mark.parametrize(("shape", "size", "expected"), CHOICES)
def test_where_products_follow(shape, size, expected):
    lines, others, k = shape
    assert cuts([lines // size] * size, others, k) == expected


@pytest.mark.parametrize("size", [2, 3, 5, 8, 64])
def test_products_follow_from_the_first_round_to_the_last(size):
    found = cuts([1024] * size, 4096, 8192)
    assert found[0] == 0 and found[-1] == size - 1 and list(found) == sorted(set(found))


STRATEGIES = [
    ((X, Y, Y), 1024, 0),
    ((X, Y, X), 1024, 1),
    ((R, Y, Y), 1024, None),  # is there
    ((Y, X, X), 1024, None),  # is added up
    ((X, X, X), 1024, None),  # comes along k
    ((X, Y, Y), 1 << 25, None),  # is too large
    ((X, Y, Y), 0, None),
]


@pytest.mark.parametrize(("dists", "k", "index"), STRATEGIES)
def test_strategies_that_gather_lines(dists, k, index):
    m = n = 1024
    e4, layouts = "float8_e4m3fn", []
    for dist, shape in zip(dists, ((m, k), (k, n), (m, n)), strict=True):
        layouts.append(Layout.bind([dist] * 4, shape))
    problem = Problem(
        *layouts, dtype=e4, result="bfloat16", transpose=(False, False), conjugate=(False, False),
        has_c=False, sums_c=False, epilog=MatmulEpilog.DEFAULT, strategy=None,
        scaling=Scaling((e4, e4), "bfloat16", TENSOR, TENSOR, c=False, d=False, amax=False),
    )  # fmt: skip
    found = rounds_of(choose(problem, H200)[0])
    assert (found and found.index) == index
    assert found is None or found.lines == (256,) * 4
