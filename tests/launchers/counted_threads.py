"""A small program that any launcher can start: it prints how many threads its rank has."""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
from threadpoolctl import threadpool_info

import shardmath
from shardmath.base.workers import Workers
from shardmath.collectives import all_gather
from shardmath.context.context import require_context
from shardmath.distribution import Slab
from shardmath.fft import fft


def torch_library() -> Any:
    """What counts torch's threads: torch where it is loaded or torchrun's ranks load it anyway.

    Elsewhere its compiled part alone, loaded in a fifth of the time. No `torch` remains in
    sys.modules, since it would have no Tensor.
    """
    if "torch" in sys.modules or "TORCHELASTIC_RUN_ID" in os.environ:
        return importlib.import_module("torch")
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations is not None
    package = sys.modules["torch"] = ModuleType("torch")
    package.__path__ = [folder] = list(spec.submodule_search_locations)
    ctypes.CDLL(f"{folder}/lib/libtorch_global_deps.so", ctypes.RTLD_GLOBAL)
    compiled = importlib.import_module("torch._C")
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        del sys.modules[name]
    return compiled


def loaded(torch: Any) -> list[int]:
    """The threads of each library of BLAS and OpenMP, and torch's."""
    found = {library["filepath"]: library["num_threads"] for library in threadpool_info()}
    return [*(found[path] for path in sorted(found)), torch.get_num_threads()]


def workers() -> int:
    """How many threads share the blocks of a transform."""
    counted, run = [1], Workers.run

    def counting(self: Workers, functions: Any) -> None:
        given = [*functions]
        counted.append(len(given))
        run(self, given)

    with patch.object(Workers, "run", counting):
        fft(np.ones((256, 1024), complex), distribution=Slab.X)
    return max(counted)


def share() -> int:
    """The cores that this rank may use, divided by the ranks that may use some of them."""
    mine = np.zeros((1, os.cpu_count() or 1), bool)
    mine[0, list(os.sched_getaffinity(0))] = True
    return max(1, int(mine.sum()) // int((all_gather(mine) & mine).any(axis=1).sum()))


def report() -> list[Any]:
    """(rank; threads before, within, of transforms, of those in a part, after; its share)."""
    torch = torch_library()
    before = loaded(torch)
    context = shardmath.initialize("cpu")
    within, whole, expected = loaded(torch), workers(), share()
    rank = context.rank
    part = require_context().split(rank)
    assert part is not None
    with part:
        alone = workers()
    shardmath.finalize()
    return [rank, before, within, whole, alone, loaded(torch), expected]


if __name__ == "__main__":
    gc.disable()  # which the import of torch would begin hundreds of times
    sys.stdout.write(f"{report()}\n")
