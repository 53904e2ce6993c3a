"""Matrix products on 2 ranks of one thread each, beside NumPy with 2 threads in the same run.

`python benchmarks/matmul.py [n]`, 4096 by default. A rate counts 2 n^3 operations per product. The
calls take turns; a ratio is the median over turns of NumPy's time divided by ours, so that both
had the same load. What a call on small matrices costs, `calls.py` measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from on_cores import alone, gflops, in_turn, run, speedup, together
from record import argument
from threadpoolctl import threadpool_limits

from shardmath.context.context import DistributedContext
from shardmath.distribution import BlockCyclic, Distribution, ProcessGrid, Slab
from shardmath.handles.allocation import allocate_symmetric_memory
from shardmath.linalg.advanced import Matmul

RANKS = 2
REPEATS = 7
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


def measure(context: DistributedContext, n: int) -> list[dict[str, Any]]:
    """The rows of all types, as this rank measures them."""
    return [row for dtype in DTYPES for row in products(context, n, dtype)]


def products(context: DistributedContext, n: int, dtype: str) -> list[dict[str, Any]]:
    """GFLOP/s of every case and of NumPy on rank 0, which has both cores meanwhile."""
    rng = np.random.default_rng(context.rank)
    whole = [rng.random((n, n)).astype(dtype) for _ in "ab"] if context.rank == 0 else []
    plans = {case.name: planned(context, case, n, dtype) for case in CASES}
    calls = {"NumPy": alone(context, lambda: np.matmul(*whole))}
    calls |= {name: plan.execute for name, plan in plans.items()}

    def seconds(name: str) -> float:
        with threadpool_limits(RANKS if name == "NumPy" else 1):
            return together(context, calls[name])[0]

    times = in_turn(calls, REPEATS, seconds)
    rows = []
    for name, spent in times.items():
        chosen = plans[name].explain().splitlines()[1] if name in plans else ""
        rows.append(
            {
                "case": f"{dtype} {name}",
                **gflops(2 * n**3, spent),
                "of NumPy": round(speedup(times["NumPy"], spent), 3),
                "strategy": chosen.removeprefix("chosen: "),
            }
        )
    return rows


def planned(context: DistributedContext, case: Case, n: int, dtype: str) -> Matmul:
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


if __name__ == "__main__":
    n = argument(1, 4096)
    run("matmul", measure, RANKS, n, n=n, repeats=REPEATS)
