"""`recover` gives a working context on the ranks that remain, from any state of the one before."""

import contextlib
import gc
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mortal import run_job
from shardmath import get_context
from shardmath.base import current
from shardmath.collectives import all_reduce
from shardmath.context import agreement, startup
from shardmath.context.context import DistributedContext as Context
from shardmath.context.runtime import Runtime
from shardmath.distribution import Slab, redistribute
from shardmath.errors import CollectiveMismatch, OpTimeout, RankFailure
from shardmath.group.liveness import PeerWatch
from shardmath.handles.allocation import allocate_symmetric_memory as allocate
from shardmath.handles.rendezvous import rendezvous
from shardmath.symmetric.board import Board
from shardmath.symmetric.recovery import Recovery
from shardmath.symmetric.rows import RECOVERY, Rows
from shardmath.transport.cores.host import HostTransport
from shardmath.transport.mesh import Mesh

PATIENT = {"SHARDMATH_TIMEOUT": "60", "SHARDMATH_NOTICE": "100"}
IN_PYTHON = PATIENT | {"SHARDMATH_COMPILED": "0"}  # where writes to the board can be made to raise


class Interrupted(BaseException):
    """What a signal handler raises."""


def raises_once(context, place):
    """Let the next write to the board, or the next poll of a word, raise in this rank."""
    rows = type(context.board._rows)
    plain = getattr(rows, place)

    def ring(*args):
        setattr(rows, place, plain)
        raise Interrupted

    setattr(rows, place, ring)


def works(context):
    """All ranks of `context` can compute in it."""
    x = np.arange(12.0).reshape(4, 3) + context.rank
    total = all_reduce(x, context=context)
    assert np.array_equal(
        total, sum(np.arange(12.0).reshape(4, 3) + r for r in range(context.size))
    )
    with context:
        share = 12 // context.size
        y = allocate((share, 12), np)
        y[:] = context.rank
        handle = rendezvous(y)
        handle.barrier()
        assert handle.get_buffer(0, (1,), "float64")[0] == 0
        handle.barrier()
        assert redistribute(y, Slab.X, Slab.Y).sum() == share**2 * sum(range(context.size))
    context.barrier()
    return context.rank, context.size


def interrupted(context):
    if context.rank == 1:
        raises_once(context, "write")
    try:
        all_reduce(np.ones(3))
    except (Interrupted, RankFailure) as error:
        return type(error).__name__
    return "returned"


def interrupted_and_died(context):
    if interrupted(context) == "Interrupted":
        os.kill(os.getpid(), signal.SIGKILL)


def interrupted_and_left(context):
    if interrupted(context) == "Interrupted":
        context.close()


def died(context):
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankFailure):
        all_reduce(np.ones(3))


def left(context):
    if context.rank == 1:
        return context.close()
    with pytest.raises(RankFailure):
        all_reduce(np.ones(3))


def in_different_calls(context):
    """Some wait in an exchange, some in a barrier, and one is in none."""
    if context.rank == 0:
        with pytest.raises((RankFailure, CollectiveMismatch)):
            all_reduce(np.ones(3))
    elif context.rank == 1:
        with pytest.raises((RankFailure, CollectiveMismatch)):
            context.board.barrier()


def healthy(context):
    all_reduce(np.ones(3))


STATES = {
    "interrupted": (interrupted, 3),
    "interrupted, and died": (interrupted_and_died, 2),
    "interrupted, and left": (interrupted_and_left, 2),
    "died": (died, 2),
    "left": (left, 2),
    "in different calls": (in_different_calls, 3),
    "healthy": (healthy, 3),
}


@pytest.mark.parametrize("state", STATES)
def test_a_context_is_recovered_from(state):
    bring_about, remaining = STATES[state]

    def body(group):
        context = startup.initialize("cpu", group)
        bring_about(context)
        if context.closed:
            return "gone"
        made = context.recover()
        assert get_context() is made
        with pytest.raises(RuntimeError, match=r"recover\(\) has replaced it"):
            context.barrier()
        found = works(made)
        again = works(made.recover())
        assert again == found
        startup.finalize()
        return found

    outcomes = run_job(3, body, PATIENT, timeout=60)
    sizes = [found for found in outcomes if isinstance(found, list | tuple)]
    assert [list(each) for each in sizes] == [[rank, remaining] for rank in range(remaining)]
    if remaining == 2:
        assert outcomes[1] in (None, "gone")


STEPS = {
    "before it asks": (Rows, "publish"),
    "before there is a decision": (Recovery, "_decision_of"),
    "before it has the new memory": (Context, "_board"),
    "before the ranks meet": (Board, "meet"),
    "before it has a new context": (Context, "_derive"),
    "before it says so": (agreement, "agree"),
    "before the old context is ended": (Context, "_leave_to"),
    "before all of it is ended": (Board, "leave"),
}


