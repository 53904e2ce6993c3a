"""The number of threads of one rank's arithmetic: of BLAS, and of Fourier transforms.

The user sets it by SHARDMATH_THREADS, as `run --threads` does, or by OMP_NUM_THREADS. Otherwise
ranks that may run on the same cores share them. Libraries of BLAS and OpenMP that use more are
limited while a context is open, unless the user has set their number.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, ClassVar

from shardmath.base import config

_COMMON = "OMP_NUM_THREADS"
_VARIABLES = {  # a library reads its own before the common one
    "openblas": "OPENBLAS_NUM_THREADS",
    "mkl": "MKL_NUM_THREADS",
    "blis": "BLIS_NUM_THREADS",
}


def threads_per_rank(setting: int, pids: Iterable[int]) -> int:
    """The threads of this rank's arithmetic; at least 1.

    `setting` is SHARDMATH_THREADS, 0 if it is not set. `pids` are the processes of all ranks on
    this machine, this one among them.
    """
    if setting > 0:
        return setting
    said = config.environment().get(_COMMON, "").partition(",")[0].strip()  # "4,2" for nested teams
    if said.isdigit() and int(said) > 0:
        return int(said)
    cores = os.sched_getaffinity(0)
    sharing = sum(not cores.isdisjoint(_cores_of(pid, cores)) for pid in pids)
    return max(1, len(cores) // max(1, sharing))


class ThreadLimit:
    """Lowers the number of threads of loaded libraries, from `__init__` to `end`.

    Several limits at a time only lower it further, and the last to end restores what was before the
    first. Without threadpoolctl a limit does nothing. It takes milliseconds, unless there is a
    thread for each core: libraries use no more by themselves.
    """

    _open: ClassVar[list[ThreadLimit]] = []
    _changed: ClassVar[dict[str, tuple[int, int]]] = {}  # by library: before the first, and now

    def __init__(self, threads: int, setting: int) -> None:
        """`setting` as for `threads_per_rank`: other values of variables are the user's."""
        self._open.append(self)
        if threads >= len(os.sched_getaffinity(0)):
            return
        for library in _libraries():
            if library.num_threads <= threads or _set_by_user(library.internal_api, setting):
                continue
            before, _ = self._changed.get(library.filepath, (library.num_threads, 0))
            library.set_num_threads(threads)
            self._changed[library.filepath] = before, threads

    def end(self) -> None:
        """Undo the limit, but for what the user has set since. A second call does nothing."""
        if self not in self._open:
            return
        self._open.remove(self)
        if self._open or not self._changed:
            return
        for library in _libraries():
            before, limit = self._changed.pop(library.filepath, (0, -1))
            if library.num_threads == limit:
                library.set_num_threads(before)
        self._changed.clear()


def _libraries() -> list[Any]:
    """The loaded libraries of BLAS and OpenMP; none where threadpoolctl is not installed."""
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:
        return []
    return list(ThreadpoolController().lib_controllers)


def _set_by_user(kind: str, setting: int) -> bool:
    """Whether the user, and not our launcher, has set a variable for such a library."""
    said = [config.environment().get(name) for name in (_VARIABLES.get(kind, _COMMON), _COMMON)]
    return any(value is not None and value != str(setting) for value in said)


def _cores_of(pid: int, otherwise: set[int]) -> set[int]:
    """The cores of a process; `otherwise` where it cannot be seen from here."""
    with suppress(OSError):
        return os.sched_getaffinity(pid)
    return otherwise
