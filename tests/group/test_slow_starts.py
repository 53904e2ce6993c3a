"""Ranks that come late to the start, or never: the others say so soon, and end in time."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping

import pytest

import preloaded
from shardmath.base.config import Settings
from shardmath.context.startup import initialize
from shardmath.group import meeting
from shardmath.group.handshake import Conversation
from shardmath.launch import spawn
from started import command, missing

LIMITS = {"SHARDMATH_NOTICE": "0.3", "SHARDMATH_STARTUP_TIMEOUT": "2"}
ABSENT = """
import os, signal, sys
import shardmath.context.startup  # with all that takes long, before the clock runs
rank = os.environ.get("SHARDMATH_RANK") or os.environ["PMI_RANK"]
if rank == "1":
    signal.pause() if sys.argv[1] == "sleeps" else sys.exit()
open(sys.argv[2], "w" if rank == "0" else "r")  # returns when both are here
shardmath.initialize("cpu")
"""


Program = tuple[list[str], dict[str, str]]  # its arguments, and the variables that are its own
Ends = dict[str, tuple[int, str]]  # by a program's name: its status, and what it wrote to stderr


def ends(programs: Mapping[str, Program]) -> Ends:
    """How programs end that wait side by side, each for time to pass."""
    found: Ends = {}
    with contextlib.ExitStack() as stack:
        running = {}
        for name, (arguments, variables) in programs.items():
            text = stack.enter_context(tempfile.TemporaryFile("w+"))
            process = subprocess.Popen(
                arguments,
                stdout=subprocess.DEVNULL,
                stderr=text,
                env={**os.environ, **variables},
            )
            running[name] = stack.enter_context(process), text
        for name, (process, text) in running.items():
            status = process.wait()
            text.seek(0)
            found[name] = status, text.read()
    return found


# Launcher and what rank 1 does, and what is said then.
ABSENCES = {
    "shardmath sleeps": [
        "rank 0 in initialize, absent.py:8: waiting for rank 1\n",
        "rank 2 in initialize, absent.py:8: waiting for the other ranks\n",
        "rank 1 did not arrive before the deadline: does every rank call",
    ],
    "shardmath ends": ["rank 1 ended while this rank waited for it"],
    "mpirun sleeps": ["MPI_Init, absent.py:8: waiting for all 3", "ended after 2 s"],
    "mpirun ends": ["MPI_Init, absent.py:8: waiting for all 3", "ended after 2 s"],
}


@pytest.fixture(scope="module")
def absences(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    folder = tmp_path_factory.mktemp("absences")
    program = folder / "absent.py"
    program.write_text(ABSENT)
    programs: dict[str, Program] = {}
    for name in ABSENCES:
        launcher, rank_1 = name.split()
        if not missing(launcher):
            both = folder / name
            os.mkfifo(both)
            words = command(launcher, 3, preloaded.python())
            programs[name] = [*words, str(program), rank_1, str(both)], LIMITS
    if importlib.util.find_spec("torch") is not None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
        facts = dict(zip(names, ("0", "0", "2", "2", "127.0.0.1", port), strict=True))
        facts["TORCHELASTIC_RUN_ID"] = "9"
        code = 'import shardmath; shardmath.initialize("cpu")'
        programs["torch"] = [*preloaded.python(), "-c", code], LIMITS | facts
    return ends(programs)


@pytest.mark.parametrize("name", ABSENCES)
def test_an_absent_rank(absences: Ends, name: str) -> None:
    launcher, _ = name.split()
    if missing(launcher):
        pytest.skip(missing(launcher))
    status, text = absences[name]
    assert status != 0
    assert all(words in text for words in ABSENCES[name]), text


def test_torch_says_whom_it_misses(absences: Ends) -> None:
    pytest.importorskip("torch")
    status, text = absences["torch"]
    assert status == 1
    assert "shardmath: rank 0 in initialize, <string>:1: waiting for the other ranks" in text
    assert re.search(r"BootstrapError: rank 0 .*: .* did not bring 2 ranks together .*2 s", text)


def meet_late() -> int:
    """Rank 1 has no time to speak before it is dropped, twice, as on a busy machine."""
    meeting._PATIENCE = 0.1
    go_on, delays = Conversation.go_on, iter([1, 1])

    def go_on_late(self: Conversation) -> None:
        if self.until > time.monotonic() + 1 and next(delays, 0):  # a call: others end sooner
            poll = select.poll()
            poll.register(self.connection, select.POLLIN)
            poll.poll()
        go_on(self)

    if Settings.from_environment().rank == 1:
        Conversation.go_on = go_on_late  # type: ignore[method-assign]
    return initialize("cpu").size


def test_a_word_that_comes_late_is_said_again() -> None:
    assert spawn(meet_late, 3) == [3, 3, 3]


# What bounds a call of MPI, and what happens in it; the program's status, and what is said.
BOUNDED_START = "bounded_start(0, 2, notice={notice}, timeout={timeout})"
BOUNDED_CALL = "CallWatch('I', notice={notice}).bounded('call', timeout={timeout}, advice='no!')"
CALLS = {
    "start at once": (BOUNDED_START, (60.0, 90.0), "pass", 0, []),
    "start late": (
        *(BOUNDED_START, (0.2, 90.0), "time.sleep(1.0)", 0),
        ["waiting for all 2 ranks to start"],
    ),
    "start never": (
        *(BOUNDED_START, (0.2, 1.0), "signal.pause()", -signal.SIGTERM),
        ["<string>:3: waiting", "<string>:3: ended after 1 s"],
    ),
    "torch never": (
        *(BOUNDED_START.replace("}", "}, call='c', library='t'", 1), (9.0, 1.0), "signal.pause()"),
        *(
            -signal.SIGTERM,
            ["in c, <string>:3: ended after 1 s of waiting for all 2 ranks to start t"],
        ),
    ),
    "call at once": (BOUNDED_CALL, (60.0, 90.0), "pass", 0, []),
    "call never": (
        *(BOUNDED_CALL, (0.2, 1.0), "signal.pause()", -signal.SIGTERM),
        ["shardmath: I: call\n", "shardmath: I: ended after 1 s of call: no!\n"],
    ),
}


@pytest.fixture(scope="module")
def calls() -> Ends:
    def program(bound: str, limits: tuple[float, float], call: str) -> Program:
        notice, timeout = limits
        code = f"""import os, signal, time
