"""Which products one collective adds up, in which order and type: pure."""

from __future__ import annotations

import pytest

from shardmath.geometry import Layout, Replicated, Slab
from shardmath.local.epilog import MatmulEpilog
from shardmath.machine import Machine
from shardmath.operators.matmul.gpu.rank_plan import RankPlan
from shardmath.operators.matmul.gpu.scale_moves import choose_strategy
from shardmath.operators.matmul.problem import Problem

RESULTS = {"everywhere": Replicated(), "rows": Slab.X, "columns": Slab.Y}


def rank_plan(kind, shape, dtype, *, size=2, label="stationary a", epilog=MatmulEpilog.DEFAULT):
    m, n, k = shape
    problem = Problem(
        a=Layout.bind([Slab.Y] * size, (m, k)),
        b=Layout.bind([Slab.X] * size, (k, n)),
        d=Layout.bind([RESULTS[kind]] * size, (m, n)),
        dtype=dtype,
        result=dtype,
        transpose=(False, False),
        conjugate=(False, False),
        has_c=False,
        sums_c=False,
        epilog=epilog,
        strategy=label,
    )
    return RankPlan(choose_strategy(problem, Machine("cuda", (0,) * size))[0], 0, (0,) * size)


# Shapes as in test_added_products.py of tests/cuda: all go through the collective, none by the
# kernel.
@pytest.mark.parametrize("epilog", [MatmulEpilog.DEFAULT, MatmulEpilog.BIAS])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    ("dtype", "shape", "parts"),
    [
        ("float32", (70, 90, 33), "float32"),
        ("bfloat16", (7, 9, 64), "float32"),
        ("float16", (800, 700, 129), "float16"),
        ("complex64", (40, 31, 20), "complex64"),
        ("float64", (1, 17, 3), "float64"),
    ],
)
@pytest.mark.parametrize(
    ("kind", "orders"),
    [
        ("everywhere", {"C": "C", "F": "F"}),
        ("rows", {"C": "C", "F": ""}),
        ("columns", {"C": "", "F": "F"}),
    ],
)
def test_what_a_collective_adds_up(kind, orders, dtype, shape, parts, size, epilog):
    found = rank_plan(kind, shape, dtype, size=size, epilog=epilog)
    assert {order: found.addition_order(order) for order in "CF"} == orders
    assert found.parts_dtype == parts
    assert not found.one_kernel


def test_large_products_go_through_the_kernel():
    found = rank_plan("everywhere", (8192, 8192, 28672), "bfloat16", size=8)
    assert found.one_kernel
    biased = rank_plan(
        "everywhere", (8192, 8192, 28672), "bfloat16", size=8, epilog=MatmulEpilog.BIAS
    )
    assert not biased.one_kernel  # it has no epilog


def test_what_is_gathered_is_not_added():
    assert (
        rank_plan("rows", (64, 64, 64), "float32", label="stationary c").addition_order("C") == ""
    )


@pytest.mark.parametrize(
    ("kind", "size", "shape"),
    [
        ("everywhere", 4, (8192, 8192, 14336)),
        ("rows", 4, (16384, 16384, 26624)),
        ("everywhere", 2, (4096, 4096, 4096)),
        ("everywhere", 8, (1024, 8192, 28672)),
    ],
)
def test_strategies_are_compared_with_what_the_kernel_takes(kind, size, shape):
    """Its steps one after another would take longer than moving the factors."""
    found = rank_plan(kind, shape, "bfloat16", size=size, label=None)
    assert found.strategy.label == "stationary a"
    assert found.one_kernel
