"""R12: what ranks send each other at the start and between hosts is late, lost, cut short or twice.

Every rank gets what it should, or an error that has a name. That nobody waits for ever the pool's
patience sees to. One seed says who misbehaves, where, and how.
"""

from __future__ import annotations

import os
import random
import signal
import socket

import numpy as np
import pytest

from mortal import Job, Raised
from shardmath import errors
from shardmath.base import faults
from shardmath.collectives import all_gather, all_reduce
from shardmath.context import startup
from shardmath.distribution import Slab, redistribute
from shardmath.handles.allocation import allocate_symmetric_memory as allocate
from shardmath.handles.rendezvous import rendezvous

NAMED = {name for name in vars(errors) if isinstance(getattr(errors, name), type)}
AT_ONCE = 8  # jobs; while some wait for their deadlines, others have a core
SHORT = 24  # seeds; `make torture` takes all of LONG
LONG = 1000
RIGHT = "right"


def plan(seed):
    """On how many hosts the ranks are, and each one's SHARDMATH_FAULT, "" where it has none."""
    drawn = random.Random(seed)
    size = 2 + seed % 3
    place = faults.PLACES[seed % len(faults.PLACES)]
    kind = faults.KINDS[seed // len(faults.PLACES) % len(faults.KINDS)]
    hosts = 2 if place == "words" else drawn.choice((1, 2))
    probability = drawn.choice((0.02, 0.1, 0.5))
    bad = drawn.sample(range(size), drawn.randrange(1, size + 1))
    said = [f"{place}={probability}:{kind},seed={10 * seed + r}" for r in range(size)]
    return hosts, [said[r] if r in bad else "" for r in range(size)]


def job(seed):
    """The ranks of a seed, begun."""
    hosts, said = plan(seed)

    def program(group):
        context = startup.initialize("cpu", group)
        rank, size = context.rank, context.size
        for length in (3, 700, 9_000):
            part = np.arange(length) + rank
            expected = size * np.arange(length) + size * (size - 1) // 2
            assert (all_reduce(part) == expected).all()
            assert (all_gather(part[:5]).reshape(size, -1)[:, 0] == np.arange(size)).all()
        rows = np.arange(35.0).reshape(7, 5)
        low = sum(Slab.X.shape(r, (7, 5))[0] for r in range(rank))
        mine = rows[low : low + Slab.X.shape(rank, (7, 5))[0]]
        turned = redistribute(redistribute(mine, Slab.X, Slab.Y), Slab.Y, Slab.X)
        assert (turned == mine).all()
        array = allocate(300, np)
        array[:] = rank
        handle = rendezvous(array)
        handle.barrier()
        found, peer = np.empty(300), (rank + 1) % size
        handle.get(found, peer)
        assert (found == peer).all()
        handle.barrier()
        handle.put(np.full(9, 40.0 + rank), peer)
        handle.barrier()
        assert (array[:9] == 40 + (rank - 1) % size).all()
        startup.finalize()
        return RIGHT

    limits = {"SHARDMATH_TIMEOUT": "1", "SHARDMATH_STARTUP_TIMEOUT": "1", "SHARDMATH_NOTICE": "99"}
    variables = limits | {"SHARDMATH_FAKE_HOSTS": str(hosts)}
    return Job(len(said), program, variables, [{"SHARDMATH_FAULT": bad} for bad in said])


def outcomes(seed, ranks):
    """How the ranks ended: "right", the name of an error, or "killed", which one that dies is."""
    _, said = plan(seed)
    for rank, bad in enumerate(said):
        outcome = ranks.outcome(rank)
        if outcome is None:
            assert bad.partition(",")[0].endswith(":die"), (seed, rank, "it died")
            yield "killed"
            continue
        kind = outcome.kind if isinstance(outcome, Raised) else outcome
        assert kind in NAMED | {RIGHT}, (seed, plan(seed), rank, outcome)
        yield kind


def run(seeds):
    """How often ranks of these seeds ended in each way."""
    found = {}
    for first in range(0, len(seeds), AT_ONCE):
        begun = []
        try:
            begun = [(seed, job(seed)) for seed in seeds[first : first + AT_ONCE]]
            for seed, ranks in begun:
                for kind in outcomes(seed, ranks):
                    found[kind] = found.get(kind, 0) + 1
        finally:
            for _, ranks in begun:
                ranks.__exit__()
    return found


def test_all_is_right_or_an_error_that_has_a_name():
    found = run(range(SHORT))
    assert found.get(RIGHT, 0) and found.get("killed", 0), found
    assert found.get("RankFailure", 0) and found.get("OpTimeout", 0), found


@pytest.mark.torture
@pytest.mark.parametrize("first", range(0, LONG, 50))
def test_all_is_right_or_an_error_that_has_a_name_for_many_seeds(first):
    assert run(range(first, first + 50)).get(RIGHT, 0)


@pytest.mark.parametrize(
    ("kind", "heard"),
    [
        ("delay", b"onetwo"),
        ("drop", b""),
        ("duplicate", b"oneonetwotwo"),
        ("truncate", b"o"),
    ],
)
def test_what_a_fault_does(kind, heard, monkeypatch):
    monkeypatch.setenv("SHARDMATH_FAULT", f"words=1:{kind}")
    one, other = socket.socketpair()
    assert faults.faulty("links", one) is one
    bad = faults.faulty("words", one)
    assert bad.send(b"one") == 3
    if kind != "truncate":
        assert bad.send(memoryview(b"two")) == 3
    bad.close()
    with other:
        found = b""
        while data := other.recv(64):
            found += data
    assert found == heard


def test_an_end_that_is_heard_and_one_that_is_not(monkeypatch):
    monkeypatch.setenv("SHARDMATH_FAULT", "words=1:error,links=1:die")
    one, other = socket.socketpair()
    with faults.faulty("words", one) as bad, other:
        with pytest.raises(ConnectionResetError):
            bad.send(b"one")
        assert other.recv(9) == b""
    one, other = socket.socketpair()
    child = os.fork()
    if child == 0:
        faults.faulty("links", one).send(b"one")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    one.close()
    other.close()


@pytest.mark.parametrize(
    "wrong", ["words", "words=2:drop", "words=x:drop", "words=1:fall", "roads=1:drop", "words=1"]
)
def test_what_no_fault_is(wrong, monkeypatch):
    monkeypatch.setenv("SHARDMATH_FAULT", wrong)
    one, other = socket.socketpair()
    with one, other, pytest.raises(ValueError, match=r"SHARDMATH_FAULT=.* is no place=probability"):
        faults.faulty("words", one)
