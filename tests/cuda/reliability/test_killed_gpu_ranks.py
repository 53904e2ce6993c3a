"""A rank with a GPU is killed: the others say so, wherever they wait, and come to an end.

They notice it of themselves: their own time is never up.
"""

from __future__ import annotations

import mmap
import select
import signal

import pytest
from visible import gpu_of

from mortal import ENDLESS, Job, Raised
from shardmath.context import startup

PROGRESS = memoryview(mmap.mmap(-1, 64)).cast("Q")


def busy(group, what):
    """The same thing over and over, until a peer fails; then leave."""
    import torch

    from shardmath.collectives import all_reduce
    from shardmath.handles.allocation import allocate_symmetric_memory
    from shardmath.handles.rendezvous import rendezvous

    context = startup.new_context(gpu_of(group.rank), group)
    torch.cuda.set_device(gpu_of(group.rank))
    with context:
        x = allocate_symmetric_memory((300_000,), torch, dtype="float32")
    x.fill_(1)
    handle = rendezvous(x, context)
    stream = torch.cuda.current_stream().cuda_stream
    try:
        for number in range(1, 1 << 30):
            if what == "all_reduce":
                all_reduce(x, op="max", out=x, context=context)
                context.team.synchronize(stream)
            elif what == "all_reduce, not waited for":
                all_reduce(x, op="max", out=x, context=context)
            elif what == "barrier":
                handle.barrier()
                handle.synchronize()
            else:  # the stream waits in a collective, the host in the handle
                all_reduce(x, op="max", out=x, context=context)
                handle.synchronize()
            PROGRESS[group.rank] = number
    finally:
        context.close()


@pytest.mark.parametrize(
    "what", ["all_reduce", "all_reduce, not waited for", "barrier", "all_reduce, by the handle"]
)
def test_survivors_name_the_killed_rank(gpus, size, what):
    if size == 1:
        pytest.skip("nobody to survive")
    victim = size // 2
    PROGRESS[:] = memoryview(bytes(64)).cast("Q")
    with Job(size, lambda group: busy(group, what), ENDLESS) as job:
        while not all(count >= 20 for count in PROGRESS[:size]):
            select.select([], [], [], 0.01)
        job.signal(victim, signal.SIGKILL)
        outcomes = {rank: job.outcome(rank) for rank in range(size)}
    assert outcomes.pop(victim) is None
    for rank, outcome in outcomes.items():
        assert isinstance(outcome, Raised), outcome
        assert outcome.kind == "RankFailure" and victim in outcome.ranks, (rank, outcome)
