"""How many cores has one rank? Ranks of one host share them, so that BLAS does not oversubscribe.

A limit only ever lowers what the user set, and is undone on leaving.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["share_cores", "threads_per_rank"]


def threads_per_rank(local_ranks: int) -> int:
    """The cores that this process may run on, divided by `local_ranks`; at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, local_ranks))


@contextmanager
def share_cores(local_ranks: int) -> Iterator[int]:
    """Limit BLAS and OpenMP to `threads_per_rank(local_ranks)` threads, which it yields.

    Reaches the libraries that are loaded on entry, through threadpoolctl; without threadpoolctl, or
    with one rank, it changes nothing. Entering costs milliseconds: enter once, not per call.
    """
    share = threads_per_rank(local_ranks)
    limits = _lowered(share) if local_ranks > 1 else {}
    if not limits:
        yield share
        return
    from threadpoolctl import threadpool_limits

    with threadpool_limits(limits=limits):
        yield share


def _lowered(share: int) -> dict[str, int]:
    """For each kind of library that is loaded: `share`, or the threads that it has if fewer."""
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return {}
    most: dict[str, int] = {}
    for library in threadpool_info():
        prefix = library["prefix"]
        most[prefix] = min(library["num_threads"], most.get(prefix, share))
    return most
