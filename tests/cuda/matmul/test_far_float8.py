"""Products of eight-bit floats on GPUs of pretended hosts: the bodies of one host, by parcels."""

from __future__ import annotations

import pytest
from test_float8_bodies import MANY, SUMS, bodies, mistakes
from test_matmul_bodies import body
from visible import RANKS


@pytest.mark.parametrize("layout", list(bodies.cases.LAYOUTS))
def test_every_granularity(far_gpus, layout):
    for name, every in (("small", 3), ("thin", 5), ("blocks", 2), ("none", 8)):
        some = bodies.all_cases()[every % 2 :: every]
        args = ["torch", layout, bodies.SHAPES[name], some, SUMS]
        assert far_gpus.run(body, bodies.__name__, "table", "gpu", args) == [[]] * RANKS


def test_arrays_in_host_memory(far_gpus):
    args = ["torch", "blocks", bodies.SHAPES["blocks"], bodies.all_cases()[::5], SUMS]
    assert far_gpus.run(body, bodies.__name__, "table", "host", args) == [[]] * RANKS


@pytest.mark.parametrize("layout", ["rows", "reduce", "blocks"])
def test_many_intervals(far_gpus, layout):
    args = ["torch", layout, (640, 1024, 10000), MANY, SUMS]
    assert far_gpus.run(body, bodies.__name__, "table", "gpu", args) == [[]] * RANKS


@pytest.mark.parametrize("layout", ["rows", "reduce", "everywhere", "blocks"])
def test_every_strategy(far_gpus, layout):
    args = ["torch", layout, bodies.SHAPES["blocks"], SUMS]
    for wrong, _ in far_gpus.run(body, bodies.__name__, "every_strategy", "gpu", args):
        assert not wrong


@pytest.mark.parametrize(
    ("result", "addend"),
    [
        ("bfloat16", "bfloat16"),
        ("float8_e4m3fn", "float16"),
        ("float8_e5m2", "float8_e5m2"),
        ("float8_e4m3fn", "float32"),
    ],
)
def test_epilogs(far_gpus, result, addend):
    args = ["torch", result, addend, SUMS]
    assert far_gpus.run(body, bodies.__name__, "run_epilogs", "gpu", args) == [[]] * RANKS


def test_too_large_a_number_is_the_greatest(far_gpus):
    far_gpus.run(body, bodies.__name__, "saturate", "gpu", ["torch"])


def test_resetting_scales(far_gpus):
    found = far_gpus.run(body, bodies.__name__, "reset_scales", "gpu", ["torch"])
    assert found == [[1.0, 1.5, 3.0, 2.0]] * RANKS


def test_mistakes(far_gpus):
    first, *others = far_gpus.run(mistakes, RANKS - 1, "make")
    assert all(other == first for other in others)
