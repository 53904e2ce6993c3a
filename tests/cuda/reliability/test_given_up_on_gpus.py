"""A rank's stream is late, and its peers give up: no array but the lost results is written later.

    rank 0   call, gives up, drops the result ─ new arrays ····················· are as they were
    rank 1   call, on a stream that is busy ························ pushes into rank 0's result

That memory was given back, and must not have gone to one of the new arrays, before the group has
been recovered and the last kernel has ended.
"""

from __future__ import annotations

import importlib
from functools import partial

import pytest

from shardmath.distribution import Replicated, Slab, redistribute
from shardmath.handles.allocation import allocate_symmetric_memory as allocate
from shardmath.linalg.advanced import matmul

N = 4096  # of float32: 64 MiB, too much to be written to a lane first, and copied from there
LIMIT, LATE = 1.0, 4.0  # seconds: of a wait, and that the last rank's stream is late
CYCLES = 2e9  # a second
MANY = 6  # new arrays
KINDS = ("redistribution", "product")


def filled(torch, shape, value):
    return allocate(shape, torch, dtype=torch.float32, skip_symmetric_check=True).fill_(value)


def call_of(torch, context, kind):
    """A call that gives every rank N x N elements, which peers write.

    New results of redistributions are pulled by their owner, and no peer knows where they lie: so
    `out` is given, anew in each call.
    """
    rank, size = context.rank, context.size
    rows = Slab.X.shape(rank, (N * size, N), size=size)
    if kind == "redistribution":
        operand, columns = filled(torch, rows, 1), Slab.Y.shape(rank, (N * size, N), size=size)
        return lambda: redistribute(operand, Slab.X, Slab.Y, out=filled(torch, columns, 0))
    a = filled(torch, Slab.Y.shape(rank, (N, N * size), size=size), 1)
    b = filled(torch, rows, 1)
    return partial(matmul, a, b, distributions=[Slab.Y, Slab.X, Replicated()])


def check(context, kind):
    """Whether the call was given up, and which of the new arrays were written, or are in place of
    its result.
    """
    torch = importlib.import_module("torch")
    group, late = context.split(0), context.rank == context.size - 1
    for each in (context, group):  # kernels are compiled, then the group's plans made
        if each is group:
            group.team.timeout = LIMIT
        with each:
            call = call_of(torch, each, kind)
            for _ in range(3):
                call()
        torch.cuda.synchronize()
        context.barrier()
    if late:
        torch.cuda._sleep(int(LATE * CYCLES))
    with group:
        result = call()
    place = result.data_ptr()
    del result
    if not late:
        torch.cuda.synchronize()
    in_time = not late or not torch.cuda.current_stream().query()
    with context:
        new = [filled(torch, (N, N), 7) for _ in range(MANY)]
        torch.cuda.synchronize()
        in_time = in_time and group.team.gave_up()
        context.barrier()
        wrong = [i for i, array in enumerate(new) if not bool((array == 7).all())]
    given = place in [array.data_ptr() for array in new]
    del new
    group = group.recover()
    while any(context.agree("memory", lambda: is_taken(context, place), list)):
        pass
    return in_time, wrong, given


def is_taken(context, place):
    """Whether the memory there belongs to an array that has gone."""
    return context.heap.used and context.heap.find(place) is not None


@pytest.mark.parametrize("kind", KINDS)
def test_what_late_kernels_write_is_nobody_elses(gpus, kind):
    if gpus.size > 1:
        assert gpus.run(check, kind) == [(True, [], False)] * gpus.size
