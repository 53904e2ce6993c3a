"""Memory and descriptors that this process may still take, by the machine and by its limits.

A process that takes more is killed without a word, so memory is committed only after a look here.
Pages of files do not count as taken: the system drops them when memory is short.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import time
from collections.abc import Iterator

_GROUPS = "/sys/fs/cgroup"
_LEFT = 16 << 20  # bytes for what processes take page by page, and cannot be refused
_TURN = 5.0  # seconds that one waits for its turn
_LOOK = 1e-3


def limit_reached(error: OSError) -> str:
    """Which limit other than memory a call has reached, and how to raise it.

    Empty if it was none of these.
    """
    if error.errno == errno.EMFILE:
        limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"this process may have {limit:,} files open, and has: close some, or raise the limit "
            f"of open files (ulimit -n; it may be {most:,} at most here)"
        )
    if error.errno == errno.ENFILE:
        return "the system has no descriptor left: its limit is fs.file-max"
    if error.errno == errno.EFBIG:
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        return (
            f"no file of this process may have more than {limit:,} bytes, memory that processes "
            "share included: raise the limit of the size of files (ulimit -f)"
        )
    return ""


def available_memory() -> int:
    """Bytes that this process may still commit: the machine's, its control groups', less a rest.

    Raises OSError where no descriptor is left to find out.
    """
    bounds = [_machine_memory()]
    with contextlib.suppress(OSError):
        told = _text_of("/proc/self/cgroup")
        bounds.extend(control_group_memory(told, _GROUPS))
    return max(0, min(bounds) - _LEFT)


@contextlib.contextmanager
def in_turn(path: str) -> Iterator[None]:
    """A context manager that admits one process at a time of those that name the same file.

    So nobody else takes memory between a look at what is available and the allocation. Nobody waits
    for long: the wait is bounded, and there is none if the file cannot be opened.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            until = time.monotonic() + _TURN
            while not _locked(descriptor) and time.monotonic() < until:
                time.sleep(_LOOK)
        yield


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _machine_memory() -> int:
    for line in _text_of("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def control_group_memory(told: str, root: str) -> list[int]:
    """Bytes that each control group leaves of its limit, by the lines of /proc/self/cgroup.

    Both versions count: a machine may have the one, the other, or both. In a container the lines
    may name folders that are not to be seen there; then its own group is at `root`.
    """
    bounds: list[int] = []
    for line in told.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            bounds += _left_above(root, path, "memory.max", "memory.current", prefix="")
        elif "memory" in controllers.split(","):
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
            bounds += _left_above(f"{root}/memory", path, limit, used, prefix="total_")
    return bounds


def _left_above(top: str, path: str, limit: str, used: str, *, prefix: str) -> list[int]:
    """Bytes that the group at `path` below `top`, and each group above it, leaves."""
    bounds: list[int] = []
    folder = os.path.join(top, path.strip("/")).rstrip("/")
    while True:
        with contextlib.suppress(OSError, ValueError):
            most = int(_text_of(f"{folder}/{limit}"))  # "max" is no integer: no limit
            taken = int(_text_of(f"{folder}/{used}"))
            bounds.append(most - max(0, taken - _droppable(folder, prefix)))
        if folder in (top, "", "/"):
            return bounds
        folder = os.path.dirname(folder)


def _droppable(folder: str, prefix: str) -> int:
    """Bytes of file pages in a group; shared memory is not among them."""
    wanted = (f"{prefix}active_file", f"{prefix}inactive_file")
    pairs = (line.split() for line in _text_of(f"{folder}/memory.stat").splitlines())
    return sum(int(value) for name, value in pairs if name in wanted)


def _text_of(path: str) -> str:
    with open(path) as file:
        return file.read()
