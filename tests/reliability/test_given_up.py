"""A rank that is late, and comes after its peers gave the operation up, is told of it.

Its peer may have changed by then what it reads, so it must not return a result.
"""

import signal
import socket
import time

import numpy as np
import pytest

from mortal import ENDLESS, Job, Raised, limit_waits, run_job
from shardmath.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from shardmath.context import startup
from shardmath.distribution import Slab, redistribute
from shardmath.fft import fft
from shardmath.handles.allocation import allocate_symmetric_memory as allocate
from shardmath.linalg.advanced import matmul
from shardmath.program import cores
from shardmath.symmetric import rows

N = 256
LIMIT = 0.3  # seconds for which ranks wait for the one that is late
PATIENT = {**ENDLESS, "SHARDMATH_NOTICE": "86400"}
WITH_BARRIERS = {
    "redistribute": lambda x: redistribute(x, Slab.X, Slab.Y),
    "all_gather": all_gather,
    "all_reduce": lambda x: all_reduce(np.concatenate([x] * 4)),  # by two shots
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "matmul": lambda x: matmul(x, x.T, distributions=[Slab.X, Slab.Y, Slab.X]),
    "matmul along k": lambda x: matmul(x.T.copy(), x, distributions=[Slab.Y, Slab.X, Slab.X]),
    "fft": lambda x: fft(x, distribution=Slab.X),
}
SMALL = {
    f"{call.__name__} of {count}": lambda x, call=call, count=count: call(x.ravel()[:count].copy())
    for call in (all_reduce, all_gather, reduce_scatter, all_to_all, broadcast)
    for count in (6, 6000)  # in the exchange itself, and staged
}
CALLS = {
    **WITH_BARRIERS,
    **SMALL,
    "all_reduce in place": lambda x: all_reduce(x, out=x),
    "all_reduce of a number": lambda x: all_reduce(x[0, 0].real),
    "allocate": lambda x: allocate((3, 4), np),
}


def operand():
    x = allocate((N // 2, N), np, dtype="complex128", skip_symmetric_check=True)
    x[:] = 1
    return x


def given_up(context, rank):
    """Wait until `rank` has given up, and a little longer."""
    while context.board._words[rank][rows.STATE] != rows.FAILED:
        time.sleep(0.01)
    time.sleep(0.05)


@pytest.mark.parametrize("name", CALLS)
def test_a_late_rank_does_not_return_from_what_its_peers_gave_up(name):
    def body(group):
        context = startup.initialize("cpu", group)
        x = operand()
        CALLS[name](x)
        if context.rank == 0:
            given_up(context, 1)
            given_up(context, 2)
        else:
            limit_waits(context, LIMIT)
        return repr(CALLS[name](x))

    with Job(3, body, PATIENT) as job:
        late, *others = (job.outcome(rank) for rank in range(3))
    assert isinstance(late, Raised), f"it returned {late}"
    assert late.kind == "RankFailure" and set(late.ranks) <= {1, 2}
    host = socket.gethostname()
    for rank, outcome in enumerate(others, 1):
        assert (outcome.kind, outcome.ranks) == ("OpTimeout", (0,))
        for who in (rank, 0):
            assert f"pid {job.pids[who]} on {host}" in outcome.text
        assert "test_given_up.py:" in outcome.text and "last operation was" in outcome.text


def before_barriers(board, act):
    """Let `act()` run before each barrier of the board, by Python and by compiled code."""
    barrier, compiled = board.barrier, board.compiled

    def acting(function):
        def called(*args, **named):
            act()
            return function(*args, **named)

        return called

    def rounds(**named):
        found = compiled(**named)
        return None if found is None else (*found[:-1], acting(found[-1]))

    board.barrier, board.compiled = acting(barrier), rounds


@pytest.mark.parametrize("name", WITH_BARRIERS)
def test_a_result_of_what_has_changed_is_not_returned(name):
    """Rank 1 comes to its last barrier when rank 0, which had been there, has given up."""

    def body(group):
        context = startup.initialize("cpu", group)
        x, comes_again = operand(), False

        def late():
            if not comes_again:
                return
            if context.rank == 1:
                given_up(context, 0)
            else:
                limit_waits(context, LIMIT)

        before_barriers(context.board, late)
        CALLS[name](x)
        comes_again = True
        try:
            return CALLS[name](x).sum().real
        finally:
            x[:] = 7

    first, second = run_job(2, body, PATIENT)
    assert (first.kind, first.ranks) == ("OpTimeout", (1,))
    assert isinstance(second, Raised), f"it returned {second}"
    assert (second.kind, second.ranks) == ("RankFailure", (0,)) and "gave up" in second.text


def test_a_rank_that_is_stopped_while_it_reads():
    """It goes on when its peer has written over the operand that it was reading."""

    def body(group):
        context = startup.initialize("cpu", group)
        x = operand()
        plain = cores.run

        def stopped(*args):
            if context.rank == 1:
                signal.raise_signal(signal.SIGSTOP)
            else:
                limit_waits(context, LIMIT)
            plain(*args)

        cores.run = stopped
        try:
            return redistribute(x, Slab.X, Slab.Y).sum().real
        finally:
            x[:] = 7

    with Job(2, body, PATIENT) as job:
        first = job.outcome(0)
        job.signal(1, signal.SIGCONT)
        second = job.outcome(1)
    assert (first.kind, first.ranks) == ("OpTimeout", (1,))
    assert isinstance(second, Raised), f"it returned {second}"
    assert (second.kind, second.ranks) == ("RankFailure", (0,))


def test_a_failure_after_a_barrier_is_no_failure_of_it():
    """Rank 0 has passed the barrier, and fails in what comes then: rank 1 comes out of it."""

    def body(group):
        context = startup.initialize("cpu", group)
        plain = context.board._await

        def late(*args):
            if context.rank == 1:  # which has published that it has come
                given_up(context, 0)
            plain(*args)

        context.board._await = late
        context.board.barrier("phase")
        context.board.fail("something else")
        return "passed"

    assert run_job(2, body, PATIENT) == ["passed"] * 2


def test_peers_are_told_what_a_signal_handler_raised_in_a_wait():
    def body(group):
        context = startup.initialize("cpu", group)
        if context.rank == 0:
            signal.signal(signal.SIGALRM, lambda *_: {}["ring"])
            arrivals = context.board._arrivals
            plain = arrivals.missing

            def waiting(*args):  # in the barrier, for rank 1
                arrivals.missing = plain
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                return plain(*args)

            arrivals.missing = waiting
        else:
            given_up(context, 0)
        context.barrier()
        context.barrier()  # rank 0 had come to the first

    first, second = run_job(2, body, PATIENT)
    assert first.kind == "KeyError"
    assert second.kind == "RankFailure" and "gave up: KeyError('ring')" in second.text
