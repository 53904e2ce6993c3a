"""Transforms on GPUs of pretended hosts: the bodies of one host, by outboxes and `get`."""

from __future__ import annotations

import re

import pytest
import test_device_fft as on_one_host
from visible import RANKS

ALL = max(RANKS, 1)


@pytest.mark.timeout(200)
def test_any_transform(far_gpus):
    wrong = on_one_host.wrong_transforms(far_gpus, on_one_host.gpu_cases(ALL, ALL), 60)
    assert not wrong, "\n\n".join(wrong)


def test_again_and_in_graphs(far_gpus):
    """What repeats is one graph of ours; what the user captures can be replayed."""
    found = far_gpus.run(on_one_host.check_chunks, on_one_host.CHUNKS, timeout=100)
    assert found == [[]] * RANKS, "\n".join(text for texts in found for text in texts)


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_life(far_gpus, library):
    assert far_gpus.run(on_one_host.check_life, library) == [[]] * RANKS


def explain(context):
    import torch

    from shardmath.distribution import Slab
    from shardmath.fft import FFT

    torch.cuda.set_device(context.device_id)
    with context:
        x = torch.zeros(Slab.X.shape(context.rank, (8, 8)), dtype=torch.complex64, device="cuda")
        with FFT(x, distribution=Slab.X) as transform:
            return transform.explain()


def test_how_bytes_travel_is_explained(far_gpus):
    first, *others = far_gpus.run(explain)
    assert others == [first] * (RANKS - 1)
    assert re.search("deliver (work|operand) -> landing 0", first)  # as fast, of so few elements
    assert "2 hosts" in first and "`get`" in first
