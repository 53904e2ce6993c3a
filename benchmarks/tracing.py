"""What tracing adds to a program: `python benchmarks/tracing.py`.

One program on 2 ranks by `shardmath run` and by `shardmath trace`, which take turns, so that what
else the machine does falls on both: calls of few elements, in which recording weighs most, and
products. Seconds are those of its loops, of the slower rank; "job" those from the start of the
launcher to its end, in which a trace and its picture are written.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import record

RANKS, TURNS = 2, 21
GOAL = 1.05  # times as long
PROGRAM = """
import time
import numpy as np
import shardmath
from shardmath.collectives import all_reduce
from shardmath.distribution import Slab
from shardmath.linalg.advanced import matmul

context = shardmath.initialize("cpu")
x, out = np.ones(256, "f4"), np.ones(256, "f4")
a = np.ones(Slab.X.shape(context.rank, (512, 512)), "f4")

def small():
    for _ in range(2_000):
        all_reduce(x, out=out)

def product():
    for _ in range(50):
        matmul(a, a, distributions=[Slab.X] * 3)

for call in (small, product):
    call()
    context.barrier()
    start = time.perf_counter()
    call()
    seconds = float(all_reduce(np.float64(time.perf_counter() - start), op="max"))
    if context.rank == 0:
        print(f"<{call.__name__} {seconds}>")
shardmath.finalize()
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        script, output = Path(folder, "program.py"), Path(folder, "trace.json")
        script.write_text(PROGRAM)
        ways = {"run": [], "trace": ["-o", str(output)]}
        times: dict[str, dict[str, list[float]]] = {way: {} for way in ways}
        for _ in range(TURNS):
            for way, options in ways.items():
                for what, seconds in timed(way, options, script).items():
                    times[way].setdefault(what, []).append(seconds)
    rows = []
    for what in times["run"]:
        least = {way: statistics.quantiles(times[way][what], n=10)[0] for way in ways}
        medians = {way: statistics.median(times[way][what]) for way in ways}
        rows.append(
            {
                "what": what,
                "run, s": medians["run"],
                "trace, s": medians["trace"],
                "ratio": medians["trace"] / medians["run"],
                "ratio, undisturbed": least["trace"] / least["run"],
            }
        )
        print(*(f"{name} {x}" if isinstance(x, str) else f"{name} {x:.3f}"
                for name, x in rows[-1].items()), sep=", ")  # fmt: skip
    print(record.write("tracing", rows, ranks=RANKS, goal={"ratio": GOAL}))


def timed(way: str, options: list[str], script: Path) -> dict[str, float]:
    """Seconds of the program's loops, and of the whole job."""
    command = [sys.executable, "-m", "shardmath", way, "-n", str(RANKS), *options, str(script)]
    start = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    job = time.perf_counter() - start
    found = re.findall(r"<(\w+) ([\d.e-]+)>", done.stdout)
    return {**{name: float(seconds) for name, seconds in found}, "job": job}


if __name__ == "__main__":
    main()
