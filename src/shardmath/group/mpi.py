"""The ranks of an MPI communicator, through the user's mpi4py.

Only buffers travel: mpi4py's object calls would unpickle what a peer sends. Every wait polls a
non-blocking request, so that it can end at a deadline.

MPI's blocking calls have no deadline: they wait for all ranks of the job, even for one that never
starts or never ends. MPI_Init and MPI_Finalize also hold the interpreter meanwhile, so that no
thread of this process can watch them: another process watches the start, and an alarm the end. A
thread watches the others (`CallWatch`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from shardmath.base.caller import caller_line, who
from shardmath.base.config import Settings
from shardmath.errors import BootstrapError
from shardmath.group.base import GatheringGroup

_SPINS = 1000  # polls without a pause: most exchanges end within them
_PAUSE = 0.0005
_OUTERMOST = ("<module>", "_run_module_as_main")  # the frames that programs start in
_LOOK = 0.25  # seconds between two looks at the calls that are under way
_GRACE = 5  # seconds for the peers to hear of a failure, and to end as well


class MPIProcessGroup(GatheringGroup):
    """The ranks of an mpi4py communicator. Waits end after `timeout` seconds.

    Raises ValueError for the null communicator, and for one between two groups.
    """

    def __init__(self, mpi_comm: Any, *, timeout: float | None = None) -> None:
        if not mpi_comm:
            raise ValueError(
                "this process is in no part of the communicator, which is MPI.COMM_NULL here: "
                "only its members may call"
            )
        if mpi_comm.is_inter:
            raise ValueError("a communicator between two groups has no ranks: pass its Merge()")
        super().__init__(int(mpi_comm.rank), int(mpi_comm.size))
        self._comm = mpi_comm
        self._mpi: Any = sys.modules["mpi4py.MPI"]
        self._timeout = Settings.from_environment().startup_timeout if timeout is None else timeout
        bound_end()

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        """The `data` of every rank, in the order of the ranks. Collective; sizes may differ."""
        import numpy as np

        sizes = np.zeros(self.nranks, np.int64)
        own = np.array([len(data)], np.int64)
        self._wait(self._comm.Iallgather(own, sizes), "gather of sizes")
        gathered = bytearray(int(sizes.sum()))
        counts = sizes.tolist()
        byte = self._mpi.BYTE
        self._wait(self._comm.Iallgatherv([data, byte], [gathered, counts, byte]), "gather")
        ends = np.cumsum(sizes).tolist()
        return [bytes(gathered[end - count : end]) for end, count in zip(ends, counts, strict=True)]

    def duplicate(self) -> Any:
        """A communicator of the same ranks, for traffic that meets no other's. Collective."""
        return self._comm.Dup()

    def _wait(self, request: Any, what: str) -> None:
        deadline = time.monotonic() + self._timeout
        polls = 0
        while not request.Test():
            polls += 1
            if polls < _SPINS:
                continue
            if time.monotonic() >= deadline:
                raise BootstrapError(
                    f"{who(self.rank)}: a {what} of "
                    f"{self.nranks} ranks over MPI did not complete in {self._timeout:g} s: does "
                    "every rank call shardmath.initialize()? SHARDMATH_STARTUP_TIMEOUT sets the "
                    "limit"
                )
            time.sleep(_PAUSE)


# -- calls that do not return ----------------------------------------------------------------------


class CallWatch:
    """A thread that ends this process if a blocking call of MPI takes too long.

    Nothing else can: the call has no deadline, and Python handles no signals meanwhile. After
    `notice` seconds stderr says what is waited for. `who` is this rank and its process.
    """

    def __init__(self, who: str, *, notice: float) -> None:
        self._who = who
        self._notice = notice
        self._calls: dict[int, _Call] = {}  # by thread
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="calls of MPI", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def bounded(self, doing: str, *, timeout: float, advice: str) -> Iterator[None]:
        """Around a call: the process ends after `timeout` seconds of `doing`, with the `advice`."""
        thread = threading.get_ident()
        self._calls[thread] = _Call(time.monotonic(), doing, timeout, advice)
        try:
            yield
        finally:
            self._calls.pop(thread, None)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def _look(self) -> None:
        told: _Call | None = None
        while not self._closed.wait(_LOOK):
            for call in list(self._calls.values()):
                waited = time.monotonic() - call.begun
                if waited >= call.timeout:
                    self._say(f"ended after {call.timeout:g} s of {call.doing}: {call.advice}")
                    os.kill(os.getpid(), signal.SIGTERM)
                    self._closed.wait(_GRACE)
                    os.kill(os.getpid(), signal.SIGKILL)
                if waited >= self._notice and call is not told:
                    told = call
                    self._say(call.doing)

    def _say(self, what: str) -> None:
        os.write(2, f"shardmath: {self._who}: {what}\n".encode())


class _Call(NamedTuple):
    begun: float
    doing: str
    timeout: float
    advice: str


# -- the start and the end of MPI ------------------------------------------------------------------


@contextlib.contextmanager
def bounded_start(
    rank: int,
    size: int,
    *,
    notice: float,
    timeout: float,
    call: str = "MPI_Init",
    library: str = "MPI",
) -> Iterator[None]:
    """Around the `call` that starts a library, which no exception can end.

    stderr says so after `notice` seconds, this process ends after `timeout`.
    """
    doing = f"shardmath: rank {rank} in {call}, {caller_line()}:"
    whom = f"waiting for all {size} ranks to start {library}"
    words = (
        f"{doing} {whom}\n",
        f"{doing} ended after {timeout:g} s of {whom}: does every rank call "
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
