"""Ranks that a launcher starts: ours, torchrun or mpirun; each connects back and serves.

`TEST_LAUNCHER` names the launcher of all pools of a run of pytest; without it pools fork. A job
that was launched has one size, and a pool has a job for each size that it is asked for. Of those of
all pools only the last used are kept.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

import preloaded
from serve import END, receive, send
from shardmath.base import config, wire
from shardmath.launch.failure import Failure
from shardmath.launch.ranks import die_with

__all__ = [
    "LAUNCHER",
    "LAUNCHERS",
    "PATIENCE",
    "Member",
    "Started",
    "command",
    "missing",
    "stacks_of",
]

LAUNCHER = config.environment().get("TEST_LAUNCHER", "")
MOST = 24  # ranks that are kept at the same time
# Seconds after which something hangs: a job's start, its end, a call. They only guard against waits
# without end, on a machine that is ten times slower than an idle one, and are less than pytest's
# own limit for a test, so that what hangs is named.
PATIENCE = 240.0

# What a launcher is, which package it needs, and whose communicator its ranks pass.
LAUNCHERS = {
    "shardmath": ("shardmath", "numpy", ""),
    "torchrun": ("torchrun", "torch", ""),
    "torchrun+torch": ("torchrun", "torch", "torch"),
    "mpirun": ("mpirun", "mpi4py", ""),
    "mpirun+mpi4py": ("mpirun", "mpi4py", "mpi4py"),
}


@cache
def missing(launcher: str) -> str:
    """Why there is no such launcher here, or ""."""
    program, needed, _ = LAUNCHERS[launcher]
    if importlib.util.find_spec(needed) is None:
        return f"{launcher} needs {needed}, which is not here"
    if program == "mpirun" and _mpirun() is None:
        return "there is no mpirun here"
    return ""


def command(launcher: str, size: int, python: Sequence[str] = (sys.executable,)) -> list[str]:
    """The words before the program's name that start it on `size` ranks, each of them a `python`.

    Those of our launcher are forks of one. torchrun itself is never a new Python.
    """
    program = LAUNCHERS[launcher][0]
    if program == "shardmath":
        return [*python, "-m", "shardmath", "run", "-n", str(size)]
    if program == "torchrun":
        run = [*preloaded.python(), "-m", "torch.distributed.run"]
        return [*run, "--standalone", "--nproc-per-node", str(size), "--no-python", *python]
    return [*_mpi_words(), "-n", str(size), *python]


def _mpirun() -> str | None:
    beside = os.pathsep.join(
        (str(Path(sys.executable).parent), config.environment().get("PATH", ""))
    )
    return shutil.which("mpirun", path=beside)


@cache
def _mpi_words() -> list[str]:
    program = _mpirun()
    assert program is not None, missing("mpirun")
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    # Open MPI counts cores, and refuses root.
    cautious = "Open MPI" in version.stdout
    return [program, *(["--allow-run-as-root", "--oversubscribe"] if cautious else [])]


class Member:
    """A rank of a started job as the parent sees it."""

    def __init__(self, rank: int, pid: int, channel: socket.socket, stack: Path) -> None:
        self.rank = rank
        self.pid = pid
        self.channel = channel
        self.stack = stack

    def last_words(self) -> Failure:
        """That it ended. When one rank does so, a launcher ends the others, and tells why."""
        return Failure(self.rank, 0.0, 0)


class Started:
    """A job of `size` ranks."""

    def __init__(self, launcher: str, size: int) -> None:
        _make_room(size)
        self.size = size
        self.members: list[Member] = []
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `end`)
        parent = os.getpid()
        with socket.socket(socket.AF_UNIX) as door:
            address = f"shardmath-tests-{secrets.token_hex(8)}"
            door.bind("\0" + address)
            door.listen(size)
            python = [sys.executable] if LAUNCHER else preloaded.python()
            words = [*command(launcher, size, python), str(Path(__file__).with_name("serve.py"))]
            self._process = subprocess.Popen(
                [*words, address, LAUNCHERS[launcher][2]],
                env={**config.environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,
                preexec_fn=lambda: die_with(parent),  # noqa: PLW1509
            )
            _running.append(self)
            try:
                self._admit(door)
            except BaseException:
                self.kill()
                raise

    def _admit(self, door: socket.socket) -> None:
        """Take in all ranks, in their order."""
        give_up = time.monotonic() + PATIENCE
        while len(self.members) < self.size:
            if not select.select([door], [], [], 0.05)[0]:
                ended = self._process.poll() is not None
                assert not ended and time.monotonic() < give_up, self.said()
                continue
            channel, _ = door.accept()
            greeting = receive(channel)
            assert greeting is not None, self.said()
            rank, size, pid, stack = wire.decode(greeting[1])
            assert size == self.size, f"rank {rank} believes to be one of {size}"
            self.members.append(Member(rank, pid, channel, Path(f"/proc/{pid}/fd/{stack}")))
        self.members.sort(key=lambda member: member.rank)
        assert [member.rank for member in self.members] == list(range(self.size))

    @property
    def ended(self) -> bool:
        """Whether somebody has ended it."""
        return self not in _running

    def used(self) -> None:
        """Note that it was needed just now."""
        _running.remove(self)
        _running.append(self)

    def said(self) -> str:
        """What the launcher and the ranks have written."""
        self._output.seek(0)
        return self._output.read().decode(errors="replace")

    def dismiss(self) -> None:
        """Let it end as a program ends."""
        for member in self.members:
            with contextlib.suppress(OSError):
                send(member.channel, END)

    def end(self) -> None:
        """Dismiss it and wait for its end. AssertionError unless the launcher is content."""
        self.dismiss()
        stacks = ""
        try:
            status: Any = self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            status = f"nothing within {PATIENCE} s"
            stacks = stacks_of(self.members)
        text = self.said() + stacks
        self.kill()
        assert status == 0, f"the launcher returned {status}: {text}"

    def kill(self) -> None:
        """End it at once."""
        if self in _running:
            _running.remove(self)
        for member in self.members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)
            member.channel.close()
        self.members = []
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._output.close()


_running: list[Started] = []  # of all pools; the least recently used first


def _make_room(size: int) -> None:
    while _running and sum(job.size for job in _running) + size > MOST:
        _running[0].end()


def stacks_of(members: Sequence[Member]) -> str:
    """Where each of the ranks is, as faulthandler sees it."""
    texts = []
    for member in members:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member.pid, signal.SIGUSR1)
        give_up = time.monotonic() + 5.0
        text = ""
        # The dump is complete when it ends in the outermost frame; a stopped rank writes none.
        while "<module>" not in text and time.monotonic() < give_up:
            select.select([], [], [], 0.01)
            with contextlib.suppress(OSError):
                text = member.stack.read_text()
        texts.append(f"rank {member.rank} was here:\n{text}")
    return "\n".join(texts)
