"""R1 and R4, short: a rank is killed or stopped at a random moment; the others say so, soon."""

import gc
import random
import signal
import threading
import time

import numpy as np
import pytest

from mortal import Job, Raised, left_behind
from shardmath import context as contexts
from shardmath.symmetric.allocation import allocate_symmetric_memory as allocate
from shardmath.symmetric.rendezvous import rendezvous

SOON = 1.0


def busy(group):
    """Everything that ranks do together, until a peer fails."""
    context = contexts.initialize("cpu", group)
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


@pytest.mark.parametrize("seed", range(20))
def test_every_survivor_names_the_killed_rank_within_a_second(seed):
    random_ = random.Random(seed)
    size = 2 + seed % 3
    victim = random_.randrange(size)
    # A quarter of the moments falls into start-up, which takes about 10 ms.
    moment = random_.uniform(0, 0.015) if seed % 4 == 0 else random_.uniform(0.02, 0.15)
    with left_behind():
        with Job(size, busy) as job:
            threading.Event().wait(moment)
            killed = job.signal(victim, signal.SIGKILL)
            outcomes = {rank: job.outcome(rank) for rank in range(size)}
        assert outcomes.pop(victim) is None
        for rank, outcome in outcomes.items():
            assert isinstance(outcome, Raised), outcome
            assert outcome.kind == "RankFailure", outcome
            if moment > 0.015:
                assert outcome.ranks == (victim,), (rank, outcome)
                assert str(job.pids[victim]) in outcome.text
            # At start-up a rank may already see others end because of the first.
            assert victim in outcome.ranks and f"rank {victim}" in outcome.text, (rank, outcome)
            assert outcome.when - killed < SOON


@pytest.mark.parametrize("seed", range(3))
def test_a_stopped_rank_is_a_timeout_that_names_it(seed):
    deadline = 0.4
    random_ = random.Random(seed)
    size, victim = 3, random_.randrange(3)
    with left_behind(), Job(size, busy, {"SHARDMATH_TIMEOUT": str(deadline)}) as job:
        threading.Event().wait(random_.uniform(0.05, 0.1))
        stopped = job.signal(victim, signal.SIGSTOP)
        for rank in range(size):
            if rank != victim:
                outcome = job.outcome(rank)
                assert outcome.kind == "OpTimeout" and outcome.ranks == (victim,), outcome
                assert f"rank {victim}" in outcome.text
                waited = outcome.when - stopped
                assert deadline * 0.95 <= waited <= deadline * 1.1 + 0.3, waited
        job.signal(victim, signal.SIGCONT)
        awoken = time.monotonic()
        outcome = job.outcome(victim)
        assert outcome.kind == "RankFailure" and victim not in outcome.ranks
        assert outcome.when - awoken < SOON
