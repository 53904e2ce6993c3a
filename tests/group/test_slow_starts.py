"""Ranks that come late to the start, or never: the others say so soon, and end in time."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import preloaded
from shardmath.base.config import Settings
from shardmath.context.startup import initialize
from shardmath.launch import spawn
from shardmath.transport import meeting
from shardmath.transport.handshake import Conversation
from started import command, missing

LIMITS = {"SHARDMATH_NOTICE": "0.3", "SHARDMATH_STARTUP_TIMEOUT": "2"}
ABSENT = """
import os, signal, sys
import shardmath
rank = os.environ.get("SHARDMATH_RANK") or os.environ["PMI_RANK"]
if rank == "1":
    signal.pause() if sys.argv[1] == "sleeps" else sys.exit()
open(sys.argv[2], "w" if rank == "0" else "r")  # returns when both are here
shardmath.initialize("cpu")
"""


def ended(arguments: list[str], **variables: str) -> tuple[int, str]:
    """The status of a program, and what it wrote to stderr."""
    done = subprocess.run(
        arguments,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **variables},
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("launcher", "rank_1", "said"),
    [
        (
            "shardmath",
            "sleeps",
            [
                "rank 0 in initialize, absent.py:8: waiting for rank 1\n",
                "rank 2 in initialize, absent.py:8: waiting for the other ranks\n",
                "rank 1 did not arrive before the deadline: does every rank call",
            ],
        ),
        ("shardmath", "ends", ["rank 1 ended while this rank waited for it"]),
        ("mpirun", "sleeps", ["MPI_Init, absent.py:8: waiting for all 3", "ended after 2 s"]),
        ("mpirun", "ends", ["MPI_Init, absent.py:8: waiting for all 3", "ended after 2 s"]),
    ],
)
def test_an_absent_rank(tmp_path: Path, launcher: str, rank_1: str, said: list[str]) -> None:
    if missing(launcher):
        pytest.skip(missing(launcher))
    program = tmp_path / "absent.py"
    program.write_text(ABSENT)
    both = tmp_path / "both"
    os.mkfifo(both)
    status, text = ended([*command(launcher, 3), str(program), rank_1, str(both)], **LIMITS)
    assert status != 0
    assert all(words in text for words in said), text


def test_torch_says_whom_it_misses() -> None:
    pytest.importorskip("torch")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    facts = dict(zip(names, ("0", "0", "2", "2", "127.0.0.1", port), strict=True))
    program = 'import shardmath; shardmath.initialize("cpu")'
    status, text = ended([*preloaded.python(), "-c", program], **LIMITS, **facts)
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


@pytest.mark.parametrize(
    ("limits", "start", "status", "words"),
    [
        ("notice=60.0, timeout=90.0", "pass", 0, []),
        ("notice=0.2, timeout=90.0", "time.sleep(1.0)", 0, ["waiting for all 2 ranks to start"]),
        (
            "notice=0.2, timeout=1.0",
            "signal.pause()",
            -signal.SIGTERM,
            ["<string>:3: waiting", "<string>:3: ended after 1 s"],
        ),
    ],
)
def test_a_start_of_mpi_is_bounded(limits: str, start: str, status: int, words: list[str]) -> None:
    program = f"""import os, signal, time
from shardmath.group.mpi_process import bounded_start
with bounded_start(0, 2, {limits}):
    {start}
try:
    os.wait()
except ChildProcessError:
    print("no child is left")
"""
    found, text = ended([sys.executable, "-c", program])
    assert found == status
    assert all(word in text for word in words)
    assert words or not text


@pytest.mark.parametrize(
    ("mistake", "status"),
    [("pass", 0), ("1 / 0", -signal.SIGALRM), ("caught()", 0), ("sys.exit(3)", 3)],
)
def test_an_end_of_mpi_is_bounded_after_a_failure(mistake: str, status: int) -> None:
    program = f"""import atexit, sys, time
def caught():  # and kept, as test runners and notebooks do
    try:
        1 / 0
    except ZeroDivisionError as error:
        sys.last_value, sys.last_traceback = error, error.__traceback__
from shardmath.group import mpi_process
mpi_process._GRACE = 1
def slow_end():
    time.sleep(1.5)
    print("at the end", file=sys.stderr)
atexit.register(slow_end)  # runs after the other, as MPI_Finalize does
mpi_process.bound_end()
{mistake}
"""
    found, text = ended([sys.executable, "-c", program])
    assert found == status
    assert ("at the end" in text) == (status != -signal.SIGALRM)
