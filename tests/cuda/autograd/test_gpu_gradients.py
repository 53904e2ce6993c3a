"""The host's test body for gradients, with torch tensors on GPUs."""

from __future__ import annotations

import importlib

import pytest


def on_gpu(context, dtype):
    importlib.import_module("torch").cuda.set_device(context.device_id)
    body = importlib.import_module("test_gradients").check_products
    return body(context, dtype, f"cuda:{context.device_id}", shapes=[(13, 7, 11)], kinds=3)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_products_on_gpus(gpus, size, dtype):
    assert gpus.run(on_gpu, dtype, ranks=size) == [[]] * size
