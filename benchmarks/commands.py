"""How long `shardmath doctor` and `shardmath hello` take: `python benchmarks/commands.py`.

From the start of the command to its end; medians of several runs. `doctor` also measures the
machine.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

import record

TURNS = 7
GOALS = {"doctor": 5.0}  # seconds
COMMANDS = {"doctor": ["doctor"], "hello, 2 ranks": ["hello", "-n", "2"], "env": ["env"]}


if __name__ == "__main__":
    rows = []
    for name, arguments in COMMANDS.items():
        command = [sys.executable, "-m", "shardmath", *arguments]

        def run(command: list[str] = command) -> None:
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

        times = record.timed(run, TURNS)
        row = {"command": name, "s": statistics.median(times), "longest, s": max(times)}
        if name in GOALS:
            row |= {"goal, s": GOALS[name], "met": row["s"] <= GOALS[name]}
        rows.append(row)
    record.write("commands", rows)
