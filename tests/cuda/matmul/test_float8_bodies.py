"""The host's test bodies for products of eight-bit floats, on ranks with GPUs.

Tensor cores add up eight-bit products with fewer bits than float32 has: sums may be further off.
"""

from __future__ import annotations

import importlib
from unittest.mock import patch

import pytest
import test_float8_products as bodies
from test_matmul_bodies import body

SUMS = 4e-4
ONE = [("vectors", "squares", "float8_e4m3fn", "float8_e4m3fn", "bfloat16", (False, True), "C")]
MANY = [
    *ONE,
    ("tensor", "tensor", "float8_e4m3fn", "float8_e5m2", "float8_e5m2", (False, False), "C"),
    ("outer", "tensor", "float8_e5m2", "float8_e4m3fn", "float32", (True, False), "F"),
    ("squares", "squares", "float8_e4m3fn", "float8_e4m3fn", "float16", (True, True), "F"),
]


@pytest.mark.parametrize("where", ["gpu", "host"])
@pytest.mark.parametrize("layout", list(bodies.cases.LAYOUTS))
def test_every_granularity(gpus, size, layout, where):
    cases = bodies.all_cases() if where == "gpu" else bodies.all_cases()[::5]
    for name in ("small", "thin", "blocks", "none"):
        args = ["torch", layout, bodies.SHAPES[name], cases, SUMS]
        assert gpus.run(body, bodies.__name__, "table", where, args, ranks=size) == [[]] * size


def in_rounds(context, after, args):
    """The body's table, with products that follow on these rounds."""
    rounds = importlib.import_module("shardmath.operators.matmul.gpu.rounds")
    with patch.object(rounds, "cuts", lambda *_: tuple(after)):
        return body(context, bodies.__name__, "table", "gpu", args)


@pytest.mark.parametrize("which", ["none", "each", "last"])
@pytest.mark.parametrize(("layout", "index"), [("rows of a", 0), ("columns of b", 1)])
def test_lines_that_come_in_rounds(gpus, size, layout, index, which):
    if size == 1:
        pytest.skip("one rank has all lines")
    number = ["none", "each", "last"].index(which)
    after = [(), range(size), sorted({0, size - 1})][number]
    for lines, others in ((1536, 272), (576, 60)):  # in squares for all ranks, or not
        k = 400 + 16 * number  # of its own: plans are kept
        shape = (lines, others, k) if index == 0 else (others, lines, k)
        args = ["torch", layout, shape, bodies.all_cases()[number::3], SUMS]
        assert gpus.run(in_rounds, list(after), args, ranks=size) == [[]] * size


def replayed(context, after):
    """Whether a graph sees new elements, and whether other algorithms compute the same."""
    torch = importlib.import_module("torch")
    rounds = importlib.import_module("shardmath.operators.matmul.gpu.rounds")
    torch.cuda.set_device(context.device_id)
    device = torch.device("cuda", context.device_id)
    random = torch.Generator(device).manual_seed(context.rank)

    def some(*shape):
        x = torch.randn(shape, device=device, generator=random)
        return x.to(torch.float8_e4m3fn) if len(shape) == 2 else x.abs()

    k = 320 + 16 * len(after)  # of its own: plans are kept
    a, b, scales = some(64, k), some(48, k).T, {"a": some(64), "b": some(48)}
    given = {
        "distributions": [bodies.cases.Slab.X, bodies.cases.Slab.Y, bodies.cases.Slab.Y],
        "quantization_scales": scales,
        "options": {"result_type": bodies.NUMBERS["float32"]},
    }
    with patch.object(rounds, "cuts", lambda *_: tuple(after)), context:
        bodies.matmul(a, b, **given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = bodies.matmul(a, b, **given)
        same = []
        for _ in range(3):
            a.copy_(some(64, k))
            scales["a"].copy_(some(64))
            graph.replay()
            fresh = bodies.matmul(a, b, **given)
            same.append(torch.equal(made, fresh))
        with bodies.Matmul(a, b, **given) as mm:
            mm.plan(autotune=True)
            close = torch.allclose(mm.execute(), fresh, rtol=1e-3, atol=1e-2)
            explained = mm.explain()
    context.team.synchronize(0)
    return [same, close, "autotuned" in explained, "rows of a come" in explained]


@pytest.mark.parametrize("which", ["none", "each"])
def test_rounds_in_graphs(gpus, which):
    after = range(gpus.size) if which == "each" else ()
    found = gpus.run(replayed, list(after), ranks=gpus.size)
    assert found == [[[True] * 3, True, True, gpus.size > 1]] * gpus.size


@pytest.mark.parametrize("layout", ["rows", "reduce", "blocks"])
def test_many_intervals(gpus, size, layout):
    args = ["torch", layout, (640, 1024, 10000), MANY, SUMS]
    assert gpus.run(body, bodies.__name__, "table", "gpu", args, ranks=size) == [[]] * size


@pytest.mark.parametrize("layout", ["rows", "reduce", "everywhere", "blocks"])
def test_every_strategy(gpus, size, layout):
    args = ["torch", layout, bodies.SHAPES["blocks"], SUMS]
    for wrong, _ in gpus.run(body, bodies.__name__, "every_strategy", "gpu", args, ranks=size):
        assert not wrong


@pytest.mark.parametrize("where", ["gpu", "host"])
@pytest.mark.parametrize(
    ("result", "addend"),
    [
        ("bfloat16", "bfloat16"),
        ("float8_e4m3fn", "float16"),
        ("float8_e5m2", "float8_e5m2"),
        ("float32", "float8_e4m3fn"),
        ("float8_e4m3fn", "float32"),
    ],
)
def test_epilogs(gpus, size, result, addend, where):
    args = ["torch", result, addend, SUMS]
    assert gpus.run(body, bodies.__name__, "run_epilogs", where, args, ranks=size) == [[]] * size


@pytest.mark.parametrize("where", ["gpu", "host"])
def test_too_large_a_number_is_the_greatest(gpus, where):
    ranks = min(gpus.size, 2)
    gpus.run(body, bodies.__name__, "saturate", where, ["torch"], ranks=ranks)


@pytest.mark.parametrize("where", ["gpu", "host"])
def test_resetting_scales(gpus, where):
    ranks = min(gpus.size, 2)
    args = ["torch"] if where == "gpu" else ["numpy"]
    found = gpus.run(body, bodies.__name__, "reset_scales", where, args, ranks=ranks)
    assert found == [[1.0, 1.5, 3.0, 2.0]] * ranks


def mistakes(context, culprit, through):
    return importlib.import_module("test_float8_mistakes").make_mistakes(context, culprit, through)


def test_mistakes(gpus):
    ranks = min(gpus.size, 3)
    rows = importlib.import_module("test_float8_mistakes").MISTAKES
    first, *others = gpus.run(mistakes, ranks - 1, "make", ranks=ranks)
    assert all(other == first for other in others)
    for name, (kind, text) in first.items():
        assert kind in rows[name][1 if ranks > 1 else 2].split(" or "), (name, kind, text)
