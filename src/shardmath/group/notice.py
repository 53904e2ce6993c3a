"""Say on stderr, once, that start-up waits: a thread does, since the wait is a library's."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

from shardmath.base.caller import caller_line

__all__ = ["noticed"]


@contextlib.contextmanager
def noticed(rank: int, seconds: float, awaited: Callable[[], str]) -> Iterator[None]:
    """Around what waits for other ranks: after `seconds` stderr says for whom, as `awaited` does.

    The library must let other threads of this process run while it waits.
    """
    doing = f"rank {rank} in initialize, {caller_line()}"

    def say() -> None:
        print(f"shardmath: {doing}: waiting for {awaited()}", file=sys.stderr, flush=True)

    timer = threading.Timer(seconds, say)
    timer.daemon = True
    try:
        timer.start()
    except RuntimeError:  # no thread is to be had: a start without a notice is one all the same
        yield
        return
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # or else a fork that comes next would be one of a process with threads
