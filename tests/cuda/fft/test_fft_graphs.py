"""Transforms in CUDA graphs of the user's: what they read stays, whatever is done in between."""

from __future__ import annotations

import numpy as np
import pytest
from fft_cases import placed, to_host
from test_device_fft import use

from arrangements import part_of
from shardmath.distribution import Slab
from shardmath.fft import FFT, FFTOptions

SHAPE = (48, 48, 64)


def check_graphs_outlive_programs(context, back):
    """Capture a transform, do it by so many other programs that its own is dropped, and replay."""
    import torch

    from shardmath.cuda.allocation import Constant
    from shardmath.operators.fft import gpus as fft_gpus
    from shardmath.operators.fft import stages
    from shardmath.program import gpu_performing

    use(context)
    rank, size = context.rank, context.size
    array = np.random.default_rng(3).standard_normal((2, *SHAPE))
    array = (array[0] + 1j * array[1]).astype(np.complex64)
    operand, _ = placed(context, "torch gpu", part_of(array, Slab.X, rank, size), "heap C")
    want = part_of(np.fft.fftn(array), Slab.X if back else Slab.Y, rank, size)
    options = FFTOptions(redistribute=back)
    with context, pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_performing, "_PROGRAMS", 2)
        patch.setattr(fft_gpus, "USE_GRAPHS", False)  # replayed executions keep theirs, too
        transform = FFT(operand, distribution=Slab.X, options=options)

        def execute(first, out=None):
            for table in ("_ONE_EXCHANGE", "_TWO_EXCHANGES"):
                patch.setattr(stages, table, ((1, stages.Chunking((1,) * first, 2, 1)),))
            return transform.execute(out=out)

        with transform:
            transform.plan()
            result = execute(2)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                execute(2, result)
            for first in range(3, 9):
                execute(first, result)
            torch.cuda.synchronize()
            rubbish = np.full(1 << 12, 0x5A, np.uint8)
            # Where what was given back lay.
            taken = [Constant(context.team.device, rubbish) for _ in range(64)]
            result.zero_()
            for _ in range(2):
                graph.replay()
            torch.cuda.synchronize()
            context.team.check()
            del taken
    error = np.abs(to_host(result) - want).max() / np.abs(want).max()
    return "" if error < 1e-5 else f"rank {rank}: {error}"


def test_graphs_outlive_programs(gpus, size):
    for back in (False, True):
        assert gpus.run(check_graphs_outlive_programs, back, ranks=size) == [""] * size
