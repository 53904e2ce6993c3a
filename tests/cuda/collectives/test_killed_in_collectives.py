"""A rank is killed inside a collective: the others say so, and their GPUs stay usable.

They notice it of themselves: their own time is never up.
"""

from __future__ import annotations

import mmap
import random
import select
import signal

import pytest
from visible import gpu_of

from mortal import ENDLESS, Job, Raised
from shardmath.context import startup

PROGRESS = memoryview(mmap.mmap(-1, 64)).cast("Q")  # steps of each rank; shared with the forks


def usable(context):
    """Whether this rank's GPU still computes."""
    import numpy as np

    from shardmath.cuda.driver import call

    address = int(call("cuMemAlloc", 1024))
    call("cuMemsetD8", address, 7, 1024)
    words = np.zeros(1024, np.uint8)
    call("cuMemcpyDtoH", words.ctypes.data, address, 1024)
    return bool((words == 7).all())


def reducing(count):
    def body(group):
        from shardmath.arrays import dtypes
        from shardmath.collectives.cells import DeviceCollectives
        from shardmath.cuda.driver import call

        context = startup.initialize(gpu_of(group.rank), group)
        moves = DeviceCollectives.of(context)
        address = int(call("cuMemAlloc", 4 * count))
        call("cuMemsetD8", address, 0, 4 * count)
        try:
            for number in range(1, 1 << 30):
                for _ in range(20):
                    kind = dtypes.of("float32")
                    moves.all_reduce(address, address, count, kind, "sum", 0)
                context.team.synchronize(0)
                PROGRESS[group.rank] = number
        except Exception as error:
            return type(error).__name__, list(error.ranks), usable(context)

    return body


def calling(count):
    """The same by calls that run ahead: no host waits for another, but for its GPU now and then."""

    def body(group):
        import torch

        from shardmath.collectives import all_reduce

        context = startup.initialize(gpu_of(group.rank), group)
        torch.cuda.set_device(gpu_of(group.rank))
        x, out = (torch.zeros(count, device="cuda") for _ in range(2))
        try:
            for number in range(1, 1 << 30):
                for _ in range(20):
                    all_reduce(x, out=out)
                torch.cuda.synchronize()
                PROGRESS[group.rank] = number
        except Exception as error:
            return type(error).__name__, list(error.ranks), usable(context)

    return body


@pytest.mark.parametrize(
    ("how", "count"),
    [
        (reducing, 300),
        (reducing, 1 << 20),
        (reducing, 36 << 20),
        (calling, 300),
        (calling, 1 << 20),
    ],
)
def test_the_survivors_of_an_all_reduce_name_the_killed_rank(gpus, how, count):
    size = gpus.size
    if size < 2:
        pytest.skip("one GPU has no peer")
    PROGRESS[:] = memoryview(bytes(64)).cast("Q")
    random_ = random.Random(count)
    victim = random_.randrange(size)
    with Job(size, how(count), ENDLESS) as job:
        while not all(PROGRESS[:size]):
            select.select([], [], [], 0.01)
        select.select([], [], [], random_.uniform(0, 0.05))
        job.signal(victim, signal.SIGKILL)
        for rank in range(size):
            found = job.outcome(rank)
            if rank == victim:
                assert found is None
                continue
            assert not isinstance(found, Raised), found
            assert found == ("RankFailure", [victim], True)
