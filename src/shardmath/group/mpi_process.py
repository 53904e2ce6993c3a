"""The start and the end of MPI in this process, each with a deadline, which MPI does not have.

MPI_Init and MPI_Finalize wait for all ranks of the job, even for one that never starts or never
ends, and hold the interpreter meanwhile: no thread of this process can watch them. So another
process watches the start, and an alarm the end.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import sys
import warnings
from collections.abc import Iterator
from functools import cache

from shardmath.base.caller import caller_line

_OUTERMOST = ("<module>", "_run_module_as_main")  # the frames that programs start in
_GRACE = 5  # seconds for the peers to hear of a failure, and to end as well


@contextlib.contextmanager
def bounded_start(rank: int, size: int, *, notice: float, timeout: float) -> Iterator[None]:
    """Around MPI_Init: stderr says so after `notice` seconds, this process ends after `timeout`."""
    doing = f"rank {rank} in MPI_Init, {caller_line()}"
    whom = f"waiting for all {size} ranks to start MPI"
    words = (
        f"shardmath: {doing}: {whom}\n",
        f"shardmath: {doing}: ended after {timeout:g} s of {whom}: does every rank call "
        "shardmath.initialize()? SHARDMATH_STARTUP_TIMEOUT sets the limit\n",
    )
    reading, writing = os.pipe()
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the fork of a process with threads
        watcher = os.fork()
    if watcher == 0:
        try:
            os.close(writing)
            _watch(reading, parent, words, (notice, timeout))
        finally:
            os._exit(0)
    os.close(reading)
    try:
        yield
    finally:
        os.close(writing)
        with contextlib.suppress(ChildProcessError):  # the program waits for all its children
            os.waitpid(watcher, 0)


def _watch(started: int, parent: int, words: tuple[str, str], limits: tuple[float, float]) -> None:
    """Wait until the other end of `started` is closed, by the start or the end of `parent`."""
    notice, timeout = limits
    if notice < timeout:
        if _closed(started, notice):
            return
        os.write(2, words[0].encode())
        timeout -= notice
    if not _closed(started, timeout):
        os.write(2, words[1].encode())
        os.kill(parent, signal.SIGTERM)
        if not _closed(started, _GRACE):
            os.kill(parent, signal.SIGKILL)


def _closed(descriptor: int, seconds: float) -> bool:
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(seconds * 1000))


@cache
def bound_end() -> None:
    """Once per process: after an exception that nothing caught, end soon even where peers do not.

    The launcher then sees a process that failed, and ends the others.
    """
    atexit.register(_set_alarm, os.getpid())


def _set_alarm(starter: int) -> None:
    if os.getpid() == starter and _has_failed():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_GRACE)


def _has_failed() -> bool:
    """Whether the program itself ended by an exception: pytest and notebooks keep theirs too."""
    trace = getattr(sys, "last_traceback", None)
    return trace is not None and trace.tb_frame.f_code.co_name in _OUTERMOST
