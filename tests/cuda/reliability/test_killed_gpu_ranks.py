"""R23: a rank with a GPU is killed: the others say so, wherever they wait, and come to an end.

They notice it of themselves: their own time is never up.
"""

from __future__ import annotations

import mmap
import select
import signal
import subprocess
import sys
import time

import pytest
from visible import GPUS, gpu_of

from mortal import ENDLESS, Job, Raised
from shardmath.context import startup

PROGRESS = memoryview(mmap.mmap(-1, 64)).cast("Q")


BALLAST = 1 << 30  # bytes of a GPU's memory that a rank of the last test shares
FREE = """
import torch
print(*[torch.cuda.mem_get_info(number)[0] for number in range(torch.cuda.device_count())])
"""


def busy(group, what, ballast=0):
    """The same thing over and over, until a peer fails; then leave."""
    import torch

    from shardmath.collectives import all_reduce
    from shardmath.handles.allocation import allocate_symmetric_memory
    from shardmath.handles.rendezvous import rendezvous

    context = startup.new_context(gpu_of(group.rank), group)
    torch.cuda.set_device(gpu_of(group.rank))
    with context:
        x = allocate_symmetric_memory((300_000,), torch, dtype="float32")
        shared = allocate_symmetric_memory((300_000 + ballast // 4,), torch, dtype="float32")
    x.fill_(1)
    shared.fill_(2)
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


def killed(size, what, ballast=0):
    """A job of which one rank is killed: the seconds until all others have raised."""
    victim = size // 2
    PROGRESS[:] = memoryview(bytes(64)).cast("Q")
    with Job(size, lambda group: busy(group, what, ballast), ENDLESS) as job:
        while not all(count >= 20 for count in PROGRESS[:size]):
            select.select([], [], [], 0.01)
        job.signal(victim, signal.SIGKILL)
        moment = time.monotonic()
        outcomes = {rank: job.outcome(rank) for rank in range(size)}
    assert outcomes.pop(victim) is None
    for rank, outcome in outcomes.items():
        assert isinstance(outcome, Raised), outcome
        assert outcome.kind == "RankFailure" and victim in outcome.ranks, (rank, outcome)
    return max(outcome.at for outcome in outcomes.values()) - moment


@pytest.mark.parametrize(
    "what", ["all_reduce", "all_reduce, not waited for", "barrier", "all_reduce, by the handle"]
)
def test_survivors_name_the_killed_rank(gpus, size, what, record_property):
    if size == 1:
        pytest.skip("nobody to survive")
    record_property("seconds", killed(size, what))


def test_the_memory_of_a_job_that_was_killed_is_free_again(gpus, size):
    """That of the killed rank, which its peers had mapped, too."""
    if size == 1:
        pytest.skip("nobody to survive")
    before = free_memory()
    killed(size, "all_reduce", BALLAST)
    left = [old - new for old, new in zip(before, free_memory(), strict=True)]
    assert max(left) < BALLAST // 4, left


def free_memory():
    """The free bytes of each GPU, as another process sees them."""
    told = subprocess.run(
        [sys.executable, "-c", FREE], check=True, capture_output=True, text=True
    ).stdout
    found = list(map(int, told.split()))
    assert len(found) == GPUS
    return found
