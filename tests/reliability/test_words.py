"""The words of errors, class by class: whoever reads one knows who, where, when, and what to do.

One rank, the reader, gets the error; `other` is the rank that it is about. In the whole job these
are ranks 0 and 1; in a part of one of 4 ranks they are again, and ranks 1 and 3 of the job.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from mortal import Job, limit_waits
from shardmath import errors
from shardmath.collectives import all_gather, all_reduce
from shardmath.context import startup
from shardmath.distribution import BlockCyclic, Box, Redistribute, Replicated, Slab
from shardmath.fft import FFT
from shardmath.handles.allocation import allocate_symmetric_memory as allocate
from shardmath.handles.allocation import free_symmetric_memory
from shardmath.handles.rendezvous import rendezvous
from shardmath.linalg import DirectSolver
from shardmath.linalg.advanced import Matmul
from shardmath.symmetric import rows

LIMIT = 0.5  # seconds that a peer which cannot come is given
AFTER = "call recover() of the context"
ONES = np.ones(3)


@dataclass
class Ranks:
    """What calls work on, on one rank: its context, and a handle there."""

    context: object
    handle: object

    def given_up(self):
        """Wait until the reader has given up."""
        while self.context.board._words[0][rows.STATE] != rows.FAILED:
            time.sleep(0.01)


def fail(ranks):
    with ranks.context.executing("step"):
        raise KeyError("some mistake")


def twice(call):
    """What a call raises after another has failed."""

    def made(ranks):
        try:
            call(ranks)
        except errors.OpTimeout:
            call(ranks)

    return made


def freed(ranks):
    array = allocate((3,), np, skip_symmetric_check=True)
    free_symmetric_memory(array)
    all_reduce(array)


def used_after_free(kind, *args, **named):
    def made(ranks):
        operation = kind(*args, **named)
        operation.free()
        operation.plan()

    return made


def die(ranks):
    os.kill(os.getpid(), signal.SIGKILL)


def stop(ranks):
    os.kill(os.getpid(), signal.SIGSTOP)


SQUARE = np.ones((4, 4))
# What the reader calls, and the other; the class of the error, words of it, and advice.
WAITS = {
    "barrier": (lambda r: r.context.barrier(), "in barrier"),
    "all_reduce": (lambda r: all_reduce(ONES), "in all_reduce"),
    "phase": (lambda r: r.context.board.barrier("phase"), "in phase"),
}
HANDLES = {
    "wait_signal": lambda r: r.handle.wait_signal(1, timeout_ms=50),
    "put_signal": lambda r: [r.handle.put_signal(1, timeout_ms=50) for _ in range(2)],
    "handle's barrier": lambda r: r.handle.barrier(timeout_ms=50),
}
CASES = {
    **{
        f"{name}, late": (call, Ranks.given_up, "OpTimeout", [word, "last operation"], "raise SH")
        for name, (call, word) in WAITS.items()
    },
    **{
        f"{name}, dead": (call, die, "RankFailure", [word, "died; its last operation"], AFTER)
        for name, (call, word) in WAITS.items()
    },
    **{
        f"{name}, late": (call, stop, "OpTimeout", [name.split("'s ")[-1]], "the timeout of")
        for name, call in HANDLES.items()
    },
    "left": (
        WAITS["barrier"][0],
        lambda r: r.context.close(),
        "RankFailure",
        ["in barrier", "has left"],
        AFTER,
    ),
    "gave up": (
        WAITS["barrier"][0],
        fail,
        "RankFailure",
        ["in barrier", "gave up: ", "KeyError: 'some mistake'"],
        AFTER,
    ),
    "earlier": (
        twice(WAITS["barrier"][0]),
        Ranks.given_up,
        "RankFailure",
        ["an earlier operation of this context failed", "in barrier"],
        AFTER,
    ),
    "other operations": (
        WAITS["all_reduce"][0],
        lambda r: all_gather(ONES),
        "CollectiveMismatch",
        ["rank 0 called all_reduce; rank 1 called all_gather"],
        "",
    ),
    "other kinds of waits": (
        WAITS["phase"][0],
        lambda r: all_gather(ONES),
        "CollectiveMismatch",
        ["in phase", "is in all_gather"],
        "the same calls in the same order",
    ),
    "shapes": (
        lambda r: all_reduce(ONES),
        lambda r: all_reduce(ONES[:2]),
        "CollectiveMismatch",
        ["in all_reduce", "rank 0 has (3,), rank 1 has (2,)"],
        "must be equal",
    ),
    "refused": (
        lambda r: all_reduce(ONES),
        lambda r: all_reduce("no array"),
        "ValueError",
        ["rank 1: x: ", "got str", "in all_reduce"],
        "expected an array of numpy",
    ),
    "room": (
        lambda r: allocate((1 << 50,), np),
        lambda r: allocate((1 << 50,), np),
        "HeapExhausted",
        ["needs 9,007,199,254,740,992 bytes more", "in allocate_symmetric_memory"],
        "use more ranks",
    ),
    "binding": (
        lambda r: FFT(SQUARE, distribution=Box((0, 0), (3, 3))),
        lambda r: FFT(SQUARE, distribution=Box((0, 0), (3, 3))),
        "BindDistributionError",
        ["rank 0"],
        "",
    ),
}
# Mistakes of one rank alone, which no peer is part of.
LOCAL = {
    "use after free": (freed, "UseAfterFree", "free it after its last use"),
    "device": (
        lambda r: startup.new_context("gpu"),
        "InvalidDevice",
        "or a CUDA device: its index",
    ),
    "fft": (
        used_after_free(FFT, SQUARE, distribution=Slab.X),
        "InvalidFFTState",
        "make a new one",
    ),
    "direct solver": (
        used_after_free(DirectSolver, SQUARE, SQUARE, distributions=[Replicated(), Replicated()]),
        "InvalidDirectSolverState",
        "make a new one",
    ),
    "matmul": (
        used_after_free(Matmul, SQUARE, SQUARE, distributions=[Slab.Y, Slab.X, Slab.X]),
        "InvalidMatmulState",
        "make a new one",
    ),
    "redistribute": (
        used_after_free(Redistribute, SQUARE, Slab.X, Slab.Y),
        "InvalidRedistributeState",
        "make a new one",
    ),
    "conversion": (
        lambda r: Slab.X.to(BlockCyclic),
        "ConvertDistributionError",
        "bound to a global shape it may",
    ),
}


def error_of(call, ranks):
    """The class of what a call raises, the ranks that it names, its text, and its notes."""
    try:
        with ranks.context:
            call(ranks)
    except Exception as error:
        notes = getattr(error, "__notes__", [])
        return type(error).__name__, getattr(error, "ranks", None), str(error), "\n".join(notes)
    return "returned", None, "", ""


def outcomes(part, reader_calls, other_calls, *, limited=False, **variables):
    """The reader's error; who the two ranks are: their processes, and their numbers in the job.

    `limited`: the reader's time is up before the other comes.
    """
    size, members = (4, (1, 3)) if part else (2, (0, 1))

    def body(group):
        context = startup.initialize("cpu", group)
        if part:
            context = context.split(context.rank % 2)
        with context:
            handle = rendezvous(allocate((4,), np))
            all_reduce(ONES)
        ranks = Ranks(context, handle)
        if group.rank not in members:
            return None
        if limited:
            limit_waits(context, LIMIT)
        return error_of(reader_calls if context.rank == 0 else other_calls, ranks)

    with Job(size, body, {"SHARDMATH_NOTICE": "100", **variables}) as job:
        found = job.outcome(members[0])
        host = socket.gethostname()
        processes = [f"pid {job.pids[rank]} on {host}" for rank in members]
    return found, processes, [f"rank {rank} of the job" for rank in members] if part else []


@pytest.mark.parametrize("part", [False, True], ids=["all", "part"])
@pytest.mark.parametrize("name", CASES)
def test_an_error_names_all_that_have_part_in_it(name, part):
    reader, other, kind, words, advice = CASES[name]
    limited = kind == "OpTimeout" or name == "earlier"
    found, processes, numbers = outcomes(part, reader, other, limited=limited)
    assert found[0] == kind, found
    text = f"{found[2]}\n{found[3]}"
    wanted = [*words, *processes, *numbers, "rank 0", "rank 1", "test_words.py:", advice]
    if name == "earlier":
        wanted.remove("rank 1")
    assert not [each for each in wanted if each not in text], found
    assert "its last operation was ;" not in text and "was )" not in text
    if found[0] in ("OpTimeout", "RankFailure") and name != "earlier":
        assert tuple(found[1]) == (1,)


@pytest.mark.parametrize("part", [False, True], ids=["all", "part"])
def test_a_wait_for_memory_on_another_host(part):
    def read(ranks):
        ranks.context._runtime.transport._timeout = LIMIT
        other = ranks.context._runtime.mesh.pids[3 if part else 1]
        while Path(f"/proc/{other}/stat").read_text().rpartition(") ")[2][0] != "T":
            time.sleep(0.01)  # or else it may answer yet
        ranks.handle.get(np.zeros(4), 1)

    hosts = {"SHARDMATH_FAKE_HOSTS": "4" if part else "2", "SHARDMATH_TRANSPORT": "tcp"}
    found, processes, numbers = outcomes(part, read, stop, limited=True, **hosts)
    assert (found[0], tuple(found[1])) == ("OpTimeout", (1,)), found
    for each in [*processes, "a read of its memory", "test_words.py:", "raise SHARDMATH_TIMEOUT"]:
        assert each in found[2], found
    if part:
        assert numbers[0] in found[2] and "of the ranks of the job" in found[2]


@pytest.mark.parametrize("name", LOCAL)
def test_a_mistake_of_one_rank_says_what_to_do(name):
    call, kind, advice = LOCAL[name]
    found, _, _ = outcomes(False, call, call)
    assert found[0] == kind and advice in found[2], found


def test_every_class_has_words():
    kinds = {case[2] for case in CASES.values()} | {case[1] for case in LOCAL.values()}
    elsewhere = {
        "BackendUnavailable",  # tests/group, tests/cuda/driver/test_packages.py
        "BootstrapError",  # tests/group
        "CudaError",  # tests/cuda
        "DataRace",  # tests/reliability/test_races.py
        "ShardmathError",
    }
    assert set(errors.__all__) == (kinds & set(errors.__all__)) | elsewhere
