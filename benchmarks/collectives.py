"""all_reduce beside gloo: `python benchmarks/collectives.py`.

Every row is measured in one run in which the systems take turns, so that other load on the machine
affects all of them. A time is the slowest rank's, for a call that all ranks enter together; the
table shows medians.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
from on_cores import gloo, in_turn, row_of_calls, run

from shardmath.collectives import all_reduce

SIZES = (2 << 10, 64 << 10, 1 << 20, 32 << 20)
GOALS = {"all_reduce 32 MB over gloo": 20.0}


def reductions(context: Any, address: str, repeats: int) -> list[dict[str, Any]]:
    """A row for each size: the median milliseconds of each way to reduce it."""
    import torch

    rows = []
    with gloo(context, address) as dist:
        for nbytes in SIZES:
            plain, into = np.zeros(nbytes // 4, "float32"), np.zeros(nbytes // 4, "float32")
            heap = np.asarray(context.heap.allocate(nbytes)).view("float32")
            heap[:] = 0
            tensor = torch.zeros(nbytes // 4)
            ways = {
                "gloo": lambda x=tensor: dist.all_reduce(x),
                "ordinary": lambda x=plain, y=into: all_reduce(x, out=y),
                "ordinary in place": lambda x=plain: all_reduce(x, out=x),
                "heap in place": lambda x=heap: all_reduce(x, out=x),
            }
            ms = slowest(context, ways, repeats if nbytes > 1 << 20 else 5 * repeats)
            ratios = {way: ms["gloo"] / ms[way] for way in ways if way != "gloo"}
            rows.append({"operation": "all_reduce", "bytes": nbytes, "ms": ms, "over gloo": ratios})
    return rows


def slowest(context: Any, ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The median over repeats of the slowest rank's milliseconds."""
    times = in_turn(ways, repeats, lambda way: row_of_calls(context, ways[way], 1)[0])
    worst = all_reduce(np.array([*times.values()]), op="max")
    return {
        name: 1e3 * statistics.median(row.tolist()) for name, row in zip(ways, worst, strict=True)
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=21)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        address = f"file://{folder}/store"
        given = options.ranks, address, options.repeats
        run("collectives", reductions, *given, timeout=500, goals=GOALS)
