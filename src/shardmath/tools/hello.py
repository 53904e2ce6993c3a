"""Who computes together, a line for each rank, and how fast these ranks meet."""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from shardmath.collectives import all_gather
from shardmath.context.context import DistributedContext
from shardmath.context.startup import finalize, initialize
from shardmath.errors import ShardmathError
from shardmath.tools.tables import show

_BYTES = 16 << 20
_LONG = 1.0  # seconds that the measurement of one call takes at most, or two calls


def main(device: str) -> None:
    """Meet the other ranks; rank 0 prints who they are, and how fast they reach each other.

    A rank that cannot start ends with one line that says why.
    """
    try:
        context = initialize(device)
    except ShardmathError as error:
        sys.exit(f"shardmath hello: {error}")
    cores = len(os.sched_getaffinity(0))
    own = context.rank, socket.gethostname(), os.getpid(), str(context.device_id), cores
    cards = context.agree("hello", lambda: own, list)
    barrier, gathered = measured(context, _BYTES)
    if context.rank == 0:
        header = "rank", "host", "pid", "device", "cores"
        title = "1 rank" if context.size == 1 else f"{context.size} ranks"
        show(title, header, [tuple(map(str, card)) for card in cards])
        rows = [
            ("hosts", str(context.host_count)),
            ("found each other by", type(context.process_group).__name__),
            ("memory is reached by", context.transport),
            ("a barrier", f"{1e6 * barrier:.1f} us"),
            ("all_gather", f"{rate(_BYTES, gathered)} a rank"),
        ]
        show("Between them", ("what", "is"), rows)
    finalize()


def measured(context: DistributedContext, nbytes: int) -> tuple[float, float]:
    """The seconds of a barrier, and of an all_gather of `nbytes` bytes in all. Collective."""
    part = np.ones(nbytes // context.size, np.uint8)
    whole = np.ones(len(part) * context.size, np.uint8)

    def gather() -> None:
        all_gather(part, out=whole)

    return (
        median_seconds(context.barrier, _turns(context, context.barrier, 200)),
        median_seconds(gather, _turns(context, gather, 5)),
    )


def _turns(context: DistributedContext, call: Callable[[], object], most: int) -> int:
    """How often a call is measured: `most` times, and fewer if ranks without cores of their own
    would take long. The same on all ranks. Collective.
    """
    seconds = median_seconds(call, 1)
    slowest: float = context.agree("hello", lambda: seconds, max)
    return max(1, min(most, int(_LONG / slowest)))


def median_seconds(call: Callable[[], object], turns: int = 5) -> float:
    """The median time of a call, without the first."""
    times = []
    for _ in range(turns + 1):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def rate(nbytes: int, seconds: float) -> str:
    """A rate of bytes, in words."""
    return f"{nbytes / seconds / 1e9:.1f} GB/s"
