"""Factorisations on 2 ranks of one thread each, beside SciPy with 2 threads and ScaLAPACK on 2
ranks, in the same run.

`python benchmarks/factorisations.py [n]`, 4096 by default, float64. A rate counts n^3/3 operations
for Cholesky, 2/3 n^3 for LU and 2/3 n^3 + 2 n^2 m for m right-hand sides. The calls take turns. A
ratio is the median over turns of SciPy's time divided by ours, so that both had the same load.
Processor seconds of all ranks and threads are disturbed least by other work on the machine, unless
threads spin, as ScaLAPACK's ranks do; so they are compared with those of SciPy with one thread.

SciPy's matrix is in column-major order, which it need not transpose. Ours is split by rows, as
NumPy's arrays are stored, and by columns in blocks of the width that the computation uses.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import record
import scipy.linalg
from on_cores import alone, gflops, in_turn, on_ranks, speedup, together
from scalapack import Scalapack
from threadpoolctl import threadpool_limits

from shardmath.collectives import all_reduce
from shardmath.context.context import DistributedContext
from shardmath.distribution import BlockCyclic, Distribution, ProcessGrid, Slab
from shardmath.linalg import cholesky, lu_factor, solve

RANKS = 2
REPEATS = 5
RIGHT_SIDES = 64
BLOCK = 128
THREADS, ONE_THREAD, SCALAPACK = "SciPy", "SciPy, 1 thread", "ScaLAPACK"
OF_ONE = "processor s of SciPy's, 1 thread"


def split(n: int) -> dict[str, tuple[Distribution, str]]:
    """How the matrix is split, and its memory order."""
    columns = BlockCyclic(ProcessGrid(shape=(1, RANKS)), (n, BLOCK))
    return {"rows": (Slab.X, "C"), "columns": (columns, "F")}


def operations(n: int) -> dict[str, float]:
    """Operations of each factorisation."""
    lu = 2 / 3 * n**3
    return {"cholesky": n**3 / 3, "lu_factor": lu, "solve": lu + 2 * n * n * RIGHT_SIDES}


def part_of(whole: Any, distribution: Distribution, order: str, rank: int) -> Any:
    """This rank's part."""
    ranges = distribution.index_ranges(rank, whole.shape, size=RANKS)
    indices = [np.concatenate([np.arange(lo, hi) for lo, hi in axis]) for axis in ranges]
    return np.array(whole[np.ix_(*indices)], order=order)


def calls_of(
    context: DistributedContext, n: int, scalapack: Scalapack
) -> dict[str, dict[str, Callable[[], object]]]:
    """Calls by operation and case, the peers' first."""
    rng = np.random.default_rng(0)
    general = rng.standard_normal((n, n))
    positive = general @ general.T / n + np.eye(n)
    right = rng.standard_normal((n, RIGHT_SIDES))
    columns = {name: np.asfortranarray(x) for name, x in (("g", general), ("p", positive))}
    scipys: dict[str, Callable[[], object]] = {
        "cholesky": lambda: scipy.linalg.cholesky(columns["p"], lower=True),
        "lu_factor": lambda: scipy.linalg.lu_factor(columns["g"]),
        "solve": lambda: scipy.linalg.solve(columns["g"], right, assume_a="gen"),
    }
    calls = {name: dict.fromkeys((THREADS, ONE_THREAD), call) for name, call in scipys.items()}
    for name in ("cholesky", "lu_factor"):
        if not scalapack.missing:
            calls[name][SCALAPACK] = lambda name=name: scalapack.seconds(name, n)
    b = part_of(right, Slab.X, "C", context.rank)
    for name, (how, order) in split(n).items():
        g, p = (part_of(x, how, order, context.rank) for x in (general, positive))
        calls["cholesky"][name] = lambda p=p, how=how: cholesky(p, distributions=how)
        calls["lu_factor"][name] = lambda g=g, how=how: lu_factor(g, distributions=how)
        calls["solve"][name] = lambda g=g, how=how: solve(g, b, distributions=[how, Slab.X])
    return calls


def run(context: DistributedContext, n: int, scalapack: Scalapack) -> Any:
    """All rows, as this rank measures them, and facts of the peers."""
    with threadpool_limits(1):
        calls = calls_of(context, n, scalapack)
    rows = [row for name, cases in calls.items() for row in measured(context, n, name, cases)]
    return rows, scalapack.facts


def measured(
    context: DistributedContext, n: int, operation: str, cases: dict[str, Callable[[], object]]
) -> list[dict[str, Any]]:
    """GFLOP/s of every case of an operation; peers are rank 0's, and have both cores meanwhile."""

    def spent_on(name: str) -> tuple[float, float]:
        """Seconds from when all ranks begin until all are done, and those of processors."""
        is_peer, results = name in (THREADS, ONE_THREAD, SCALAPACK), list[Any]()

        def call() -> None:
            results.append(cases[name]())

        with threadpool_limits(RANKS if name == THREADS else 1):
            taken, used = together(context, alone(context, call) if is_peer else call)
        if name == SCALAPACK:  # in processes of its own, which say what it took
            own = sum(results, 0.0)  # on rank 0; the others have none
            taken, used = float(all_reduce(np.array([own]))[0]), own * RANKS
        return taken, float(all_reduce(np.array([used]))[0])

    found = in_turn(cases, REPEATS, spent_on)
    wall, busy = ({name: [pair[i] for pair in found[name]] for name in cases} for i in (0, 1))
    rows = []
    for name, spent in wall.items():
        rows.append(
            {
                "case": f"{operation} {name}",
                **gflops(operations(n)[operation], spent),
                "of SciPy": round(speedup(wall[THREADS], spent), 3),
                "best of SciPy": round(min(wall[THREADS]) / min(spent), 3),
                **of_scalapack(wall, spent),
                "processor s": round(statistics.median(busy[name]), 3),
                "least processor s": round(min(busy[name]), 3),
                OF_ONE: round(speedup(busy[name], busy[ONE_THREAD]), 3),
            }
        )
    return rows


def of_scalapack(wall: dict[str, list[float]], spent: list[float]) -> dict[str, float]:
    """ScaLAPACK's time divided by that of a case, where there is one: the median, and the best."""
    if SCALAPACK not in wall:
        return {}
    return {
        "of ScaLAPACK": round(speedup(wall[SCALAPACK], spent), 3),
        "best of ScaLAPACK": round(min(wall[SCALAPACK]) / min(spent), 3),
    }


if __name__ == "__main__":
    n = record.argument(1, 4096)
    with tempfile.TemporaryDirectory() as folder:
        rows, peers = on_ranks(run, RANKS, n, Scalapack(folder, RANKS))
    facts = {"n": n, "ranks": RANKS, "repeats": REPEATS, "right-hand sides": RIGHT_SIDES}
    facts |= peers
    facts["load average"] = os.getloadavg()[1]  # over 5 minutes; about 2 of it are ours
    record.write("factorisations", rows, **facts)
