"""all_reduce beside gloo, and what waiting and agreeing cost: `python benchmarks/collectives.py`.

Every row is measured in one run, the systems by turns, so that what else the machine does falls on
all of them. A time is the slowest rank's, of a call that all ranks enter together; shown are
medians.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import record
from calls import agreement

import shardmath
from shardmath.collectives import all_reduce
from shardmath.context.startup import finalize, initialize
from shardmath.launch import spawn

SIZES = (2 << 10, 64 << 10, 1 << 20, 32 << 20)
GOALS = {"all_reduce 32 MB over gloo": 20.0, "barrier of 2 ranks, us": 30.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=21)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        rows = spawn(reductions, options.ranks, store, options.repeats, timeout=500)[0]
    waits = spawn(waiting, 2, timeout=60)[0] + spawn(waiting, options.ranks, timeout=60)[0]
    show(rows, waits)
    print(record.write("collectives", [*rows, *waits], ranks=options.ranks, goals=GOALS))


def reductions(store: str, repeats: int) -> list[dict[str, Any]]:
    """A row for each size: the median milliseconds of each way to reduce it."""
    import torch
    import torch.distributed as gloo

    context = initialize("cpu")
    torch.set_num_threads(1)
    gloo.init_process_group(
        "gloo", init_method=f"file://{store}", rank=context.rank, world_size=context.size
    )
    rows = []
    for nbytes in SIZES:
        plain, into = np.zeros(nbytes // 4, "float32"), np.zeros(nbytes // 4, "float32")
        heap = np.asarray(context.heap.allocate(nbytes)).view("float32")
        heap[:] = 0
        tensor = torch.zeros(nbytes // 4)
        ways = {
            "gloo": lambda x=tensor: gloo.all_reduce(x),
            "ordinary": lambda x=plain, y=into: all_reduce(x, out=y),
            "ordinary in place": lambda x=plain: all_reduce(x, out=x),
            "heap in place": lambda x=heap: all_reduce(x, out=x),
        }
        medians = slowest(ways, repeats if nbytes > 1 << 20 else 5 * repeats)
        ratios = {way: medians["gloo"] / medians[way] for way in ways if way != "gloo"}
        rows.append(
            {"operation": "all_reduce", "bytes": nbytes, "ms": medians, "over gloo": ratios}
        )
    gloo.barrier()
    gloo.destroy_process_group()
    finalize()
    return rows


def slowest(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The median over repeats of the slowest rank's milliseconds, the ways by turns."""
    context = shardmath.context.context.require_context()
    times = np.zeros((len(ways), repeats + 2))
    for turn in range(times.shape[1]):
        for way, call in enumerate(ways.values()):
            context.barrier()
            start = time.perf_counter()
            call()
            times[way, turn] = time.perf_counter() - start
    worst = all_reduce(times, op="max")[:, 2:]  # two turns to warm up
    return {
        name: 1e3 * statistics.median(row.tolist()) for name, row in zip(ways, worst, strict=True)
    }


def waiting() -> list[dict[str, Any]]:
    """Median microseconds of what every call consists of."""
    context = initialize("cpu")
    spec = ("numpy", "float32", (1024, 1024), "sum")
    ways = {
        "barrier": lambda: context.board.barrier("barrier"),
        "exchange of 16 bytes": lambda: context.board.exchange("exchange", bytes(16)),
        "agreement on a known plan": agreement(context, spec),
    }
    rows = []
    for name, call in ways.items():
        call()
        seconds = record.median_seconds(call, repeats=2000)
        rows.append({"operation": name, "ranks": context.size, "us": 1e6 * seconds})
    finalize()
    return rows


def show(rows: list[dict[str, Any]], waits: list[dict[str, Any]]) -> None:
    print(f"{'all_reduce, ms':>16}" + "".join(f"{name:>26}" for name in rows[0]["ms"]))
    for row in rows:
        cells = []
        for name, ms in row["ms"].items():
            ratio = row["over gloo"].get(name)
            cells.append(f"{ms:.3f}" + (f" ({ratio:.1f} x)" if ratio else ""))
        print(f"{row['bytes'] >> 10:>13} KB" + "".join(f"{cell:>26}" for cell in cells))
    for row in waits:
        print(f"{row['operation']}, {row['ranks']} ranks: {row['us']:.1f} us")


if __name__ == "__main__":
    main()
