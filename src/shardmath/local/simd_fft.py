"""Transforms of many lines at once, where the package was installed with a C compiler at hand.

`simd_fft.c` says why. Lengths with other factors than 2, 3 and 5, real lines of odd length, very
long lines and a few lines only are left to libraries; so is everything where there was no compiler.
"""

from __future__ import annotations

import ctypes
import math
import threading
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from shardmath.arrays.base import HostArray
from shardmath.compiled import library_beside

__all__ = ["SimdFFT", "built", "transforms"]

_KINDS = {"C2C": 0, "R2C": 1, "C2R": 2}
_RADIXES = (4, 2, 3, 5)
_LONGEST = 2048  # elements of a line: beyond, a batch of them exceeds the second cache of a core
_WIDE = {  # the complex type, for those of source and destination
    (np.dtype(src), np.dtype(dst)): np.dtype(wide)
    for real, wide in (("float32", "complex64"), ("float64", "complex128"))
    for src, dst in ((wide, wide), (real, wide), (wide, real))
}
_held = threading.local()  # each thread's work space, the largest so far


class _Batch(ctypes.Structure):
    """`Batch` of simd_fft.c."""

    _fields_ = [
        ("kind", ctypes.c_int64),
        ("inverse", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("circle", ctypes.c_int64),
        ("extents", ctypes.c_int64 * 2),
        ("src_strides", ctypes.c_int64 * 2),
        ("src_step", ctypes.c_int64),
        ("dst_strides", ctypes.c_int64 * 2),
        ("dst_step", ctypes.c_int64),
        ("scale", ctypes.c_double),
        ("factors", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("twiddles", ctypes.c_void_p),
    ]


class SimdFFT:
    """The functions of the library, for vectors of `width` bytes."""

    def __init__(self, function: Any, width: int) -> None:
        self._function = function
        self.width = width

    def transform(
        self,
        x: HostArray,
        axes: tuple[int, ...],
        *,
        out: HostArray,
        kind: str,
        forward: bool,
        divisor: float,
    ) -> bool:
        """Write the transform of `x` along `axes`, divided by `divisor`, to `out`.

        `out` may be `x` itself; C2R may overwrite `x`. The real axis is the last. Returns False,
        having done nothing, where libraries are needed, or do better.
        """
        src, dst = x.__array_interface__["data"][0], out.__array_interface__["data"][0]
        specs = (x.dtype, x.shape, x.strides), (out.dtype, out.shape, out.strides)
        plan = _plan(*specs, axes, kind, forward, divisor, self.width)
        if plan is None or (src | dst) % plan.alignment:
            return False
        work = _work(plan.room)
        for batch in plan.batches[:-1]:
            between = src if kind == "C2R" else dst
            self._function(self.width, plan.double, batch, src, between, work)
            src = between
        self._function(self.width, plan.double, plan.batches[-1], src, dst, work)
        return True


@dataclass(frozen=True)
class _Plan:
    """The calls that transform along several axes: `room` is the bytes of their work space."""

    batches: tuple[_Batch, ...]
    room: int
    alignment: int
    double: bool


_Spec = tuple[np.dtype[Any], tuple[int, ...], tuple[int, ...]]  # dtype, shape, strides


@lru_cache(maxsize=1024)
def _plan(
    x: _Spec,
    out: _Spec,
    axes: tuple[int, ...],
    kind: str,
    forward: bool,
    divisor: float,
    width: int,
) -> _Plan | None:
    """How to transform, one axis after the other: the real axis first for R2C, and last for C2R."""
    wide = _WIDE.get((x[0], out[0]))
    shape = x[1] if kind == "R2C" else out[1]
    if wide is None or len(shape) > 3:
        return None
    size = wide.itemsize // 2
    few = any(math.prod(shape) < width // size * shape[axis] for axis in axes)
    if few or any(stride % size for stride in (*x[2], *out[2])):
        return None
    batches: list[_Batch] = []
    for axis in axes if kind == "C2R" else axes[::-1]:
        here = kind if axis == axes[-1] else "C2C"
        if _radixes(shape[axis], here) is None:
            return None
        last = len(batches) == len(axes) - 1
        src = x if kind == "C2R" or not batches else out
        dst = x if kind == "C2R" and not last else out
        scale = 1 / divisor if last else 1.0
        batches.append(_batch(src, dst, axis, shape[axis], here, forward, scale))
    longest = max(shape[axis] for axis in axes)
    return _Plan(tuple(batches), 2 * (longest + 1) * width, size, size == 8)


def _batch(
    src: _Spec, dst: _Spec, axis: int, length: int, kind: str, forward: bool, scale: float
) -> _Batch:
    """One call. Of the lines that it transforms the closest are next to each other."""
    radixes = _radixes(length, kind)
    assert radixes is not None, "asked before"
    tables = _tables(radixes, length, _WIDE[src[0], dst[0]])
    others = sorted(
        (each for each in range(len(src[1])) if each != axis),
        key=lambda each: abs(dst[2][each]),
        reverse=True,
    )
    two = ctypes.c_int64 * 2
    extents, starts, ends = (
        two(*[missing] * (2 - len(others)), *(values[each] for each in others))
        for values, missing in ((src[1], 1), (src[2], 0), (dst[2], 0))
    )
    return _Batch(
        _KINDS[kind],
        not forward,
        math.prod(radixes),
        length,
        extents,
        starts,
        src[2][axis],
        ends,
        dst[2][axis],
        scale,
        *(table.ctypes.data for table in tables),
    )


@lru_cache(maxsize=1)
def built() -> SimdFFT | None:
    """What `transforms` makes of the library that was built with the package, or None."""
    library = library_beside(__file__, "_simd_fft")
    return None if library is None else transforms(library)


def transforms(library: ctypes.CDLL, width: int | None = None) -> SimdFFT | None:
    """The library's functions for the widest vectors of this processor, or those of `width` bytes.

    None if that is another library, or has no functions for this processor.
    """
    try:
        function: Any = library.shardmath_fft
        widest = int(library.shardmath_fft_width())
    except AttributeError:
        return None
    if widest == 0 or (width is not None and width > widest):
        return None
    pointers = [ctypes.POINTER(_Batch), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    function.argtypes = [ctypes.c_int, ctypes.c_int, *pointers]
    function.restype = None
    return SimdFFT(function, width or widest)


@cache
def _radixes(length: int, kind: str) -> tuple[int, ...] | None:
    """Of the passes over a line, which is as long as their product, or twice as long if it is real;
    None where a library has to transform it.
    """
    rest, odd = divmod(length, 1 if kind == "C2C" else 2)
    if odd or not 0 < length <= _LONGEST:
        return None
    found: list[int] = []
    for radix in _RADIXES:
        while rest % radix == 0:
            found.append(radix)
            rest //= radix
    return tuple(found) if rest == 1 else None


@cache
def _tables(radixes: tuple[int, ...], length: int, dtype: np.dtype[Any]) -> tuple[HostArray, ...]:
    """The radixes and a zero; where each element of a line goes before the first pass, which is its
    digits reversed; and exp(-2 pi i k / length) for k = 0, ..., length.
    """
    order = np.arange(math.prod(radixes)).reshape(radixes[::-1]).transpose().reshape(-1)
    turn = 2 * np.arctan2(np.longdouble(0), np.longdouble(-1))  # 2 pi in all its digits
    k = np.arange(length + 1)
    angles = -turn * np.where(2 * k > length, k - length, k).astype(np.longdouble) / length
    twiddles = (np.cos(angles) + 1j * np.sin(angles)).astype(dtype)
    return np.array([*radixes, 0], np.int64), order, twiddles


def _work(nbytes: int) -> int:
    """The address of this thread's work space, aligned for vectors."""
    held = getattr(_held, "memory", None)
    if held is None or held.nbytes < nbytes + 64:
        held = _held.memory = np.empty(nbytes + 64, np.uint8)
    address = int(held.__array_interface__["data"][0])
    return address + -address % 64
