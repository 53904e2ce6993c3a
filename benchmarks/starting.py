"""How long a job of 4 ranks takes to its first line, beside mpiexec and torchrun.

    python benchmarks/starting.py

A rank's first line is when its script begins, by the clock that all processes share; the slowest
rank counts. "ready" is when `initialize` has returned there.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import record

import shardmath

RANKS = 4
TURNS = 7
GOAL = 0.5  # seconds to the first line
SCRIPT = """
import sys, time
first = time.monotonic()
{then}
sys.stderr.write(f"<{{first}} {{time.monotonic()}}>")
"""
READY = "import shardmath; shardmath.initialize('cpu')"


def main() -> None:
    tools = Path(sys.executable).parent
    ours = [sys.executable, "-m", "shardmath", "run", "-n", str(RANKS)]
    ways = {"shardmath run": ours}
    if found := shutil.which("mpiexec", path=str(tools)):
        ways["mpiexec"] = [found, "-n", str(RANKS), sys.executable]
    if found := shutil.which("torchrun", path=str(tools)):
        ways["torchrun"] = [found, "--nproc-per-node", str(RANKS)]
    rows = []
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
    record.write("starting", rows, ranks=RANKS, goal={"first line, s": GOAL})


def started(command: list[str], then: str) -> tuple[float, float]:
    """Seconds until the slowest rank's first line, and until it was through with `then`."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(SCRIPT.format(then=then))
        script.flush()
        before = time.monotonic()
        done = subprocess.run([*command, script.name], check=True, capture_output=True, text=True)
    marks = [part.split(">")[0].split() for part in done.stderr.split("<")[1:]]
    assert len(marks) == RANKS, done.stderr
    first, ready = (max(float(mark[i]) for mark in marks) - before for i in (0, 1))
    return first, ready


if __name__ == "__main__":
    assert shardmath.__version__
    main()
