"""R22 on GPUs: random programs, beside NumPy; `tests/random_programs.py --gpus` takes longer."""

from __future__ import annotations

import pytest

import random_programs


def run_program(context, seed):
    import torch

    torch.cuda.set_device(context.device_id)
    with context:
        return random_programs.Program(context, seed, on_gpus=True).run(random_programs.STEPS)


@pytest.mark.parametrize("seed", range(3))
def test_random_programs_do_as_numpy_does(gpus, size, seed):
    steps = gpus.run(run_program, 100 * size + seed, ranks=size)
    assert steps == [random_programs.STEPS] * size
