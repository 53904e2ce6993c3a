"""R10 and R15, at length: a hundred jobs leave nothing, and sizes are 64 bits wide throughout."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import shardmath
from mortal import left_behind, on_ranks
from shardmath.distribution import Slab, redistribute
from shardmath.errors import RankFailure
from shardmath.handles.allocation import allocate_symmetric_memory as allocate
from shardmath.handles.rendezvous import rendezvous

LENGTH = (1 << 31) + 17
GIB = 1 << 30


def sums():
    from shardmath.collectives import all_reduce

    context = shardmath.initialize("cpu")
    return int(all_reduce(context.rank))


def one_ends():
    context = shardmath.initialize("cpu")
    if context.rank == 1:
        os._exit(3)
    context.barrier()


def resident():
    """The bytes of this process that are in memory and its own, and its descriptors."""
    _, pages, shared = map(int, Path("/proc/self/statm").read_text().split()[:3])
    return (pages - shared) * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))  # noqa: PTH208


@pytest.mark.torture
def test_a_hundred_jobs_and_a_hundred_that_fail_leave_nothing(record_property):
    with left_behind():
        for number in range(110):
            if number == 10:  # what is made once has been made
                before = resident()
            assert shardmath.spawn(sums, 3) == [3] * 3
            with pytest.raises((RankFailure, RuntimeError)):
                shardmath.spawn(one_ends, 3)
        grown = resident()[0] - before[0]
        record_property("bytes", grown)
        assert grown < 1 << 20 and resident()[1] == before[1]


def available():
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


@pytest.mark.torture
def test_more_than_two_to_the_31_elements():
    """Read, written and redistributed by two ranks: past 32 bits there is other memory."""
    if available() < 14 * GIB:
        pytest.skip("this takes 14 GiB of memory")

    def body(context):
        rank = context.rank
        array = allocate(LENGTH if rank == 0 else 1, np, dtype="int8", skip_symmetric_check=True)
        places = [0, 17, 1 << 30, (1 << 31) - 1, 1 << 31, LENGTH - 1]
        if rank == 0:
            array[:] = 1
            array[places] = range(2, 8)
        handle = rendezvous(array)
        handle.barrier()
        if rank == 1:
            found = np.empty(LENGTH, "int8")
            handle.get(found, 0)
            assert found[places].tolist() == list(range(2, 8))
            assert int(found.sum(dtype="int64")) == LENGTH - 6 + sum(range(2, 8))
            found[places] = range(12, 18)
            handle.put(found, 0)
            del found
        handle.barrier()
        if rank == 0:
            assert array[places].tolist() == list(range(12, 18))
        mine = array.reshape(1, -1)[:, : LENGTH if rank == 0 else 0]
        mine = mine if rank == 0 else np.empty((0, LENGTH), "int8")
        columns = redistribute(mine, Slab.X, Slab.Y)
        low = sum(Slab.Y.shape(r, (1, LENGTH))[1] for r in range(rank))
        here = [(at - low, 12 + n) for n, at in enumerate(places) if low <= at < low + columns.size]
        assert here and all(columns[0, at] == value for at, value in here)
        return int(columns.sum(dtype="int64"))

    assert sum(on_ranks(2, body)) == LENGTH - 6 + sum(range(12, 18))
