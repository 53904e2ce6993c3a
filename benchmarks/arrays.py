"""What arrays that know how they are split cost beside their parts: `benchmarks/arrays.py`.

2 ranks on cores, 64 x 64 float64. The two ways of a row take turns, so that what else the machine
does falls on both. Figures are of the slower rank: the median, and the least, which says what a
call takes where nobody else wants the cores. A step of `examples/navier_stokes.py` is 4 times 9
transforms of 64^3 points; it is timed as the difference of a long run and a short one, over the
steps between.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import record

import shardmath
from shardmath.collectives import all_reduce
from shardmath.distribution import Slab
from shardmath.launch import spawn
from shardmath.linalg.advanced import matmul

RANKS, TURNS, CALLS = 2, 40, 50
POINTS, SHORT, LONG, RUNS = 64, 1, 4, 3
GOALS = {"x + y": 5.0, "np.sin(x)": 5.0, "x @ y": 3.0, "x.sum(axis=0)": 10.0}  # microseconds more


def main() -> None:
    rows = spawn(measure, RANKS, timeout=300)[0]
    for row in rows:
        print(f"{row['what']:16} {row['us']:8.1f} us, on parts {row['us_of_parts']:8.1f}; "
              f"undisturbed {row['more_us']:+6.1f}   goal {GOALS[row['what']]}")  # fmt: skip
    seconds = [spawn(step, RANKS, timeout=300)[0] for _ in range(RUNS)]
    rows.append({"what": "Navier-Stokes step", "n": POINTS, "ms": 1e3 * min(seconds)})
    print(f"Navier-Stokes step, {POINTS}^3: {rows[-1]['ms']:.0f} ms")
    print(record.write("arrays", rows, ranks=RANKS, goals=GOALS))


def measure() -> list[dict[str, Any]]:
    """A row for each pair of ways."""
    context = shardmath.initialize("cpu")
    pairs = ways()
    times: dict[str, tuple[list[float], list[float]]] = {what: ([], []) for what in pairs}
    for turn in range(TURNS):
        for what, pair in pairs.items():
            for call, spent in zip(pair, times[what], strict=True):
                context.barrier()
                taken = record.timed(call, CALLS)
                spent.extend(taken if turn else [])
    own = np.percentile(list(times.values()), [50, 0], axis=2)  # of rows and ways
    (medians, least) = 1e6 * all_reduce(own, op="max")
    shardmath.finalize()
    return [
        {"what": what, "us": float(one[0]), "us_of_parts": float(one[1]),
         "us_undisturbed": float(low[0]), "more_us": float(low[0] - low[1])}
        for what, one, low in zip(pairs, medians, least, strict=True)
    ]  # fmt: skip


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


def step() -> float:
    """Seconds of a step of the example."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import navier_stokes

    def run(steps: int) -> float:
        start = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            navier_stokes.main(POINTS, steps)
        return time.perf_counter() - start

    run(SHORT)
    short = run(SHORT)
    return (run(LONG) - short) / (LONG - SHORT)


if __name__ == "__main__":
    main()
