"""What a call on small arrays costs on cores: `python benchmarks/calls.py`.

2 ranks, arrays of 1 KiB or of 64 x 64, repeated calls. Figures are of the slower rank: the median,
and the tenth percentile, which is the time of a call when nothing else wants the cores. Beside them
are a barrier and an exchange, the least by which ranks can synchronise, and gloo's all_reduce and
barrier in the same run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from on_cores import gloo, in_turn, row_of_calls, run, slowest_us

from shardmath.arrays import library_named
from shardmath.call.agreement import HashedSpec, agree
from shardmath.collectives import all_gather, all_reduce
from shardmath.distribution import Redistribute, Slab, redistribute
from shardmath.fft import FFT, fft
from shardmath.handles.allocation import empty_on_heap
from shardmath.linalg.advanced import Matmul, matmul

RANKS, TURNS, CALLS = 2, 19, 50
SMALL, N = 256, 64
GOALS = {"barrier": 30.0, "agreement on a known plan": 20.0}  # microseconds


def measure(context: Any, address: str) -> list[dict[str, Any]]:
    """A row for each call."""
    import torch

    ways, kept = calls(context)
    with gloo(context, address) as dist:
        tensor = torch.ones(SMALL)
        ways["gloo, all_reduce 1 KiB"] = lambda: dist.all_reduce(tensor)
        ways["gloo, barrier"] = dist.barrier
        times = in_turn(ways, TURNS, lambda what: row_of_calls(context, ways[what], CALLS))
        slowest = slowest_us(times, 50, 10)
        for plan in kept:
            plan.free()
    return [
        {"what": what, "us": median, "us_undisturbed": least, "goal": GOALS.get(what, "")}
        for what, (median, least) in slowest.items()
    ]


def calls(context: Any) -> tuple[dict[str, Callable[[], object]], list[Any]]:
    """The calls by name, and the objects to free after them."""
    numpy = library_named("numpy")
    part, turned = (slab.shape(context.rank, (N, N)) for slab in (Slab.X, Slab.Y))

    def on_heap(shape: tuple[int, ...], dtype: str = "float32") -> Any:
        array = empty_on_heap(context, numpy, shape, dtype)
        array[...] = 1
        return array

    small, into = np.ones(SMALL, "f4"), np.ones(SMALL, "f4")
    x, heap, target = np.ones(part, "f4"), on_heap(part), on_heap(turned)
    whole = np.ones((N, N), "f4")
    waves, splits = on_heap(part, "complex64"), [Slab.X] * 3
    spec = ("numpy", "float32", (1024, 1024), "sum")
    moved = Redistribute(heap, Slab.X, Slab.Y)
    product, transform = Matmul(heap, heap, distributions=splits), FFT(waves, distribution=Slab.X)
    for plan in (moved, product, transform):
        plan.plan()
    return {
        "barrier": lambda: context.board.barrier("barrier"),
        "exchange of 16 bytes": lambda: context.board.exchange("exchange", bytes(16)),
        "agreement on a known plan": agreement(context, spec),
        "all_reduce 1 KiB": lambda: all_reduce(small),
        "all_reduce 1 KiB (out)": lambda: all_reduce(small, out=into),
        "all_gather 1 KiB": lambda: all_gather(small),
        "redistribute": lambda: redistribute(x, Slab.X, Slab.Y),
        "redistribute, heap (out)": lambda: redistribute(heap, Slab.X, Slab.Y, out=target),
        "Redistribute.execute, heap (out)": lambda: moved.execute(out=target),
        "matmul": lambda: matmul(x, x, distributions=splits),
        "Matmul.execute, heap": product.execute,
        "np.matmul of one rank": lambda: np.matmul(whole, whole),
        "fft, heap": lambda: fft(waves, distribution=Slab.X),
        "FFT.execute, heap": transform.execute,
    }, [moved, product, transform]


def agreement(context: Any, spec: tuple[Any, ...]) -> Callable[[], object]:
    """A call in which the ranks agree on the plan of `spec`, which they know from the second on."""
    stated = SimpleNamespace(spec=HashedSpec(spec), note=b"", payload=b"", last=None)
    return lambda: agree(context, "plan", lambda: stated, tuple)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        run("calls", measure, RANKS, f"file://{folder}/store", timeout=300, goals=GOALS)
