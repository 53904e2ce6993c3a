"""Copies of long rows, where the package was installed with a C compiler at hand.

`stream.c` says why. Without it, every copy goes through NumPy: the results are the same, large ones
take about half as long again, and those of some alignments several times as long.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from shardmath.base.compiled import library_beside
from shardmath.redistribution.copies import StridedCopy

__all__ = ["built", "streamer"]

Streamer = Callable[[StridedCopy, int, int, bool], bool]


@lru_cache(maxsize=1)
def built() -> Streamer | None:
    """What `streamer` makes of the library that was built with the package, or None without it."""
    library = library_beside(__file__, "_stream")
    return None if library is None else streamer(library)


def streamer(library: ctypes.CDLL) -> Streamer | None:
    """`copy(strided copy, source address, destination address, whether past the caches)`; None if
    that is another library.

    The copy returns False, having done nothing, on a processor that `stream.c` does not know.
    """
    function: Any = getattr(library, "shardmath_copy", None)
    if function is None:
        return None
    numbers = ctypes.POINTER(ctypes.c_int64)
    function.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int,
        numbers,
        numbers,
        numbers,
        ctypes.c_size_t,
        ctypes.c_int,
    ]

    def copy(box: StridedCopy, src: int, dst: int, past_caches: bool) -> bool:
        axes = [
            (ctypes.c_int64 * len(values))(*values)
            for values in (box.shape, box.dst_strides, box.src_strides)
        ]
        ends = dst + box.dst_offset, src + box.src_offset
        done = function(*ends, len(box.shape), *axes, box.unit, past_caches)
        return int(done) == 0

    return copy
