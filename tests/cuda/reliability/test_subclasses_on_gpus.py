"""The host's test body for tensors without memory of their own, on ranks with GPUs."""

from __future__ import annotations

import importlib

import pytest
import test_tensor_subclasses as host


def on_gpu(context):
    torch = importlib.import_module("torch")
    torch.cuda.set_device(context.device_id)
    return host.with_mesh(context, f"cuda:{context.device_id}")


def test_they_are_refused_on_all_ranks(gpus):
    if gpus.size < 2:
        pytest.skip("rank 1 makes the mistakes")
    host.require_refused(gpus.run(on_gpu, ranks=2))
