"""One program, started by our launcher, mpiexec and torchrun, on 2 and 3 ranks, and alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BESIDE = Path(sys.executable).parent
PROGRAM = str(Path(__file__).parent / "program.py")

# Launcher, and the library whose communicator the program passes after it has done without.
LAUNCHERS = {
    "shardmath": ([sys.executable, "-m", "shardmath", "run", "-n", "{n}"], []),
    "mpiexec": ([str(BESIDE / "mpiexec"), "-n", "{n}", sys.executable], ["mpi"]),
    "torchrun": ([str(BESIDE / "torchrun"), "--nproc-per-node", "{n}"], ["torch"]),
}


def run(command: list[str]) -> list[str]:
    """The sorted lines that a command prints, without our launcher's marks."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return sorted(line.partition("] ")[2] or line for line in done.stdout.splitlines())


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_program(launcher: str, size: int) -> None:
    command, libraries = LAUNCHERS[launcher]
    lines = run([part.format(n=size) for part in command] + [PROGRAM, *libraries])
    ways = ["environment", *libraries]
    assert lines == ["; ".join(f"{way} {r} of {size}" for way in ways) for r in range(size)]


def test_alone() -> None:
    assert run([sys.executable, PROGRAM]) == ["environment 0 of 1"]
