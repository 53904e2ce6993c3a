"""The ranks of a job on this host, as seen by one of them or by another process of the same user.

A rank maps the records of its peers when it starts, and so can read those of ranks that have died.
Other processes find a record through the system's list of a process's descriptors. Nothing here
waits for a rank, except briefly for its stack.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import signal
import struct
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from shardmath.base.recorder import (
    OPERATIONS,
    SHOWN,
    bytes_for,
    description,
    operations,
    this_process,
)
from shardmath.errors import BootstrapError, HeapExhausted
from shardmath.inspection.stacks import answers, silence, stack_of, state_of
from shardmath.inspection.table import Seen, missing, table
from shardmath.transport.cores.host import export_memory

_NAME = "shardmath-record"
_A_MOMENT = 10**9  # nanoseconds
_LOOK = 5e-3  # seconds between two looks at a lock
_WORD = struct.Struct("=Q")
_Seen = tuple[int, bytes | None, str]  # of a rank: its process, its record, the process's state
_own: list[int] = []  # descriptors of this process's record, and of its stack


def start() -> int:
    """Record this process's operations from now on, and return the record's descriptor.

    -1 where there is no memory. The second call returns the first one's.
    """
    if not _own:
        try:
            start_in(*new_record(OPERATIONS))
        except HeapExhausted:
            return -1
    return _own[0]


def start_in(descriptor: int, memory: mmap.mmap) -> None:
    """As `start`, and before it, in a `new_record` that another process may have made."""
    this_process.start(memory)
    _own.extend([descriptor, answers()])


def new_record(count: int) -> tuple[int, mmap.mmap]:
    """Memory for at least the last `count` operations of a process: descriptor and mapping.

    Raises HeapExhausted.
    """
    return export_memory(_NAME, bytes_for(count))


def forget() -> None:
    """Record nothing more in this process, a forked child: the record is its parent's."""
    this_process.stop()
    if _own:
        os.close(_own[0])
        silence(_own[1])
        _own.clear()


class Job:
    """The ranks of one job, as one of them sees them.

    Rank r is process `pids[r]`, whose record has descriptor `descriptors[r]` there; `here` are the
    ranks on this host. `elsewhere(rank)` is the last operation of a rank on another host.
    """

    def __init__(
        self,
        rank: int,
        pids: Sequence[int],
        descriptors: Sequence[int],
        here: Sequence[int],
        host: str,
    ) -> None:
        self._pids, self._descriptors, self._here = list(pids), list(descriptors), list(here)
        self._records: dict[int, _Mapping] = {}
        self.elsewhere: Callable[[int], str] = lambda _: ""
        self.print = to_stderr
        for peer in here:
            with suppress(OSError):
                self._records[peer] = _Mapping(_checked(pids[peer], descriptors[peer]))
        this_process.describe(
            {
                "rank": rank,
                "size": len(pids),
                "host": host,
                "pids": {peer: pids[peer] for peer in here},
                "stack": _own[1] if _own else -1,
            }
        )

    def show(self, why: str) -> None:
        """Print the table on stderr, unless a rank of this host has done so a moment ago.

        Errors are not raised here: the one that is being reported matters more.
        """
        self.look()(why)

    def look(self) -> Callable[[str], None]:
        """See what all ranks do now; the function that is returned shows it, as `show` does."""
        seen: dict[int, _Seen] = {}
        with suppress(Exception):
            for rank, record in self._records.items():
                seen[rank] = self._pids[rank], bytes(record), state_of(self._pids[rank])

        def shown(why: str) -> None:
            with suppress(Exception):
                if len(self._pids) > 1:
                    with self._turn() as is_first:
                        if is_first:
                            self.print(f"shardmath: {why}\n{self._table(seen)}")

        return shown

    def _table(self, seen: Mapping[int, _Seen]) -> str:
        here = {
            rank: (pid, record, state)
            for rank, (pid, record, state) in seen.items()
            # Not so where a number is that of another process here: in containers, for example.
            if record is not None and description(record).get("rank") == rank
        }
        others = [
            Seen(rank, pid, elsewhere=self.elsewhere(rank) or "not seen here")
            for rank, pid in enumerate(self._pids)
            if rank not in here
        ]
        return _table(here, others)

    @contextmanager
    def _turn(self) -> Iterator[bool]:
        """Whether this rank is to show the table: the first of this host is, for a moment.

        The others wait until it has: the error that they raise next may end the job.
        """
        record = -1
        for rank in self._here:
            with suppress(OSError):
                record = os.open(_checked(self._pids[rank], self._descriptors[rank]), os.O_RDWR)
                break
        try:
            if record < 0 or not _locked(record):
                yield False
                return
            last = _WORD.unpack(os.pread(record, _WORD.size, SHOWN))[0]
            now = time.monotonic_ns()
            is_first = now - last >= _A_MOMENT
            if is_first:
                os.pwrite(record, _WORD.pack(now), SHOWN)
            yield is_first
        finally:
            if record >= 0:
                os.close(record)


