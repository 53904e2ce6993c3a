"""Matrix products on GPUs of pretended hosts: the bodies of one host, by outboxes and `get`."""

from __future__ import annotations

import importlib

import pytest
import test_matmul_bodies as on_one_host
from hypothesis import given
from test_matmul_bodies import body
from visible import RANKS

from draws import drawn

ALL = max(RANKS, 1)


@pytest.mark.parametrize("where", ["gpu", "host"])
def test_any_product(far_gpus, where):
    @drawn(60)
    @given(case=on_one_host.matmul_cases.cases(ALL, ALL))
    def check(case):
        far_gpus.run(body, "test_matmul_any", "run_case", where, [case.plain()])

    check()


@pytest.mark.parametrize("shape", [(33, 20, 700), (9, 8, 7)], ids=["deep", "small"])
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_every_kind_of_strategy(far_gpus, shape, dtype):
    far_gpus.run(body, "test_matmul_behaviour", "every_strategy", "host", [shape, dtype])


@pytest.mark.parametrize(("function", "args"), on_one_host.BEHAVIOUR)
def test_behaviour(far_gpus, function, args):
    found = far_gpus.run(body, "test_matmul_behaviour", function, "host", args)
    if function == "repeat":
        assert all(set(counts) == {1} for counts in found)
    if function == "replicas":
        assert all(each == found[0] for each in found)


@pytest.mark.parametrize("function", on_one_host.CLASS)
def test_class(far_gpus, function):
    far_gpus.run(body, "test_matmul_class", function, "host", [])


@pytest.mark.parametrize("kind", ["rows", "columns", "blocks", "whole", "boxes"])
@pytest.mark.parametrize(("library", "dtype"), [("numpy", "float64"), ("torch", "bfloat16")])
def test_epilogs(far_gpus, kind, library, dtype):
    bodies = importlib.import_module("test_matmul_epilogs")
    args = [kind, library, dtype, bodies.EPILOGS]
    far_gpus.run(body, "test_matmul_epilogs", "run_epilogs", "gpu", args)


@pytest.mark.parametrize("args", [[False, False], [True, False], [True, True]])
def test_allreduce(far_gpus, args):
    found = far_gpus.run(body, "test_matmul_epilogs", "run_allreduce", "host", args)
    assert found == [9] * RANKS


def test_gradients_of_transposed_conjugates(far_gpus):
    far_gpus.run(body, "test_matmul_epilogs", "run_qualified_gradients", "host", [])


@pytest.mark.parametrize("culprit", [1, None])
def test_mistakes(far_gpus, culprit):
    first, *others = far_gpus.run(on_one_host.mistakes, culprit, "plan")
    assert on_one_host.wrong_answers(first, culprit) == []
    assert all(other == first for other in others)


@pytest.mark.parametrize(("dtype", "order"), [("bfloat16", "C"), ("float64", "F")])
@pytest.mark.parametrize("kind", ["cyclic", "gather", "columns", "reduce", "everywhere"])
def test_many_intervals(far_gpus, kind, dtype, order):
    assert far_gpus.run(on_one_host.large, dtype, kind, order) == [[]] * RANKS


@pytest.mark.parametrize("library", ["torch"])
def test_graphs_and_streams(far_gpus, library):
    assert far_gpus.run(on_one_host.graphs, library) == [[]] * RANKS


def explain(context):
    import torch

    from shardmath.distribution import Slab
    from shardmath.linalg.advanced import Matmul

    torch.cuda.set_device(context.device_id)
    with context:
        shape = Slab.X.shape(context.rank, (512, 512))
        x = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)
        with Matmul(x, x, distributions=[Slab.X] * 3) as product:
            product.plan()
            return product.explain()


def test_how_bytes_travel_is_explained(far_gpus):
    text = far_gpus.run(explain)[0]
    assert "2 hosts" in text and "`get`" in text and "one kernel" not in text
