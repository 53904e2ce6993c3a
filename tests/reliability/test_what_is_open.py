"""R14: what is open while a job runs, as the system sees it, and what another user can do."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

NOBODY = 65534
RUN = [sys.executable, "-m", "shardmath", "run", "-n", "3"]
PROGRAM = """
import os, sys
import numpy as np
import shardmath
from shardmath import symmetric_memory
from shardmath.collectives import all_reduce


def rank():
    context = shardmath.initialize("cpu")
    x = symmetric_memory.empty(100_000)
    x[:] = context.rank
    handle = symmetric_memory.rendezvous(x)
    handle.barrier()
    part = context.split(context.rank % 2)
    assert all_reduce(np.ones(40_000))[0] == context.size
    os.write(1, b"ready %d\\n" % os.getpid())
    os.read(int(sys.argv[1]), 1)
    context.barrier()


if "spawn" in sys.argv:
    shardmath.spawn(rank, 3)
else:
    rank()
"""


@contextlib.contextmanager
def job(folder: Path, how: str) -> Iterator[list[int]]:
    """The processes of the ranks of a job that computes, and then waits until the end."""
    script = folder / "program.py"
    script.write_text(PROGRAM)
    waiting, end = os.pipe()
    start = [sys.executable] if how == "spawn" else RUN
    with subprocess.Popen(
        [*start, str(script), str(waiting), how],
        stdout=subprocess.PIPE,
        pass_fds=[waiting],
        text=True,
    ) as process:
        os.close(waiting)
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        try:
            yield [int(line.partition("ready ")[2]) for line in lines]
        finally:
            os.close(end)
        assert process.wait() == 0


def descriptors(pid: int) -> list[str]:
    """What the open files of a process are."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(path))  # noqa: PTH115
    return found


def network(pid: int) -> set[str]:
    """The numbers of all sockets of the network that are in use where a process is."""
    names = ("tcp", "tcp6", "udp", "udp6", "raw", "raw6", "udplite", "packet")
    files = [Path(f"/proc/{pid}/net/{name}") for name in names]
    lines = [line for file in files if file.exists() for line in file.read_text().splitlines()[1:]]
    return {word for line in lines for word in line.split()}


def listening(pid: int) -> set[str]:
    """The numbers of the Unix sockets that listen where a process is."""
    lines = Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    return {field[6] for field in fields if field[3] != "00000000"}


@pytest.mark.parametrize("how", ["run", "spawn"])
def test_nothing_is_open_beyond_the_ranks(tmp_path: Path, how: str) -> None:
    before = {path.name for path in Path("/dev/shm").iterdir()}
    with job(tmp_path, how) as pids:
        for pid in pids:
            open_now, on_network, waits = descriptors(pid), network(pid), listening(pid)
            sockets = {what[8:-1] for what in open_now if what.startswith("socket:[")}
            assert sockets, "ranks talk over sockets"
            assert not sockets & on_network, "a rank has a socket of the network"
            assert not sockets & waits, "a rank still listens"
            files = [what for what in open_now if what.startswith(("/dev/shm", "/tmp", "/var"))]
            assert not [what for what in files if str(tmp_path) not in what], files
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
            shared = [line.split(maxsplit=5) for line in maps if line.split()[1].endswith("s")]
            named = [line[5] for line in shared if len(line) > 5]
            assert any(name.startswith("/memfd:shardmath") for name in named)
            files = [name for name in named if not name.endswith("(deleted)")]
            assert not [name for name in files if not name.startswith("/usr/")], files
        new = {path.name for path in Path("/dev/shm").iterdir()} - before
        assert not [name for name in new if not name.startswith("mpich")], new


@pytest.mark.parametrize("how", ["run", "spawn"])
def test_no_secret_is_among_variables_and_arguments(tmp_path: Path, how: str) -> None:
    with job(tmp_path, how) as pids:
        for pid in pids:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            ours = [one.decode() for one in variables if one.startswith(b"SHARDMATH_")]
            values = [one.partition("=")[2] for one in ours if "TIMEOUT" not in one]
            assert all(value.replace(",", "").isdecimal() for value in values), ours
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes()
            assert b"SHARDMATH" not in arguments and b"key" not in arguments


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_reaches_nothing(tmp_path: Path) -> None:
    with job(tmp_path, "run") as pids:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            os.write(writing, b"\n".join(reached(pids)))
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            found = pipe.read()
        assert os.waitpid(child, 0)[1] == 0
    assert not found, found


def reached(pids: list[int]) -> Iterator[bytes]:
    """What this process may do with others'."""
    for pid in pids:
        ways = [
            lambda pid=pid: [*Path(f"/proc/{pid}/fd").iterdir()],
            lambda pid=pid: Path(f"/proc/{pid}/environ").read_bytes(),
            lambda pid=pid: os.open(f"/proc/{pid}/mem", os.O_RDONLY),
            lambda pid=pid: Path(f"/proc/{pid}/maps").read_bytes()[0],
            lambda pid=pid: os.kill(pid, 0),
            *[lambda pid=pid, n=n: os.open(f"/proc/{pid}/fd/{n}", os.O_RDONLY) for n in range(40)],
        ]
        for number, way in enumerate(ways):
            with contextlib.suppress(OSError):
                way()
                yield b"way %d of process %d" % (number, pid)