def _locked(record: int) -> bool:
    """Whether this process has the lock of a record, for which it waits a moment."""
    deadline = time.monotonic_ns() + _A_MOMENT
    while True:
        try:
            fcntl.lockf(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic_ns() >= deadline:
                return False
        time.sleep(_LOOK)


class _Mapping:
    """A record, mapped for reading. Unlike an `mmap` it holds no descriptor."""

    def __init__(self, path: str) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._bytes = os.fstat(descriptor).st_size
            flags = mmap.PROT_READ, mmap.MAP_SHARED
            address = libc.mmap(None, self._bytes, *flags, descriptor, 0)
        finally:
            os.close(descriptor)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "mmap")
        self._address = address
        weakref.finalize(self, libc.munmap, address, self._bytes).atexit = False

    def __bytes__(self) -> bytes:
        return ctypes.string_at(self._address, self._bytes)


def inspected(pid: int) -> str:
    """The table of the ranks on this host of the job that a process belongs to or has started.

    Raises BootstrapError where there is none.
    """
    record = _record_of(pid)
    if record is None:
        for child in _children(pid):
            with suppress(BootstrapError):
                return inspected(child)
        raise BootstrapError(
            f"process {pid} is no rank, and has started none: it has not called initialize(), is "
            "another user's, or has ended"
        )
    told = description(record)
    pids: Mapping[str, int] = told.get("pids", {str(told.get("rank", 0)): pid})
    records = {int(rank): (each, _record_of(each), state_of(each)) for rank, each in pids.items()}
    size, host = told.get("size", len(records)), told.get("host", "this host")
    return f"{len(records)} of {size} ranks, on {host}\n{_table(records)}"


def show_on_request(show: Callable[[], bool]) -> None:
    """Call `show` when SIGQUIT comes; where it returns False, the signal ends the process as usual.

    Does nothing where the program has a handler of its own, or outside the main thread.
    """

    def shown(*_: object) -> None:
        if not show():
            signal.signal(signal.SIGQUIT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGQUIT)

    if signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL:
        with suppress(ValueError):  # this is not the main thread
            signal.signal(signal.SIGQUIT, shown)


def _table(records: Mapping[int, _Seen], others: Sequence[Seen] = ()) -> str:
    """The table of ranks of this host, and of `others`.

    The stacks are those of the ranks that are missing, or of all if none is.
    """
    ranks = [*others]
    for rank, (pid, record, state) in records.items():
        if record is None and not state:
            ranks.append(Seen(rank, pid, elsewhere="not seen: this process has no record"))
            continue
        done = [] if record is None else operations(record)
        ranks.append(Seen(rank, pid, done[-1] if done else None, state))
    ranks.sort()
    asked = {each.rank for each in missing(ranks) or ranks if not each.state and not each.elsewhere}
    for place, each in enumerate(ranks):
        if each.rank in asked:
            record = records[each.rank][1]
            told = {} if record is None else description(record)
            ranks[place] = each._replace(stack=stack_of(each.pid, int(told.get("stack", -1))))
    return table(ranks, time.monotonic_ns())


def _checked(pid: int, descriptor: int) -> str:
    """The path of a process's record. Raises OSError where it has none there."""
    path = f"/proc/{pid}/fd/{descriptor}"
    if _NAME not in os.readlink(path):
        raise OSError(f"{path} is no record")
    return path


def _record_of(pid: int) -> bytes | None:
    """The bytes of a process's record."""
    with suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError), open(_checked(pid, int(descriptor)), "rb") as record:
                return record.read()
    return None


def _children(pid: int) -> list[int]:
    found = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as children:
                found += [int(child) for child in children.read().split()]
    return found


def to_stderr(text: str) -> None:
    """Print on stderr, if there is one."""
    if sys.stderr is not None:
        print(text, file=sys.stderr, flush=True)
