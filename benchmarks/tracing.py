"""What tracing adds to a call on cores: `python benchmarks/tracing.py`.

A traced rank records as every rank does, but into memory that has room for more operations, so each
call writes where none has written before, past the caches. It also writes when each copy and each
computation begins and ends. 2 ranks; an all_reduce of 1 KiB, which is one compiled call and so
affected most, a product, and a redistribution; untraced and traced, in turns, so that other load on
the machine affects both. Figures are of the slower rank, in microseconds, over turns of many calls
each: the tenth percentile, which is the time of a call when nothing else wants the cores, and the
median.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
from on_cores import run
from record import mean_seconds

from shardmath.base import spans
from shardmath.base.recorder import OPERATIONS, bytes_for, this_process
from shardmath.collectives import all_reduce
from shardmath.distribution import Slab, redistribute
from shardmath.linalg.advanced import matmul
from shardmath.tools.trace import KEPT, SPANS, touch

RANKS, TURNS = 2, 400
CALLS = {"all_reduce 1 KiB": 50, "matmul 64^3 float32": 20, "redistribute 1024^2 float32": 4}
GOAL = 1.05  # times as long


def measure(context: Any) -> list[dict[str, Any]]:
    x, out = np.ones(256, "f4"), np.ones(256, "f4")
    a = np.ones(Slab.X.shape(context.rank, (64, 64)), "f4")
    b = np.ones(Slab.X.shape(context.rank, (1024, 1024)), "f4")
    into = np.empty(Slab.Y.shape(context.rank, (1024, 1024)), "f4")
    calls: list[Callable[[], Any]] = [
        lambda: all_reduce(x, out=out),
        lambda: matmul(a, a, distributions=[Slab.X] * 3),
        lambda: redistribute(b, Slab.X, Slab.Y, out=into),
    ]
    contexts = context, context.split(0, context.rank)  # each binds the calls' steps once
    memory = mmap.mmap(-1, spans.bytes_for(SPANS * KEPT))
    touch(memory)
    own = this_process.memory
    assert own is not None, "this process records"
    rows = []
    for (what, count), call in zip(CALLS.items(), calls, strict=True):
        records = [mmap.mmap(-1, bytes_for(kept)) for kept in (OPERATIONS, KEPT)]
        touch(records[1])
        this_process.spans = spans.Spans(memory, lambda _: None)
        with contexts[1]:
            call()
        this_process.spans = None
        times = []
        for turn in range(TURNS):
            both = [0.0, 0.0]
            for way in (0, 1) if turn % 2 else (1, 0):
                this_process.start(records[way])
                with contexts[way]:
                    context.barrier()
                    call()
                    both[way] = mean_seconds(call, count)
            times.append(both)
        this_process.start(own)
        slower = 1e6 * np.array(all_reduce(np.array(times), op="max"))
        (median, traced), (least, least_traced) = np.percentile(slower, [50, 10], axis=0)
        rows.append(
            {
                "what": what,
                "untraced, us": float(median),
                "traced, us": float(traced),
                "untraced, us undisturbed": float(least),
                "traced, us undisturbed": float(least_traced),
                "ratio": float(traced / median),
                "ratio, undisturbed": float(least_traced / least),
            }
        )
    return rows


if __name__ == "__main__":
    run("tracing", measure, RANKS, timeout=600, turns=TURNS, goal={"ratio": GOAL})
