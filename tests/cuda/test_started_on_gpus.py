"""One program on GPUs, started by our launcher, torchrun and mpirun, as far as they are here."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = str(Path(__file__).parent / "program.py")
BESIDE = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
# Launcher, what it needs, and the library whose communicator the program passes after it has done
# without.
LAUNCHERS = {
    "shardmath": ([sys.executable, "-m", "shardmath", "run", "-n", "{n}"], "numpy", []),
    "torchrun": (
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "{n}"],
        "torch",
        ["torch"],
    ),
    "mpirun": (["mpirun", "-n", "{n}"], "mpi4py", ["mpi"]),
}


def command(launcher):
    """The command's words and the library; skips where a part of it is absent."""
    words, needed, libraries = LAUNCHERS[launcher]
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{launcher} needs {needed}, which is not here")
    if launcher == "mpirun":
        program = shutil.which("mpirun", path=BESIDE)
        if program is None:
            pytest.skip("there is no mpirun here")
        version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
        open_mpi = "Open MPI" in version.stdout
        words = [program, *words[1:]]
        if open_mpi:  # it counts cores, and refuses root
            words += ["--allow-run-as-root", "--oversubscribe"]
        words.append(sys.executable)
    return words, libraries


@pytest.mark.parametrize("how_many", ["two", "all"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.timeout(120)
def test_one_program(gpus, launcher, how_many):
    size = min(2, gpus.size) if how_many == "two" else gpus.size
    words, libraries = command(launcher)
    words = [word.format(n=size) for word in words]
    done = subprocess.run(
        [*words, PROGRAM, *libraries], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    lines = sorted(line.partition("] ")[2] or line for line in done.stdout.splitlines())
    ways = ["environment", *libraries]
    wanted = ["; ".join(f"{way} {rank} of {size}" for way in ways) for rank in range(size)]
    assert [line for line in lines if " of " in line] == wanted
