"""R1 and R4: a rank is killed or stopped at a random moment; the others say so.

That a rank was killed they notice of themselves: their own time is never up.
"""

import gc
import mmap
import random
import select
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from draws import seeds
from mortal import ENDLESS, Job, Raised, left_behind, limit_waits, on_ranks
from shardmath.context import startup
from shardmath.handles.allocation import allocate_symmetric_memory as allocate
from shardmath.handles.rendezvous import rendezvous

# How many steps each rank has made; shared with the ranks, which are forks.
PROGRESS = memoryview(mmap.mmap(-1, 64)).cast("Q")


def busy(group, limit=None):
    """Everything that ranks do together, until a peer fails.

    After the first step no wait is longer than `limit` seconds.
    """
    context = startup.initialize("cpu", group)
    kept = []
    for number in range(1 << 30):
        array = allocate(1000 + number % 7, np)
        array[:] = number
        handle = rendezvous(array)
        kept = [*kept[-5:], handle.get_buffer((context.rank + 1) % context.size, (10,), "f8")]
        handle.barrier()
        assert kept[-1][0] == number
        handle.put_signal((context.rank + 1) % context.size, 2)
        handle.wait_signal((context.rank - 1) % context.size, 2)
        context.board.barrier("phase")
        context.agree("step", lambda n=number: (n, "x" * (n % 5000)), len)
        context.barrier()
        gc.collect(0)
        if limit is not None:
            limit_waits(context, limit)
        PROGRESS[context.rank] = number


def wait_for_start(size):
    """Return when every rank has made a step."""
    while not all(PROGRESS[:size]):
        select.select([], [], [], 0.001)


@pytest.mark.parametrize("seed", seeds(20, 200))
def test_every_survivor_names_the_killed_rank(seed, record_property):
    """How long the last of them took is recorded, for docs/reliability.md."""
    random_ = random.Random(seed)
    size = 2 + seed % 3 if seed < 20 else (2, 4, 8)[seed % 3]
    victim = random_.randrange(size)
    starting = seed % 4 == 0  # start-up takes about 10 ms
    moment = random_.uniform(0, 0.015) if starting else random_.uniform(0, 0.1)
    PROGRESS[:] = memoryview(bytes(64)).cast("Q")
    with left_behind():
        with Job(size, busy, ENDLESS) as job:
            if not starting:
                wait_for_start(size)
            select.select([], [], [], moment)
            job.signal(victim, signal.SIGKILL)
            killed = time.monotonic()
            outcomes = {rank: job.outcome(rank) for rank in range(size)}
        assert outcomes.pop(victim) is None
        for rank, outcome in outcomes.items():
            assert isinstance(outcome, Raised), outcome
            assert outcome.kind == "RankFailure", outcome
            if not starting:
                assert outcome.ranks == (victim,), (rank, outcome)
                assert str(job.pids[victim]) in outcome.text
            # At start-up a rank may already see others end because of the first.
            assert victim in outcome.ranks and f"rank {victim}" in outcome.text, (rank, outcome)
        record_property("seconds", max(outcome.at for outcome in outcomes.values()) - killed)


@pytest.mark.parametrize("seed", seeds(3, 20))
def test_a_stopped_rank_is_a_timeout_that_names_it(seed):
    random_ = random.Random(seed)
    size, victim = 3, random_.randrange(3)
    PROGRESS[:] = memoryview(bytes(64)).cast("Q")
    with left_behind(), Job(size, lambda group: busy(group, 1.0), ENDLESS) as job:
        wait_for_start(size)
        select.select([], [], [], random_.uniform(0, 0.05))
        job.signal(victim, signal.SIGSTOP)
        survivors = [rank for rank in range(size) if rank != victim]
        outcomes = [job.outcome(rank) for rank in survivors]
        # A survivor may be late for the other, because it waits for the stopped one itself; and one
        # that began to wait later may hear that the other's time was up before its own is.
        assert ("OpTimeout", (victim,)) in [(one.kind, one.ranks) for one in outcomes]
        for other, outcome in zip(reversed(survivors), outcomes, strict=True):
            if outcome.kind == "OpTimeout":
                assert victim in outcome.ranks, outcome
            else:
                assert (outcome.kind, outcome.ranks) == ("RankFailure", (other,)), outcome
        job.signal(victim, signal.SIGCONT)
        outcome = job.outcome(victim)
        assert outcome.kind == "RankFailure" and victim not in outcome.ranks


@pytest.mark.torture
def test_no_false_alarm_beside_busy_loops():
    """10,000 barriers, where four processes more want the cores for themselves."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]

    def body(context):
        for _ in range(10_000):
            context.barrier()
        return "met"

    try:
        assert on_ranks(4, body) == ["met"] * 4
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
