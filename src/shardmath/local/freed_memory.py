"""Freed memory stays with a process that computes on cores, for the next array.

Arithmetic on arrays of a few MiB allocates and frees one for each result. The C library returns
freed memory of that size to the system at once, which has to clear pages again for the next array:
that can take longer than the arithmetic. See docs/decisions/freed-memory-stays.md.
"""

from __future__ import annotations

import ctypes

from shardmath.base import config

_SHARED = 32 << 20  # bytes of the largest arrays that go to the heap: glibc does not allow more
_KEPT = 256 << 20  # bytes at the end of the heap that may stay free
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, as malloc.h numbers them
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")


def keep_freed_memory() -> None:
    """Let glibc keep freed memory from now on, unless the user's variables configure that.

    Other C libraries decide for themselves.
    """
    said = config.environment()
    if any(name in said for name in _VARIABLES) or "glibc.malloc" in said.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _SHARED)
        mallopt(_TRIM_THRESHOLD, _KEPT)
