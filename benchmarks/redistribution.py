"""Redistribution on 2 ranks, beside two processes that copy the same bytes in the same run.

`python benchmarks/redistribution.py [MiB of the global array]`. A rate is the bytes of one rank's
result per second, with both ranks at work. Baselines, on each rank's own ordinary memory:

contiguous  np.copyto of one contiguous array. From some size on (here 3/8 of the last cache) the C
            library writes such an array past the caches, and does not read what it overwrites.
boxes       np.copyto of the boxes that the redistribution moves: the same work without peers.

Finally the first case is repeated in several sizes, with an `out` in ordinary memory at several
offsets in its page relative to the operand on the heap: on some processors the offset decides how
fast a copy is. Large NumPy arrays lie 16 bytes into a page, heap memory at its start.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from on_cores import in_turn, run, speedup, together
from record import argument

from shardmath.arrays import library_of
from shardmath.base.compiled import is_built
from shardmath.context.context import DistributedContext
from shardmath.distribution import (
    BlockCyclic,
    Distribution,
    Layout,
    ProcessGrid,
    Redistribute,
    Slab,
)
from shardmath.handles.allocation import empty_on_heap
from shardmath.redistribution import TransferPlan

RANKS = 2
PAGE = 4096
PAGE_OFFSETS = (0, 16, 64, 256, 2048, 4032, 4080)
SMALLER = (512, 2048)  # extents: 1 and 16 MiB for each rank
REPEATS = 9
CYCLIC = BlockCyclic(ProcessGrid(shape=(RANKS, 1)), (64, 64))


@dataclass(frozen=True)
class Case:
    """What is redistributed: from, to, and the memory order of the result."""

    name: str
    source: Distribution
    target: Distribution
    order: Any = "C"


CASES = (
    Case("slab X -> slab Y", Slab.X, Slab.Y),
    Case("slab Y -> slab X", Slab.Y, Slab.X),
    Case("2x1 block-cyclic 64 -> slab X", CYCLIC, Slab.X),
    Case("2x1 block-cyclic 64 -> slab Y", CYCLIC, Slab.Y),
    Case("slab X, C -> slab X, F", Slab.X, Slab.X, "F"),
    Case("slab X, C -> slab Y, F", Slab.X, Slab.Y, "F"),
)


def measure_all(context: DistributedContext, n: int) -> list[dict[str, Any]]:
    """The rows of all cases for an n x n array of float64, as this rank measures them."""
    rows = [row(context, case, n) for case in CASES]
    return rows + [
        row_at_offset(context, extent, offset)
        for extent in (n, *SMALLER)
        for offset in PAGE_OFFSETS
    ]


def row(context: DistributedContext, case: Case, n: int) -> dict[str, Any]:
    """Rates in GB/s."""
    layouts = [Layout.bind([each] * RANKS, (n, n)) for each in (case.source, case.target)]
    transfer = TransferPlan(*layouts, 8)
    before, after = (layout.local_shape(context.rank) for layout in layouts)
    operand, out = np.ones(before), np.zeros(after, order=case.order)
    library = library_of(operand)
    heap_operand = empty_on_heap(context, library, before, "float64")
    heap_out = empty_on_heap(context, library, after, "float64", case.order)
    heap_operand[...], heap_out[...] = operand, 0
    plan = Redistribute(operand, case.source, case.target)
    plan.plan()
    moved = boxes(transfer, context.rank, operand, out)
    flat, image = operand.reshape(-1), out.reshape(-1, order="A")
    heap = Redistribute(heap_operand, case.source, case.target)
    heap.plan()
    calls = {
        "contiguous": lambda: np.copyto(image, flat),
        "boxes": lambda: [np.copyto(to, came) for came, to in moved],
        "heap, out": lambda: heap.execute(out=out),
        "heap, heap out": lambda: heap.execute(out=heap_out),
        "ordinary, out": lambda: plan.execute(out=out),
    }
    if case.order == "C":
        calls |= {"heap, new": heap.execute, "ordinary, new": plan.execute}
    times = measure(context, calls)
    heap.free()
    plan.free()
    return {
        "case": case.name,
        "pattern": transfer.pattern.value,
        "MiB sent by a rank": transfer.traffic.sent[context.rank] >> 20,
        **rates(out.nbytes, times),
        "heap, out / contiguous": round(speedup(times["contiguous"], times["heap, out"]), 2),
        "heap, out / boxes": round(speedup(times["boxes"], times["heap, out"]), 2),
    }


def row_at_offset(context: DistributedContext, n: int, offset: int) -> dict[str, Any]:
    """Rates in GB/s, of a contiguous copy and of a redistribution to the same memory."""
    before, after = ((n // RANKS, n), (n, n // RANKS))
    operand = empty_on_heap(context, library_of(np.empty(0)), before, "float64")
    operand[...] = 1
    room = np.zeros(operand.nbytes + PAGE, "u1")
    start = (operand.ctypes.data + offset - room.ctypes.data) % PAGE
    out = room[start : start + operand.nbytes].view("float64").reshape(after)
    flat, image = operand.reshape(-1), out.reshape(-1)
    with Redistribute(operand, Slab.X, Slab.Y) as heap:
        heap.plan()
        calls = {
            "contiguous": lambda: np.copyto(image, flat),
            "heap, out": lambda: heap.execute(out=out),
        }
        times = measure(context, calls)
    return {
        "case": f"slab X -> slab Y, {out.nbytes >> 20} MiB, out {offset} bytes further in its page",
        **rates(out.nbytes, times),
        "heap, out / contiguous": round(speedup(times["contiguous"], times["heap, out"]), 2),
    }


def boxes(transfer: TransferPlan, rank: int, operand: Any, out: Any) -> list[tuple[Any, Any]]:
    """The moves into `rank`, all taken from its own operand: as large as that of the peer."""
    pairs = []
    for move in transfer.into(rank):
        sides = []
        for array, side in ((operand, "src"), (out, "dst")):
            corner = tuple(slice(getattr(run, f"{side}_start"), None) for run in move.runs)
            dims = [
                pair
                for run, stride in zip(move.runs, array.strides, strict=True)
                for pair in (
                    (run.count, getattr(run, f"{side}_step") * stride),
                    (run.length, stride),
                )
            ]
            shape, strides = zip(*dims, strict=True)
            sides.append(as_strided(array[corner], shape, strides))
        pairs.append((sides[0], sides[1]))
    return pairs


def measure(
    context: DistributedContext, calls: dict[str, Callable[[], object]]
) -> dict[str, list[float]]:
    """Seconds of each call until both ranks are done."""
    return in_turn(calls, REPEATS, lambda name: together(context, calls[name])[0])


def rates(nbytes: int, times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """The columns of the median and of the best rate of each call."""
    return {
        column: {name: round(nbytes / 1e9 / chosen(taken), 2) for name, taken in times.items()}
        for column, chosen in (("GB/s", statistics.median), ("best GB/s", min))
    }


if __name__ == "__main__":
    mebibytes = argument(1, 512)
    n = int((mebibytes * (1 << 20) / 8) ** 0.5)
    compiled = is_built("shardmath.redistribution._box")
    run("redistribution", measure_all, RANKS, n, n=n, repeats=REPEATS, compiled=compiled)