from shardmath.group.mpi import CallWatch, bounded_start
with {bound.format(notice=notice, timeout=timeout)}:
    {call}
try:
    os.wait()
except ChildProcessError:
    print("no child is left")
"""
        return [sys.executable, "-c", code], {}

    return ends({name: program(*row[:3]) for name, row in CALLS.items()})


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_mpi_is_bounded(calls: Ends, name: str) -> None:
    *_, expected, words = CALLS[name]
    status, text = calls[name]
    assert status == expected
    assert all(word in text for word in words)
    assert words or not text


# What a program does last, and its status.
MISTAKES = {"pass": 0, "1 / 0": -signal.SIGALRM, "caught()": 0, "sys.exit(3)": 3}


@pytest.fixture(scope="module")
def mistaken_ends() -> Ends:
    def program(mistake: str) -> Program:
        code = f"""import atexit, sys, time
def caught():  # and kept, as test runners and notebooks do
    try:
        1 / 0
    except ZeroDivisionError as error:
        sys.last_value, sys.last_traceback = error, error.__traceback__
from shardmath.group import mpi
mpi._GRACE = 1
def slow_end():
    time.sleep(1.5)
    print("at the end", file=sys.stderr)
atexit.register(slow_end)  # runs after the other, as MPI_Finalize does
mpi.bound_end()
{mistake}
"""
        return [sys.executable, "-c", code], {}

    return ends({mistake: program(mistake) for mistake in MISTAKES})


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_end_of_mpi_is_bounded_after_a_failure(mistaken_ends: Ends, mistake: str) -> None:
    status, text = mistaken_ends[mistake]
    assert status == MISTAKES[mistake]
    assert ("at the end" in text) == (status != -signal.SIGALRM)
