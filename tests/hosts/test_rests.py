"""Ranks that wait long sleep until a peer rings; here nobody wakes by itself.

One lost ring, and the ranks would sleep until the pool's patience is at its end.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from shardmath import symmetric_memory
from shardmath.collectives import all_reduce
from shardmath.symmetric import waiting
from shardmath.transport import multi_host

ROUNDS = 60


@contextmanager
def asleep_until_a_ring(context):
    """Within it waits do not spin, and sleep for an hour."""
    rests, policy = waiting.LONGEST_REST, context.board.policy
    waiting.LONGEST_REST = multi_host._PAUSE = 3600.0
    context.board.policy = replace(policy, spin=0.0)
    try:
        yield
    finally:
        waiting.LONGEST_REST = multi_host._PAUSE = rests
        context.board.policy = policy


def check_meetings(context):
    """Barriers, exchanges of short and of long messages, sums: as many as all the others."""
    size, rank = context.size, context.rank
    with asleep_until_a_ring(context), context:
        for number in range(ROUNDS):
            context.barrier()
            message = bytes([rank]) * (9000 if number % 7 == rank else 3)
            told = context.board.exchange("told", message)
            assert [message[0] for message in told] == list(range(size))
            assert all_reduce(np.full(3, rank)).tolist() == [size * (size - 1) // 2] * 3
    return context.board.rounds


def check_signals(context):
    """A token goes round by signals, which are words that no board knows."""
    size, rank = context.size, context.rank
    with context:
        handle = symmetric_memory.rendezvous(symmetric_memory.empty(1, dtype=np.int64))
        with asleep_until_a_ring(context):
            for number in range(ROUNDS):
                if rank == 0:
                    handle.put_signal(1)
                handle.wait_signal((rank - 1) % size)
                if rank != 0:
                    handle.put_signal((rank + 1) % size)
                if number % 9 == 0:
                    handle.barrier()
        context.barrier()


def check_reads(context):
    """Memory is read that its owner sends, who sleeps at a barrier meanwhile."""
    size, rank = context.size, context.rank
    with context:
        array = symmetric_memory.empty(1000, dtype=np.int64)
        array[:] = rank
        handle = symmetric_memory.rendezvous(array)
        with asleep_until_a_ring(context):
            for number in range(ROUNDS):
                into = np.empty(1000, np.int64)
                if number % size == rank:
                    handle.get(into, (rank + 2) % size)
                    assert (into == (rank + 2) % size).all()
                handle.barrier()
        context.barrier()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_of_one_host_meet(contexts, size):
    assert len(set(contexts.run(check_meetings, ranks=size))) == 1


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_of_two_hosts_meet(far_contexts, size):
    assert len(set(far_contexts.run(check_meetings, ranks=size))) == 1


@pytest.mark.parametrize("size", [2, 3, 4])
def test_signals_wake_ranks_of_one_host(contexts, size):
    contexts.run(check_signals, ranks=size)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_signals_wake_ranks_of_two_hosts(far_contexts, size):
    far_contexts.run(check_signals, ranks=size)


@pytest.mark.parametrize("size", [3, 4])
def test_who_sleeps_answers(far_contexts, size):
    far_contexts.run(check_reads, ranks=size)
