"""Large copies past the caches, where the package was installed with a C compiler at hand.

`stream.c` says why. Without it, every copy goes through NumPy: the results are the same, and large
ones take about half as long again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from shardmath.redistribution.copies import StridedCopy

__all__ = ["built", "load"]

Streamer = Callable[[StridedCopy, int, int], bool]


@lru_cache(maxsize=1)
def built() -> Streamer | None:
    """What `load` makes of the library that was built with the package, or None without it."""
    here = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        path = here / f"_stream{suffix}"
        if path.exists():
            return load(path)
    return None


def load(path: Path) -> Streamer | None:
    """`copy(strided copy, source address, destination address)`; None if it cannot be loaded.

    The copy returns False, having done nothing, where the machine has no streaming stores.
    """
    try:
        function: Any = ctypes.CDLL(str(path)).shardmath_stream
    except (OSError, AttributeError):
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
    ]

    def copy(box: StridedCopy, src: int, dst: int) -> bool:
        axes = [
            (ctypes.c_int64 * len(values))(*values)
            for values in (box.shape, box.dst_strides, box.src_strides)
        ]
        done = function(dst + box.dst_offset, src + box.src_offset, len(box.shape), *axes, box.unit)
        return int(done) == 0

    return copy
