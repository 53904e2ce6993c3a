"""Who computes together: a line for each rank, by those that a launcher has started."""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time

import numpy as np

from shardmath.collectives import all_gather
from shardmath.context.startup import finalize, initialize
from shardmath.tools.tables import show

_TURNS = 200
_BYTES = 16 << 20


def main(device: str = "cpu") -> int:
    """Meet the other ranks; rank 0 prints who they are, and how fast they reach each other."""
    context = initialize(device)
    cores = len(os.sched_getaffinity(0))
    own = context.rank, socket.gethostname(), os.getpid(), str(context.device_id), cores
    cards = context.agree("hello", lambda: own, list)
    part = np.ones(_BYTES // context.size, np.uint8)
    times: dict[str, list[float]] = {"barrier": [], "all_gather": []}
    for _ in range(_TURNS):
        start = time.perf_counter()
        context.barrier()
        times["barrier"].append(time.perf_counter() - start)
    for _ in range(5):
        start = time.perf_counter()
        all_gather(part)
        times["all_gather"].append(time.perf_counter() - start)
    if context.rank == 0:
        header = "rank", "host", "pid", "device", "cores"
        show(f"{context.size} ranks", header, [tuple(map(str, card)) for card in cards])
        barrier, gathered = (statistics.median(each) for each in times.values())
        show(
            "Between them",
            ("what", "is"),
            [
                ("hosts", str(len(set(context.hosts)))),
                ("found each other by", type(context.process_group).__name__),
                ("memory is reached by", context.transport),
                ("a barrier", f"{1e6 * barrier:.1f} us"),
                ("all_gather", f"{len(part) * context.size / gathered / 1e9:.1f} GB/s a rank"),
            ],
        )
    finalize()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
