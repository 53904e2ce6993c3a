"""One program, started by our launcher, mpirun and torchrun, on 2 and 3 ranks, and alone.

Of 2 ranks each is a new Python, but of torchrun's, which would take seconds to load torch, as those
of test_threads_counted do; the others are forks of one that has loaded the libraries.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import preloaded
from started import command, missing

ROOT = Path(__file__).parents[2]
PROGRAM = str(Path(__file__).parent / "program.py")

# Launcher, and the library whose communicator the program passes after it has done without.
LAUNCHERS: dict[str, list[str]] = {"shardmath": [], "mpirun": ["mpi"], "torchrun": ["torch"]}


def run(words: list[str]) -> list[str]:
    """The sorted lines that a program prints, without our launcher's marks."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return sorted(line.partition("] ")[2] or line for line in done.stdout.splitlines())


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_program(launcher: str, size: int) -> None:
    if missing(launcher):
        pytest.skip(missing(launcher))
    libraries = LAUNCHERS[launcher]
    is_new = size == 2 and launcher != "torchrun"
    python = [sys.executable] if is_new else preloaded.python()
    lines = run([*command(launcher, size, python), PROGRAM, *libraries])
    ways = ["environment", *libraries]
    assert lines == ["; ".join(f"{way} {r} of {size}" for way in ways) for r in range(size)]


def test_alone() -> None:
    assert run([sys.executable, PROGRAM]) == ["environment 0 of 1"]


def test_a_program_of_torch() -> None:
    """It is torch's own but for the line that imports symmetric memory."""
    if missing("torchrun"):
        pytest.skip(missing("torchrun"))
    program = ROOT / "examples" / "experts.py"
    lines = run([*command("torchrun", 2, preloaded.python()), str(program)])
    assert [line.partition(":")[0] for line in lines] == ["rank 0", "rank 1"]
    torchs = "import torch.distributed._symmetric_memory as symm_mem"
    ours = "import shardmath.symmetric_memory as symm_mem"
    text = program.read_text()
    assert text.count("shardmath") == text.count(ours) == text.count(torchs) == 1
