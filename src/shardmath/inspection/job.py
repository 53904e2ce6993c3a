"""The ranks of a job on this host, as one of them sees them, or another process of the same user.

A rank maps the records of its peers when it starts, so that it can read those of the dead. Who
comes later finds them through the system's list of a process's descriptors. Nothing here waits for
a rank, but for a stack, for a moment.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

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
_WORD = struct.Struct("=Q")
_own: list[int] = []  # descriptors of this process's record, and of its stack


def start() -> int:
    """Record this process's operations from now on: the record's descriptor, -1 if there is none.

    Once in a process.
    """
    if not _own:
        try:
            start_in(*new_record(OPERATIONS))
        except HeapExhausted:
            return -1
    return _own[0]


def start_in(descriptor: int, memory: mmap.mmap) -> None:
    """Record them in a `new_record`, which may be another process's too. Before `start`."""
    this_process.start(memory)
    _own.extend([descriptor, answers()])


def new_record(count: int) -> tuple[int, mmap.mmap]:
    """Memory for at least the last `count` operations of a process: descriptor and mapping.

    Raises HeapExhausted.
    """
    return export_memory(_NAME, bytes_for(count))


def forget() -> None:
    """Record nothing: the record is the parent's, off which this process was forked."""
    this_process.stop()
    if _own:
        os.close(_own[0])
        silence(_own[1])
        _own.clear()


class Job:
    """The ranks of one job, as one of them sees them.

    Rank r is process `pids[r]`, whose record has descriptor `descriptors[r]`; `here` are those of
    this host. `elsewhere(rank)` says what is known of the operation of another.
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

        What goes wrong here is not raised: this is called on the way of an error that matters more.
        """
        with suppress(Exception):
            if len(self._pids) > 1 and self._is_first():
                self.print(f"shardmath: {why}\n{self._table()}")

    def _table(self) -> str:
        seen = [
            _seen(rank, self._pids[rank], bytes(self._records[rank]))
            if rank in self._records
            else Seen(rank, self._pids[rank], elsewhere=self.elsewhere(rank) or "not seen here")
            for rank in range(len(self._pids))
        ]
        return table(_with_stacks(seen, self._stacks()), _now())

    def _stacks(self) -> dict[int, int]:
        told = {rank: description(bytes(record)) for rank, record in self._records.items()}
        return {rank: int(each.get("stack", -1)) for rank, each in told.items()}

    def _is_first(self) -> bool:
        """Whether no rank of this host has just shown a table, or does so now."""
        for rank in self._here:
            with suppress(OSError):
                record = os.open(_checked(self._pids[rank], self._descriptors[rank]), os.O_RDWR)
                try:
                    fcntl.lockf(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    last = _WORD.unpack(os.pread(record, _WORD.size, SHOWN))[0]
                    if _now() - last < _A_MOMENT:
                        return False
                    os.pwrite(record, _WORD.pack(_now()), SHOWN)
                except BlockingIOError:
                    return False
                finally:
                    os.close(record)
                return True
        return False


class _Mapping:
    """A record, mapped for reading. Unlike one of `mmap` it holds no descriptor."""

    def __init__(self, path: Path) -> None:
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
    """The table of the job on this host that a process belongs to, or that it has started.

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
    records = {int(rank): (each, _record_of(each)) for rank, each in pids.items()}
    seen = [_seen(rank, each, found) for rank, (each, found) in sorted(records.items())]
    stacks = {
        rank: int(description(found).get("stack", -1))
        for rank, (_, found) in records.items()
        if found is not None
    }
    size = told.get("size", len(seen))
    where = f"{len(seen)} of {size} ranks, on {told.get('host', 'this host')}"
    return f"{where}\n{table(_with_stacks(seen, stacks), _now())}"


def show_on_request(show: Callable[[], bool]) -> None:
    """Call `show` when SIGQUIT comes, which otherwise ends the process, as it does where that is
    False. Nothing is done where the program has a handler of its own, or in another thread.
    """

    def shown(*_: object) -> None:
        if not show():
            signal.signal(signal.SIGQUIT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGQUIT)

    if signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL:
        with suppress(ValueError):  # this is not the main thread
            signal.signal(signal.SIGQUIT, shown)


def _seen(rank: int, pid: int, record: bytes | None) -> Seen:
    done = [] if record is None else operations(record)
    return Seen(rank, pid, done[-1] if done else None, state_of(pid))


def _with_stacks(ranks: Sequence[Seen], stacks: Mapping[int, int]) -> list[Seen]:
    """The ranks, and where those are that are in no operation."""
    asked = {each.rank for each in missing(ranks) or ranks if not each.state and not each.elsewhere}
    return [
        each._replace(stack=stack_of(each.pid, stacks.get(each.rank, -1)))
        if each.rank in asked
        else each
        for each in ranks
    ]


def _checked(pid: int, descriptor: int) -> Path:
    """The path of a process's record. Raises OSError where it has none there."""
    path = Path(f"/proc/{pid}/fd/{descriptor}")
    if _NAME not in str(path.readlink()):
        raise OSError(f"{path} is no record")
    return path


def _record_of(pid: int) -> bytes | None:
    """The bytes of a process's record."""
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                return _checked(pid, int(path.name)).read_bytes()
    return None


def _children(pid: int) -> list[int]:
    found = []
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            found += [int(child) for child in path.read_text().split()]
    return found


def _now() -> int:
    return time.monotonic_ns()


def to_stderr(text: str) -> None:
    """Print on stderr, if there is one."""
    if sys.stderr is not None:
        print(text, file=sys.stderr, flush=True)
