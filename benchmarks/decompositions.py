"""QR and singular values beside SciPy, NumPy, ScaLAPACK and Dask, in one run:

    python benchmarks/decompositions.py [python]

2 ranks of 1 thread beside one process with 2 threads: of BLAS for SciPy and NumPy, of its own for
Dask. ScaLAPACK also has 2 ranks of 1 thread, and is left out if it is not installed.
`python` names an interpreter that has Dask, by default this one; without Dask its rows are left
out. Systems follow one another. Figures are minima of all calls: seconds, and processor seconds of
all ranks, which also tell the cost on a busy machine. All start from a float64 matrix in memory and
end with factors there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

import record
from on_cores import on_ranks, together
from scalapack import Scalapack

import shardmath
from shardmath.collectives import all_reduce
from shardmath.distribution import Slab
from shardmath.linalg import norm, qr, svd_lowrank

RANKS, CALLS = 2, 2
CASES = {
    "QR": {"shape": (4096, 4096), "peers": ["scipy", "scalapack"],
           "goals": {"scipy": 0.85, "scalapack": 1.2}},
    "tall QR": {"shape": (1_000_000, 64), "peers": ["numpy", "dask"],
                "goals": {"numpy": 1.0, "dask": 1.0}},
    "svd_lowrank": {"shape": (20_000, 2000), "peers": ["numpy", "dask"],
                    "goals": {"numpy": 1.0, "dask": 1.0}},
}  # fmt: skip
RANK, OVERSAMPLING, ITERATIONS = 20, 10, 2
PEER = """
import sys, time, numpy as np
case, peer, m, n, rank, oversampling, iterations, calls = sys.argv[1:3] + [*map(int, sys.argv[3:])]
x = np.random.default_rng(0).standard_normal((m, n))
if peer == "scipy":
    from scipy.linalg import qr
    call = lambda: qr(x, mode="economic")
elif peer == "numpy":
    call = lambda: np.linalg.qr(x) if "QR" in case else np.linalg.svd(x, full_matrices=False)
else:
    import dask, dask.array as da
    dask.config.set(scheduler="threads", num_workers=2)
    if "QR" in case:
        y = da.from_array(x, chunks=(m // 16, n))
        call = lambda: dask.compute(*da.linalg.qr(y))
    else:
        y = da.from_array(x, chunks=(m // 4, n))
        words = {"n_power_iter": iterations, "n_oversamples": oversampling, "seed": 0}
        call = lambda: dask.compute(*da.linalg.svd_compressed(y, rank, **words))
for _ in range(calls):
    start, begun = time.perf_counter(), time.process_time()
    call()
    print([time.perf_counter() - start, time.process_time() - begun])
"""


def compare(folder: str) -> None:
    """Measure, print a table, write results/decompositions.json."""
    dask = record.argument(1, sys.executable)
    has_dask = subprocess.run([dask, "-c", "import dask.array"], capture_output=True, check=False)
    scalapack = Scalapack(folder, RANKS)
    seconds: dict[tuple[str, str], list[list[float]]] = {}
    for what, case in CASES.items():
        shape = case["shape"]
        seconds[what, "shardmath"] = on_ranks(measure, RANKS, what, shape, timeout=900)
        for peer in case["peers"]:
            if peer == "scalapack":
                if not scalapack.missing:
                    took = scalapack.seconds("qr", shape[0])
                    seconds[what, peer] = [[took, took * RANKS]]
            elif peer != "dask" or not has_dask.returncode:
                python = dask if peer == "dask" else sys.executable
                seconds[what, peer] = of_peer(python, what, peer, shape)
    rows = []
    for what, case in CASES.items():
        own, busy = min(seconds[what, "shardmath"])
        row: dict[str, Any] = {"what": what, "shape": case["shape"]}
        row |= {"seconds": own, "cpu_seconds": busy}
        for peer in case["peers"]:
            if (what, peer) in seconds:
                (other, worked), goal = min(seconds[what, peer]), case["goals"][peer]
                row |= {f"seconds_{peer}": other, f"cpu_seconds_{peer}": worked}
                row |= {f"x_{peer}": other / own, f"goal_{peer}": goal}
        rows.append(row)
    every = {f"{what}, {way}": taken for (what, way), taken in seconds.items()}
    load = os.getloadavg()[0]
    facts = {"ranks": RANKS, "rank": RANK, "load": load, "turns": every, **scalapack.facts}
    record.write("decompositions", rows, **facts)


SLOW = {("QR", "scipy"), ("svd_lowrank", "numpy")}  # called once


def measure(context: Any, what: str, shape: tuple[int, int]) -> list[list[float]]:
    """Seconds of calls of ours, of the slower rank each, and those of both ranks' processors."""
    x = shardmath.standard_normal(shape, seed=0, distribution=Slab.X)
    results: list[Any] = []

    def call() -> None:
        is_low = what == "svd_lowrank"
        results[:] = svd_lowrank(x, RANK, OVERSAMPLING, ITERATIONS) if is_low else qr(x)

    spent = [together(context, call) for _ in range(CALLS)]
    if what != "svd_lowrank":
        q, r = results
        assert float(norm(q @ r - x) / norm(x)) < 1e-13
    return [[taken, float(all_reduce(worked))] for taken, worked in spent]


def of_peer(python: str, what: str, peer: str, shape: tuple[int, int]) -> list[list[float]]:
    """Seconds of calls of a peer's, in a process of its own."""
    threads = "1" if peer == "dask" else str(RANKS)
    calls = 1 if (what, peer) in SLOW else CALLS
    numbers = map(str, (*shape, RANK, OVERSAMPLING, ITERATIONS, calls))
    command = [python, "-c", PEER, what, peer, *numbers]
    variables = {**os.environ, "OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}
    variables.pop("PYTHONPATH", None)
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=variables)
    return [json.loads(line) for line in done.stdout.splitlines()]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        compare(folder)
