"""What the flight recorder adds to a call on cores: `python benchmarks/recorder.py`.

2 ranks, all_reduce of 1 KiB, which is one compiled call, with the recorder and without; the two
take turns, so that other load on the machine affects both. Beside it is the recorder alone, called
from Python as by a call that is not compiled. Figures are of the slower rank, in microseconds, over
turns of many calls each: the tenth percentile, which is the time of a call when nothing else wants
the cores, and the median.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from on_cores import run
from record import mean_seconds

from shardmath.base.recorder import this_process
from shardmath.collectives import all_reduce

RANKS, TURNS, CALLS = 2, 400, 50
GOAL = 0.3  # microseconds a call


def measure(context: Any) -> list[dict[str, Any]]:
    x, out, memory = np.ones(256, "f4"), np.ones(256, "f4"), this_process.memory
    assert memory is not None, "this process records"
    times = []
    for _ in range(TURNS):
        turn = []
        for call in (partial(all_reduce, x, out=out), partial(record_one, x, out)):
            for switch in (lambda: this_process.start(memory), this_process.stop):
                switch()
                context.barrier()
                mean_seconds(call, CALLS)
                turn.append(1e6 * mean_seconds(call, CALLS))
        times.append(turn)
    this_process.start(memory)
    own = np.percentile(times, [50, 10], axis=0)
    own = np.hstack([own, own[:, [0]] - own[:, [1]], own[:, [2]] - own[:, [3]]])
    slowest = all_reduce(own, op="max")
    names = {
        "all_reduce 1 KiB, recorded": 0,
        "all_reduce 1 KiB, not recorded": 1,
        "what recording adds to it": 4,
        "the recorder, from Python": 5,
    }
    return [
        {"what": name, "us": float(median), "us_undisturbed": float(least)}
        for name, (median, least) in zip(names, slowest.T[[*names.values()]], strict=True)
    ]


def record_one(*arrays: Any) -> None:
    this_process.begin(record_one, arrays)
    this_process.end()


if __name__ == "__main__":
    run("recorder", measure, RANKS, timeout=300, goal=GOAL)
