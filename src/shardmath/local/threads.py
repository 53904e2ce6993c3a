"""The number of threads of one rank's arithmetic: of BLAS, and of Fourier transforms.

The user sets it by SHARDMATH_THREADS, as `run --threads` does, or by OMP_NUM_THREADS. Otherwise
ranks that may run on the same cores share them. Libraries of BLAS and OpenMP that use more are
limited while a context is open, unless the user has set their number.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from shardmath.base import config
from shardmath.base.immutable import Immutable

_COMMON = "OMP_NUM_THREADS"
_VARIABLES = {  # a library reads its own before the common one
    "openblas": "OPENBLAS_NUM_THREADS",
    "mkl": "MKL_NUM_THREADS",
    "blis": "BLIS_NUM_THREADS",
}
# How the names of such libraries' files begin.
_FILES = (
    *("libopenblas", "libscipy_openblas", "libblas", "libmkl_rt", "libblis"),
    *("libgomp", "libiomp", "libomp"),
)
# The functions that return and set the number of threads. OpenBLAS's have a prefix in the wheels of
# NumPy and SciPy, and a suffix where it indexes with 64 bits.
_FUNCTIONS = [
    (
        "openblas",
        f"{prefix}openblas_get_num_threads{suffix}",
        f"{prefix}openblas_set_num_threads{suffix}",
    )
    for prefix in ("", "scipy_")
    for suffix in ("", "64_", "_64")
]
_FUNCTIONS += [
    ("mkl", "MKL_Get_Max_Threads", "MKL_Set_Num_Threads"),
    ("blis", "bli_thread_get_num_threads", "bli_thread_set_num_threads"),
    ("openmp", "omp_get_max_threads", "omp_set_num_threads"),
]


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
    first. Where there is a thread for each core nothing is to be lowered, and nothing is looked at.
    """

    _open: ClassVar[list[ThreadLimit]] = []
    _changed: ClassVar[dict[str, tuple[int, int]]] = {}  # by library: before the first, and now

    def __init__(self, threads: int, setting: int) -> None:
        """`setting` as for `threads_per_rank`: other values of variables are the user's."""
        self._open.append(self)
        if threads >= len(os.sched_getaffinity(0)):
            return
        for library in _libraries():
            count = library.count()
            if count <= threads or _set_by_user(library.kind, setting):
                continue
            before, _ = self._changed.get(library.path, (count, 0))
            library.limit(threads)
            self._changed[library.path] = before, threads

    def end(self) -> None:
        """Undo the limit, but for what the user has set since. A second call does nothing."""
        if self not in self._open:
            return
        self._open.remove(self)
        if self._open or not self._changed:
            return
        for library in _libraries():
            before, limit = self._changed.pop(library.path, (0, -1))
            if library.count() == limit:
                library.limit(before)
        self._changed.clear()


class _Library(Immutable):
    """A loaded library that computes with several threads, and its functions of their number."""

    kind: str
    path: str
    count: Callable[[], int]
    limit: Callable[[int], object]


def _libraries() -> list[_Library]:
    """The libraries of BLAS and OpenMP that this process has mapped."""
    mapped = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    paths = dict.fromkeys(line[line.index("/") :] for line in mapped if ".so" in line)
    found = [_library_at(path) for path in paths if path.rpartition("/")[2].startswith(_FILES)]
    return [library for library in found if library is not None]


def _library_at(path: str) -> _Library | None:
    """The library that is loaded from `path`; None where it has no such functions."""
    with suppress(OSError):  # the file was replaced or removed after it was loaded
        loaded = ctypes.CDLL(path, os.RTLD_NOLOAD)
        for kind, count, limit in _FUNCTIONS:
            if hasattr(loaded, count):
                return _Library(kind, path, loaded[count], loaded[limit])
    return None


def _set_by_user(kind: str, setting: int) -> bool:
    """Whether the user, and not our launcher, has set a variable for such a library."""
    said = [config.environment().get(name) for name in (_VARIABLES.get(kind, _COMMON), _COMMON)]
    return any(value is not None and value != str(setting) for value in said)


def _cores_of(pid: int, otherwise: set[int]) -> set[int]:
    """The cores of a process; `otherwise` where it cannot be seen from here."""
    with suppress(OSError):
        return os.sched_getaffinity(pid)
    return otherwise
