"""GPUs of pretended hosts whose streams are held up at random: no rank reads early, or overwrites.

Before anything that an operation puts on a stream, a rank may have a kernel that only takes time.
"""

from __future__ import annotations

import importlib
import random
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest

from shardmath.context.context import Context
from shardmath.distribution import Redistribute, Slab
from shardmath.fft import FFT
from shardmath.linalg.advanced import Matmul
from shardmath.operators.lanes import Lane
from shardmath.redistribution.box_copies import BoxCopies

CYCLES = (50_000, 2_000_000)  # about 25 us, and 1 ms
STEPS = [(BoxCopies, "launch", 0), (Lane, "barrier", 0), (Context, "get", 3)]
N = 48


@contextmanager
def held_up(torch, seed):
    """Each of STEPS, whose argument of that number is a stream, waits there now and then."""
    chance = random.Random(seed)

    def held(plain, number):
        def step(self, *args, **named):
            if chance.random() < 0.3:
                stream = int(args[number])
                own = torch.cuda.ExternalStream(stream) if stream else torch.cuda.default_stream()
                with torch.cuda.stream(own):
                    torch.cuda._sleep(chance.choice(CYCLES))
            return plain(self, *args, **named)

        return step

    with ExitStack() as stack:
        for owner, name, number in STEPS:
            made = held(getattr(owner, name), number)
            stack.enter_context(patch.object(owner, name, made))
        yield


def made(context, torch, kind):
    """(operand, execute into, result): what is executed is linear in the operand."""
    rank, size = context.rank, context.size
    shape = Slab.X.shape(rank, (N, N, N), size=size)
    torch.manual_seed(rank)
    x = torch.randn(shape, device="cuda", dtype=torch.complex64)
    out = torch.zeros(Slab.Y.shape(rank, (N, N, N), size=size), device="cuda", dtype=x.dtype)
    if kind == "redistribution":
        plan = Redistribute(x, Slab.X, Slab.Y)
        plan.plan()
        return x, lambda: plan.execute(out=out), plan
    if kind == "transform":
        plan = FFT(x, distribution=(Slab.X, Slab.Y))
        plan.plan()
        return x, lambda: plan.execute(out=out), plan
    a = torch.randn(Slab.X.shape(rank, (8 * N, 8 * N), size=size), device="cuda")
    b = torch.randn(a.shape, device="cuda")
    plan = Matmul(a, b, distributions=[Slab.X] * 3)
    plan.plan()
    return a, plan.execute, plan


def check(context, kind, turns):
    """The turns whose results are wrong: operands change before each, and right after it."""
    torch = importlib.import_module("torch")
    torch.cuda.set_device(context.device_id)
    wrong = []
    with context:
        x, execute, plan = made(context, torch, kind)
        first, whole = x.clone(), execute().clone()
        with held_up(torch, context.rank):
            for turn in range(turns):
                x.copy_(first * 2.0 ** (turn % 4))
                found = execute()
                x.fill_(float("nan"))
                if not torch.equal(found, whole * 2.0 ** (turn % 4)):
                    wrong.append(turn)
        plan.free()
        context.barrier()
    return wrong


@pytest.mark.parametrize("kind", ["redistribution", "transform", "product"])
def test_held_up(far_gpus, kind):
    assert far_gpus.run(check, kind, 60) == [[]] * far_gpus.size
