"""One rank meets a limit of the system: all ranks hear which, on which rank, and what to do."""

from __future__ import annotations

import os
import resource
import signal
import socket
from pathlib import Path

import numpy as np
import pytest

from mortal import Job, Raised
from shardmath.collectives import all_reduce
from shardmath.context import startup
from shardmath.handles.allocation import allocate_symmetric_memory as allocate
from shardmath.transport.cores import host

LIMIT = {"SHARDMATH_TIMEOUT": "20"}


class no_descriptor:  # noqa: N801  (a context manager)
    """This process has all the files open that it may."""

    def __enter__(self):
        self.before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, self.before[1]))
        self.taken = []
        try:
            while True:
                self.taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass

    def __exit__(self, *_):
        for descriptor in self.taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, self.before)


class small_files:  # noqa: N801  (a context manager)
    """No file of this process may be larger than a page."""

    def __enter__(self):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, self.before[1]))

    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


CALLS = {
    "split": lambda context: context.split(0),
    "subset": lambda context: context.subset((2, 0, 1)),
    "allocate": lambda context: allocate((1 << 24,), np, dtype="float64"),
    "all_reduce": lambda context: all_reduce(np.ones(1 << 24)),
}
SHORT = {
    "files open": (no_descriptor, "may have 64 files open", "ulimit -n"),
    "size of files": (small_files, "may have more than 4,096 bytes", "ulimit -f"),
}
MAKERS = {"split": 0, "subset": 2}
CASES = [
    (call, short, victim)
    for call in CALLS
    for short in SHORT
    for victim in (0, 1, 2)
    # Of a group's board one rank makes the memory, and the others are given it.
    if short != "size of files" or victim == MAKERS.get(call, victim)
]


@pytest.mark.parametrize(("call", "short", "victim"), CASES)
def test_all_ranks_hear_of_the_limit(call, short, victim):
    limited, what, advice = SHORT[short]

    def body(group):
        context = startup.initialize("cpu", group)
        other = context.split(0)
        context.barrier()
        said = "nothing"
        try:
            if context.rank == victim:
                with limited():
                    CALLS[call](context)
            else:
                CALLS[call](context)
        except MemoryError as error:
            said = str(error)
        other.barrier()
        if call in MAKERS:  # which leave the context as it was
            made = context.split(context.rank % 2)
            assert made is not None and made.size == 2 - context.rank % 2
            assert all_reduce(1, context=context.subset((2, 0, 1))) == 3
        return said

    with Job(3, body, LIMIT) as job:
        outcomes = [job.outcome(rank) for rank in range(3)]
        process = f"pid {job.pids[victim]} on {socket.gethostname()}"
    for outcome in outcomes:
        assert not isinstance(outcome, Raised), outcome
        assert f"rank {victim}" in outcome and what in outcome and advice in outcome, outcome
    if call != "subset":  # where a rank says from whom it has heard
        assert len(set(outcomes)) == 1, outcomes
    assert "MemAvailable" not in outcomes[0] and "are available" not in outcomes[0], process


def test_a_peer_that_cannot_make_memory_says_why():
    """Nobody waits for the deadline of start-up."""

    def body(group):
        context = startup.initialize("cpu", group)
        if context.rank == 0:
            with no_descriptor():
                return outcome_of(context)
        return outcome_of(context)

    def outcome_of(context):
        try:
            context.subset(range(3))
        except MemoryError as error:
            return str(error)
        return "made"

    with Job(3, body, LIMIT) as job:
        outcomes = [job.outcome(rank) for rank in range(3)]
        process = f"rank 0 (pid {job.pids[0]} on {socket.gethostname()})"
    assert all("may have 64 files open" in outcome for outcome in outcomes), outcomes
    assert all(process in outcome for outcome in outcomes[1:]), outcomes


@pytest.mark.parametrize("short", SHORT)
def test_a_segment_that_is_not_made_leaves_no_descriptor(short):
    before = descriptors()
    limited, what, _ = SHORT[short]
    with limited(), pytest.raises(MemoryError, match=what):
        host.export_memory("test", 1 << 20)
    assert descriptors() == before


def descriptors():
    return len([*Path("/proc/self/fd").iterdir()])