@pytest.mark.parametrize("late", [False, True], ids=["", "after that step"])
@pytest.mark.parametrize("step", STEPS)
def test_recover_begins_anew_where_an_exception_left_it(step, late):
    """Rank 1 calls it in the old context, where the others wait, have failed, or are past it."""
    owner, verb = STEPS[step]

    def body(group):
        context = startup.initialize("cpu", group)
        assert all_reduce(1) == 3
        if context.rank == 1:
            plain = getattr(owner, verb)

            def ring(*args, **words):
                setattr(owner, verb, plain)
                if late:
                    plain(*args, **words)
                raise Interrupted

            setattr(owner, verb, ring)
        made, struck = None, 0
        while made is None:
            try:
                made = context.recover()
                all_reduce(1, context=made)
            except Interrupted:
                struck, made = struck + 1, None
            except RankFailure:
                made = None
            if struck and made is None:
                time.sleep(0.1)  # what was made is gone, before this rank calls again
        assert get_context() is made
        return struck, *works(made)

    outcomes = run_job(3, body, PATIENT, timeout=60)
    assert [list(each) for each in outcomes] == [[rank == 1, rank, 3] for rank in range(3)]


@pytest.mark.parametrize("whole", [True, False], ids=["world", "part"])
def test_a_part_and_the_whole_are_recovered_apart(whole):
    """What one context has gone through, the other does not know of."""

    def body(group):
        context = startup.initialize("cpu", group)
        part = context.split(context.rank // 2)
        broken = context if whole else part
        if broken.rank == broken.size - 1:
            raises_once(broken, "publish")
        with contextlib.suppress(Interrupted, RankFailure):
            all_reduce(1, context=broken)
        works(part if whole else context)
        made = broken.recover()
        assert works(made) == (broken.rank, broken.size)
        works(part if whole else context)
        startup.finalize()  # ends what was split from the context before, too
        with pytest.raises(RuntimeError, match="finalize"):
            (part if whole else made).barrier()
        return True

    assert run_job(4, body, IN_PYTHON, timeout=60) == [True] * 4


def test_who_does_not_come_is_named_and_may_come_later():
    """Rank 2 comes when a peer has asked a second time."""

    def body(group):
        context = startup.initialize("cpu", group)
        words = context.board._words
        context.board.policy = replace(context.board.policy, timeout=0.3)
        while context.rank == 2 and max(words[0][RECOVERY], words[1][RECOVERY]) < 2:
            time.sleep(1e-3)
        late, made = set(), None
        while made is None:
            try:
                made = context.recover()
            except OpTimeout as error:
                late.update(error.ranks)
        return sorted(late), list(works(made))

    outcomes = run_job(3, body, PATIENT, timeout=60)
    assert [found for _, found in outcomes] == [[rank, 3] for rank in range(3)]
    assert 2 in outcomes[0][0] + outcomes[1][0]


def test_finalize_ends_a_context_whose_ranks_are_in_different_calls():
    def body(group):
        context = startup.initialize("cpu", group)
        if context.rank == 0:
            startup.finalize()
            return "finalized"
        try:
            all_reduce(np.ones(3))
        except (RankFailure, ValueError) as error:
            startup.finalize()
            return type(error).__name__

    outcomes = run_job(3, body, PATIENT, timeout=60)
    assert outcomes[0] == "finalized"
    assert set(outcomes[1:]) <= {"RankFailure", "CollectiveMismatch"}


ENDINGS = {
    "before peers know": (Board, "leave"),
    "before anything is closed": (Runtime, "close"),
    "before memory is closed": (HostTransport, "close"),
    "before connections are closed": (Mesh, "close"),
    "between two of them": (PeerWatch, "close"),
    "before there is no default context": (current, "set_default"),
}


def descriptors():
    """How many this process has, without those of memory that is no more used."""
    gc.collect()
    return len([*Path("/proc/self/fd").iterdir()])


@pytest.mark.parametrize(("hosts", "late"), [("1", False), ("1", True), ("2", False)])
def test_finalize_is_called_again_where_an_exception_left_it(hosts, late):
    """It leaves no descriptor open, and ranks can begin anew."""

    def body(group):
        startup.initialize("cpu", group)
        startup.finalize()
        before, struck = descriptors(), 0
        for owner, verb in ENDINGS.values():
            startup.initialize("cpu", group)
            plain = getattr(owner, verb)

            def ring(*args, owner=owner, verb=verb, plain=plain):
                setattr(owner, verb, plain)
                if late:
                    plain(*args)
                raise Interrupted

            setattr(owner, verb, ring if group.rank == 1 else plain)
            try:
                startup.finalize()
            except Interrupted:
                struck += 1
                startup.finalize()
            assert get_context() is None
            assert descriptors() == before, verb
        startup.initialize("cpu", group)
        return struck, float(all_reduce(1))

    outcomes = run_job(2, body, PATIENT | {"SHARDMATH_FAKE_HOSTS": hosts}, timeout=60)
    assert list(map(list, outcomes)) == [[0, 2], [len(ENDINGS), 2]], outcomes
