"""Saving and loading an array as .npy, beside one process with NumPy on the same disk.

`python benchmarks/array_files.py [MiB of the global array] [folder]`. The ways take turns in one
run, a time is the slowest rank's, and the table shows medians. `save` waits until the file is on
the disk and keeps the old file until then, which numpy.save does not do. So there are baselines
that wait, and that wait and rename. Everything is read from the page cache.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from on_cores import alone, run, together
from record import argument

import shardmath
from shardmath.distribution import Slab

RANKS, REPEATS, GOAL = 2, 5, 0.8
SPLITS = {"slab X": Slab.X, "slab Y": Slab.Y}


def measure(context: Any, folder: str, mib: int) -> list[dict[str, Any]]:
    """A row for each split and way, as all ranks measure them."""
    n = int((mib * 2**20 / 8) ** 0.5)
    whole = np.ones((n, n)) if context.rank == 0 else None
    numpys, ours = f"{folder}/numpy.npy", f"{folder}/ours.npy"
    rows = []
    for case, split in SPLITS.items():
        x = shardmath.ones((n, n), distribution=split)
        ways: dict[str, Callable[[], object]] = {
            "save": lambda x=x: shardmath.save(ours, x),
            "numpy save": alone(context, lambda: np.save(numpys, whole)),
            "numpy save, synced": alone(context, lambda: synced(numpys, whole)),
            "numpy save, synced, renamed": alone(context, lambda: renamed(numpys, whole)),
            "load": lambda split=split: shardmath.load(ours, distribution=split),
            "numpy load": alone(context, lambda: np.load(numpys)),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        ways["save"]()
        ways["numpy save"]()
        for repeat in range(REPEATS):
            # The previous way may have left memory that is quicker to reuse, so no way always
            # follows the same one.
            for name in random.Random(repeat).sample(list(ways), len(ways)):
                os.sync()
                times[name].append(together(context, ways[name])[0])
        for name in ("save", "load"):
            for baseline in (way for way in ways if way.startswith(f"numpy {name}")):
                own, other = (statistics.median(times[way]) for way in (name, baseline))
                gib = x.size * 8 / 2**30
                rows.append({"case": case, "operation": f"{name}, beside {baseline}",
                             "gib_per_s": gib / own, "numpy_gib_per_s": gib / other,
                             "ratio": other / own})  # fmt: skip
    return rows


def synced(path: str, whole: Any) -> None:
    np.save(path, whole)
    with Path(path).open("rb") as file:
        os.fsync(file.fileno())


def renamed(path: str, whole: Any) -> None:
    synced(path + ".npy", whole)
    Path(path + ".npy").replace(path)


if __name__ == "__main__":
    mib = argument(1, 1024)
    with tempfile.TemporaryDirectory(dir=argument(2, ".")) as folder:
        goal = {"save and load over NumPy's speed": GOAL}
        run("array_files", measure, RANKS, folder, mib, timeout=900, mib=mib, goals=goal)
