"""The cost of distributed arrays over the same calls on parts: `benchmarks/arrays.py [PYTHON]`.

2 ranks on cores, 64 x 64 float64. The two ways of a row take turns, so that other load on the
machine affects both. Figures are of the slower rank: the median, and the minimum, which is the time
of a call when nothing else wants the cores. A step of `examples/navier_stokes.py` is 4 times 9
transforms of 64^3 points; its time is the difference of a long run and a short one, divided by the
steps between. mpi4py-fft and Dask, from the environment of the interpreter PYTHON (by default this
one), take turns with it: `navier_stokes_peers.py`. Rows say which of them are missing.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import record
from on_cores import in_turn, on_ranks, row_of_calls, slowest_us

import shardmath
from shardmath.collectives import all_reduce
from shardmath.distribution import Slab
from shardmath.launch import spawn
from shardmath.linalg.advanced import matmul

RANKS, TURNS, CALLS = 2, 39, 50
POINTS, SHORT, LONG, RUNS = 64, 1, 4, 3
GOALS = {"x + y": 5.0, "np.sin(x)": 5.0, "x @ y": 3.0, "x.sum(axis=0)": 10.0}  # microseconds more


def measure(context: Any) -> list[dict[str, Any]]:
    """A row for each pair of ways."""
    calls = {(what, way): call for what, pair in ways().items() for way, call in enumerate(pair)}
    times = in_turn(calls, TURNS, lambda way: row_of_calls(context, calls[way], CALLS))
    found = slowest_us(times, 50, 0)
    rows = []
    for what, goal in GOALS.items():
        (us, least), (us_of_parts, least_of_parts) = found[what, 0], found[what, 1]
        row = {"what": what, "us": us, "us_of_parts": us_of_parts, "us_undisturbed": least}
        rows.append({**row, "more_us": least - least_of_parts, "goal": goal})
    return rows


def ways() -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Each call on arrays, and what it is measured by, on their parts."""
    x, y = (shardmath.random((64, 64), seed=seed, distribution=Slab.X) for seed in (1, 2))
    splits = [Slab.X] * 3
    return {
        "x + y": (lambda: x + y, lambda: x.local + y.local),
        "np.sin(x)": (lambda: np.sin(x), lambda: np.sin(x.local)),
        "x @ y": (lambda: x @ y, lambda: matmul(x.local, y.local, distributions=splits)),
        "x.sum(axis=0)": (lambda: x.sum(axis=0), lambda: all_reduce(x.local.sum(axis=0))),
    }


def navier_stokes(python: str) -> list[dict[str, Any]]:
    """A row for a step of the example, and one for each peer that `python` has."""
    beside = Path(python).parent / "mpiexec"
    program = str(Path(__file__).with_name("navier_stokes_peers.py"))
    commands = {
        "mpi4py-fft": [str(beside), "-n", str(RANKS), python, program, "mpi4py-fft"],
        "dask": [python, program, "dask"],
    }
    times: dict[str, list[tuple[float, float]]] = {"shardmath": [], "mpi4py-fft": [], "dask": []}
    energies, missing = [], {}
    for _ in range(RUNS):
        ranks = spawn(step, RANKS, timeout=300)
        times["shardmath"].append((ranks[0][0], sum(rank[1] for rank in ranks)))
        energies.append(ranks[0][2])
        for peer, command in commands.items():
            try:
                words = [*command, str(POINTS), str(LONG)]
                ran = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
                measured = json.loads(ran.stdout)
            except (OSError, subprocess.SubprocessError) as error:
                missing[peer] = record.reason(error)
                continue
            times[peer].append((measured["seconds"], measured["cpu"]))
            energies.append(measured["energy"])
    assert max(energies) - min(energies) < 1e-8, energies  # all have computed the same
    rows = []
    for who, spent in times.items():
        row: dict[str, Any] = {"what": "Navier-Stokes step", "n": POINTS, "by": who}
        if spent:
            least = [1e3 * min(column) for column in zip(*spent, strict=True)]
            row |= {"ms": least[0], "processor_ms": least[1]}
        else:
            row["missing"] = missing[who]
        rows.append(row)
    return rows


def step() -> tuple[float, float, float]:
    """Seconds of a step of the example, this rank's processor's, and the energy after the last."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import navier_stokes

    printed = io.StringIO()

    def run(steps: int) -> Any:
        start = np.array([time.perf_counter(), time.process_time()])
        with contextlib.redirect_stdout(printed):
            navier_stokes.main(POINTS, steps)
        return np.array([time.perf_counter(), time.process_time()]) - start

    run(SHORT)
    short = run(SHORT)
    seconds, cpu = (run(LONG) - short) / (LONG - SHORT)
    energies = re.findall(r"energy ([0-9.]+)", printed.getvalue())  # rank 0 prints them
    return float(seconds), float(cpu), float(energies[-1]) if energies else 0.0


if __name__ == "__main__":
    rows = on_ranks(measure, RANKS, timeout=300)
    rows += navier_stokes(record.argument(1, sys.executable))
    record.write("arrays", rows, ranks=RANKS, goals=GOALS)
