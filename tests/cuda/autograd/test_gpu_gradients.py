"""The host's test bodies for gradients and compiled calls, with torch tensors on GPUs."""

from __future__ import annotations

import importlib

import pytest
from test_gradients import NAMES

from shardmath.base import current


def on_gpu(context, dtype):
    importlib.import_module("torch").cuda.set_device(context.device_id)
    body = importlib.import_module("test_gradients").check_products
    return body(context, dtype, f"cuda:{context.device_id}", shapes=[(13, 7, 11)], kinds=3)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_products_on_gpus(gpus, size, dtype):
    assert gpus.run(on_gpu, dtype, ranks=size) == [[]] * size


def body_on_gpu(context, module, name, *given):
    """A body of the host's whose tensors are made on this rank's GPU. The context is the default
    one: torch runs compiled backward passes in threads of its own.
    """
    torch = importlib.import_module("torch")
    torch.cuda.set_device(context.device_id)
    before = current.default()
    current.set_default(context)
    try:
        with torch.device(f"cuda:{context.device_id}"):
            return getattr(importlib.import_module(module), name)(context, *given)
    finally:
        current.set_default(before)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_along_random_directions_on_gpus(gpus, size, name):
    found = gpus.run(body_on_gpu, "test_gradients", "check_directions", name, [0, 1, 2], ranks=size)
    assert found == [[]] * size


def test_all_operators_in_one_graph_on_gpus(gpus):
    if gpus.size < 2:
        pytest.skip("of two ranks")
    found = gpus.run(body_on_gpu, "test_compiled_gradients", "check_compiled", ranks=2, timeout=600)
    assert found == [([], 1)] * 2
