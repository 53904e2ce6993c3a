"""A small program that any launcher can start: it prints how many threads its rank has."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_info

import shardmath
from shardmath.collectives import all_gather
from shardmath.context.context import require_context
from shardmath.distribution import Slab
from shardmath.fft import fft
from shardmath.program import cores_blocks


def loaded() -> list[int]:
    """The threads of each library of BLAS and OpenMP, and torch's."""
    found = {library["filepath"]: library["num_threads"] for library in threadpool_info()}
    return [*(found[path] for path in sorted(found)), torch.get_num_threads()]


def workers() -> int:
    """How many threads share the blocks of a transform."""
    counted = [1]

    class Pool(cores_blocks.ThreadPoolExecutor):
        def map(self, perform: Any, parts: Any) -> Any:
            counted.append(len(parts))
            return super().map(perform, parts)

    given, cores_blocks.ThreadPoolExecutor = cores_blocks.ThreadPoolExecutor, Pool  # type: ignore[misc]
    fft(np.ones((256, 1024), complex), distribution=Slab.X)
    cores_blocks.ThreadPoolExecutor = given  # type: ignore[misc]
    return max(counted)


def share() -> int:
    """The cores that this rank may use, divided by the ranks that may use some of them."""
    mine = np.zeros((1, os.cpu_count() or 1), bool)
    mine[0, list(os.sched_getaffinity(0))] = True
    return max(1, int(mine.sum()) // int((all_gather(mine) & mine).any(axis=1).sum()))


def report() -> list[Any]:
    """(threads before, within, of transforms, of those in a part, after; this rank's share)."""
    before = loaded()
    context = shardmath.initialize("cpu")
    within, whole, expected = loaded(), workers(), share()
    part = require_context().split(context.rank)
    assert part is not None
    with part:
        alone = workers()
    shardmath.finalize()
    return [before, within, whole, alone, loaded(), expected]


if __name__ == "__main__":
    sys.stdout.write(f"{report()}\n")
