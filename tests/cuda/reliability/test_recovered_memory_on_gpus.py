"""What was given to GPU calls of a context that was given up is used again after `recover`."""

from __future__ import annotations

import gc
import importlib

import pytest
from given_up import GIVES_UP, ROUNDS, used_in_each
from visible import gpu_of

from mortal import Raised, run_job
from shardmath.collectives import all_gather, all_reduce
from shardmath.context import startup
from shardmath.distribution import Slab, redistribute
from shardmath.fft import fft
from shardmath.handles.allocation import allocate_symmetric_memory as allocate
from shardmath.handles.rendezvous import rendezvous
from shardmath.linalg.advanced import matmul

VARIABLES = {"SHARDMATH_TIMEOUT": "60", "SHARDMATH_NOTICE": "100"}
N = 512
MORE = 10  # rounds, until nothing new is compiled or kept ready
SLACK = 64 << 20  # bytes: less than the cells of four contexts


def compute(context):
    """One call of each kind, and a call that waits on the GPUs for the rank that gives up."""
    torch = importlib.import_module("torch")
    x = torch.ones(N, N, device="cuda")
    with context:
        all_reduce(x)
        all_gather(x)
        on_heap = allocate((N, N), torch, dtype=torch.float32).fill_(1)
        rendezvous(on_heap, context).barrier()
        for operand in (x, on_heap):
            redistribute(operand, Slab.X, Slab.Y)
            fft(operand.to(torch.complex64), distribution=Slab.X)
            matmul(operand, operand, distributions=[Slab.Y, Slab.X, Slab.X])
        if context.rank != GIVES_UP:
            all_reduce(x)


def use(group):
    """Bytes of the heap in use after each round; whether the GPU's memory lasts; a right sum."""
    torch = importlib.import_module("torch")
    torch.cuda.set_device(gpu_of(group.rank))
    context = startup.initialize(gpu_of(group.rank), group)
    context, used = used_in_each(context, compute)
    left = [free_memory(torch)]
    for _ in range(MORE // ROUNDS):
        context, more = used_in_each(context, compute)
        used += more
        left.append(free_memory(torch))
    total = all_reduce(torch.ones(N, device="cuda"))
    right = bool((total == context.size).all())
    del total
    startup.finalize()
    return used, left, right


def free_memory(torch):
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("ranks", [2, 3])
def test_recover_gives_back_what_kernels_could_write(gpus, ranks):
    if gpus.size < 2:
        pytest.skip("one rank has no peers")
    outcomes = run_job(ranks, use, VARIABLES, timeout=300)
    for outcome in outcomes:
        assert not isinstance(outcome, Raised), outcome
        used, left, right = outcome
        print(f"{used} bytes of the heap, {left} free on the GPU")
        assert right and len(set(used)) == 1, used
        assert left[-1] > left[0] - SLACK, left
