"""Matrix products on 2 ranks of one thread each, beside NumPy with 2 threads in the same run.

`python benchmarks/matmul.py [n]`, 4096 by default. A rate counts 2 n^3 operations per product. The
calls take turns; a ratio is the median over turns of NumPy's time divided by ours, so that both
had the same load. Below it, what a call costs when the product itself costs nothing: the median,
and the first decile, which other work on the machine disturbs less.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import record
from threadpoolctl import threadpool_limits

from shardmath.context import startup
from shardmath.context.context import Context
from shardmath.distribution import BlockCyclic, Distribution, ProcessGrid, Slab
from shardmath.handles.allocation import allocate_symmetric_memory
from shardmath.launch import spawn
from shardmath.linalg.advanced import Matmul, matmul

RANKS = 2
REPEATS = 7
SMALL_REPEATS = 3000
GRID = BlockCyclic(ProcessGrid(shape=(RANKS, 1)), (256, 256))


@dataclass(frozen=True)
class Case:
    """How a, b and the result are distributed, and whether a and b are on the heap."""

    name: str
    distributions: tuple[Distribution, Distribution, Distribution]
    heap: bool = True


CASES = (
    Case("X X X, heap", (Slab.X, Slab.X, Slab.X)),
    Case("X X X, ordinary", (Slab.X, Slab.X, Slab.X), heap=False),
    Case("Y X X, heap", (Slab.Y, Slab.X, Slab.X)),
    Case("2-D cyclic 256, heap", (GRID, GRID, GRID)),
)
DTYPES = ("float64", "float32")


def run(n: int) -> dict[str, list[dict[str, Any]]]:
    """All rows, as this rank measures them."""
    context = startup.initialize("cpu")
    large = [row for dtype in DTYPES for row in large_products(context, n, dtype)]
    small = small_products(context)
    startup.finalize()
    return {"large": large, "small": small}


def large_products(context: Context, n: int, dtype: str) -> list[dict[str, Any]]:
    """GFLOP/s of every case and of NumPy on rank 0, which has both cores meanwhile."""
    rng = np.random.default_rng(context.rank)
    whole = [rng.random((n, n)).astype(dtype) for _ in "abc"] if context.rank == 0 else []
    plans = {case.name: planned(context, case, n, dtype) for case in CASES}
    times: dict[str, list[float]] = {"NumPy": [], **{name: [] for name in plans}}
    for turn in range(REPEATS + 1):
        for name, spent in times.items():
            with threadpool_limits(RANKS if name == "NumPy" else 1):
                context.barrier()
                start = time.perf_counter()
                if name != "NumPy":
                    plans[name].execute()
                elif whole:
                    np.matmul(*whole)
                context.barrier()
                if turn:  # the first touches pages, and peers' pages
                    spent.append(time.perf_counter() - start)
    rows = []
    for name, spent in times.items():
        pairs = zip(times["NumPy"], spent, strict=True)
        chosen = plans[name].explain().splitlines()[1] if name in plans else ""
        rows.append(
            {
                "case": f"{dtype} {name}",
                "GFLOP/s": round(2 * n**3 / statistics.median(spent) / 1e9, 1),
                "best GFLOP/s": round(2 * n**3 / min(spent) / 1e9, 1),
                "of NumPy": round(statistics.median(base / own for base, own in pairs), 3),
                "strategy": chosen.removeprefix("chosen: "),
            }
        )
    return rows


def planned(context: Context, case: Case, n: int, dtype: str) -> Matmul:
    """A plan on random operands."""
    rng = np.random.default_rng(context.rank)
    operands = []
    for distribution in case.distributions[:2]:
        shape = distribution.shape(context.rank, (n, n))
        array = np.empty(shape, dtype)
        if case.heap:
            array = allocate_symmetric_memory(shape, np, dtype=dtype, skip_symmetric_check=True)
        array[...] = rng.random(shape)
        operands.append(array)
    plan = Matmul(*operands, distributions=case.distributions)
    plan.plan()
    return plan


def small_products(context: Context) -> list[dict[str, Any]]:
    """Microseconds of agreement, and of whole calls, on 8 x 8 matrices."""
    distributions = [Slab.X, Slab.X, Slab.X]
    a, b, whole = np.ones((4, 8)), np.ones((4, 8)), np.ones((8, 8))
    plan = Matmul(a, b, distributions=distributions)
    plan.plan()
    calls: dict[str, Callable[[], object]] = {
        "exchange of 16 bytes": lambda: context.board.exchange("bench", b"0123456789abcdef"),
        "matmul": lambda: matmul(a, b, distributions=distributions),
        "Matmul.execute": plan.execute,
        "np.matmul on one rank": lambda: np.matmul(whole, whole),
    }
    rows = []
    with threadpool_limits(1):
        for name, call in calls.items():
            context.barrier()
            spent = []
            for _ in range(SMALL_REPEATS):
                start = time.perf_counter()
                call()
                spent.append((time.perf_counter() - start) * 1e6)
            tenth = statistics.quantiles(spent, n=10)[0]
            median = statistics.median(spent)
            rows.append({"case": name, "us": round(median, 1), "tenth us": round(tenth, 1)})
    return rows


def main() -> None:
    """Measure, print tables, write results/matmul.json."""
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 4096
    rows = spawn(run, RANKS, n)[0]
    print(f"{n} x {n} x {n} on {RANKS} ranks of one thread; NumPy has {RANKS} threads")
    for row in rows["large"]:
        print(f"{row['case']:32}{row['GFLOP/s']:10} GFLOP/s {row['of NumPy']:8.3f} of NumPy")
    for row in rows["small"]:
        print(f"{row['case']:32}{row['us']:10} us, {row['tenth us']} us in the fastest tenth")
    facts = {"n": n, "ranks": RANKS, "repeats": REPEATS}
    path = record.write("matmul", rows["large"] + rows["small"], **facts)
    print(f"written: {path.relative_to(path.parent.parent.parent)}")


if __name__ == "__main__":
    main()
