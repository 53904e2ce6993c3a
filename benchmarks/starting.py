"""How long a job of 4 ranks takes to its first line, beside mpiexec and torchrun.

    python benchmarks/starting.py

A rank's first line is when its script begins, by the clock that all processes share; the slowest
rank counts. "ready" is when `initialize` has returned there. "as srun" are processes that are
started directly with the variables that srun sets, and meet over TCP. "NumPy alone" are the same
processes when they only import NumPy: the least that any start of Python processes takes.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import record
from on_cores import speedup

import shardmath

RANKS = 4
TURNS = 7
GOAL = 0.5  # seconds to the first line
GOAL_OF_SRUN = 1.2  # times as long until all are ready as by this package's launcher
AS_SRUN = "as srun"
ALONE = "as srun, NumPy alone"
SCRIPT = """
import sys, time
first = time.monotonic()
{then}
sys.stderr.write(f"<{{first}} {{time.monotonic()}}>")
"""
READY = "import shardmath; shardmath.initialize('cpu')"
NUMPY = "import numpy"


def main() -> None:
    # Installed packages come with bytecode; here the first start writes it.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    ours = [sys.executable, "-m", "shardmath", "run", "-n", str(RANKS)]
    ways = {"shardmath run": ours, AS_SRUN: []}
    if found := record.beside_python("mpiexec"):
        ways["mpiexec"] = [found, "-n", str(RANKS), sys.executable]
    if found := record.beside_python("torchrun"):
        ways["torchrun"] = [found, "--nproc-per-node", str(RANKS)]
    started(ours, READY)
    rows: list[dict[str, Any]] = []
    for name, command in ways.items():
        turns = TURNS if name != "torchrun" else 3  # it takes seconds
        firsts = [started(command, "")[0] for _ in range(turns)]
        readies = [started(command, READY)[1] for _ in range(turns)]
        rows.append(
            {
                "launcher": name,
                "first line, s": statistics.median(firsts),
                "ready, s": statistics.median(readies),
            }
        )
    # In turns, so that other load on the machine affects all.
    rounds = [
        [started(command, then)[1] for command, then in (([], READY), ([], NUMPY), (ours, READY))]
        for _ in range(TURNS)
    ]
    as_srun_s, alone_s, ours_s = zip(*rounds, strict=True)
    rows.append({"launcher": ALONE, "ready, s": statistics.median(alone_s)})
    for name, seconds in ((AS_SRUN, as_srun_s), (ALONE, alone_s)):
        ratio = speedup(seconds, ours_s)
        rows.append({"launcher": f"{name}, of shardmath run", "ready, times": ratio})
    goals = {"first line, s": GOAL, "ready, times": GOAL_OF_SRUN}
    record.write("starting", rows, ranks=RANKS, goal=goals)


def started(command: list[str], then: str) -> tuple[float, float]:
    """Seconds until the slowest rank's first line, and until it was through with `then`.

    Without a `command` the ranks are started here, as srun does it.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(SCRIPT.format(then=then))
        script.flush()
        before = time.monotonic()
        if command:
            printed = subprocess.run(
                [*command, script.name], check=True, capture_output=True, text=True
            ).stderr
        else:
            printed = as_srun([sys.executable, script.name])
    marks = [part.split(">")[0].split() for part in printed.split("<")[1:]]
    assert len(marks) == RANKS, printed
    first, ready = (max(float(mark[i]) for mark in marks) - before for i in (0, 1))
    return first, ready


def as_srun(command: list[str]) -> str:
    """The stderr of ranks that have the variables of a Slurm step on this host alone."""
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": str(time.monotonic_ns())}
    step |= {"SLURM_STEP_NUM_TASKS": str(RANKS), "SLURM_STEP_NUM_NODES": "1"}
    step |= {"SLURM_NTASKS": str(RANKS), "SLURM_STEP_NODELIST": "localhost"}
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    return "".join(rank.communicate()[1] for rank in ranks)


if __name__ == "__main__":
    assert shardmath.__version__
    main()
