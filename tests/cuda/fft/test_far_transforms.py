"""Transforms on GPUs of pretended hosts: the bodies of one host, by outboxes and `get`."""

from __future__ import annotations

import re

import fft_cases
import pytest
import test_device_fft as on_one_host
from visible import RANKS

ALL = max(RANKS, 1)


def test_any_transform(far_gpus):
    wrong = on_one_host.wrong_transforms(far_gpus, fft_cases.cases(ALL, ALL), 60)
    assert not wrong, "\n\n".join(wrong)


def test_replays_and_graphs(far_gpus):
    """What repeats is one graph of ours; what the user captures can be replayed."""
    found = far_gpus.run(on_one_host.check_chunks, on_one_host.CHUNKS)
    assert found == [[]] * RANKS, "\n".join(text for texts in found for text in texts)


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_life(far_gpus, library):
    assert far_gpus.run(on_one_host.check_life, library) == [[]] * RANKS


def check_arrays_larger_than_the_heap(context, back):
    """What is neither packed nor fetched is elsewhere, where the heap cannot grow."""
    import torch

    from shardmath.distribution import Slab
    from shardmath.fft import FFTOptions, fft

    torch.cuda.set_device(context.device_id)
    rank, shape = context.rank, (64 * context.size, 512, 800)  # 210 MB a rank
    wrong = []
    with context:
        part = Slab.X.shape(rank, shape)
        for device in ("cpu", "cuda"):
            x = torch.zeros(part, dtype=torch.complex64, device=device)
            if rank == 0:
                x[0, 0, 0] = 1
            y = fft(x, distribution=Slab.X, options=FFTOptions(redistribute=back))
            if not bool((y == 1).all()):
                wrong.append(device)
            del x, y
        context.barrier()
    return wrong


@pytest.mark.parametrize("back", [False, True])
def test_arrays_larger_than_the_heap(far_gpus, back):
    """With a heap of 1 GiB: operand, result and all buffers of the workspace would not fit."""
    assert far_gpus.run(check_arrays_larger_than_the_heap, back) == [[]] * RANKS


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
    assert re.search("pack (work|operand) into outbox 0", first)  # as fast, of so few elements
    assert "2 hosts" in first and "`get`" in first
