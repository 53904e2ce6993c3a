"""One rank's matrix product, at BLAS speed for every stride, order and floating type.

Operands that NumPy's BLAS can multiply are passed as they are. Others (halves, mixed types,
conjugates) are converted block by block, so that temporaries stay bounded. Sums are taken in at
least float32, and an element of `out` is rounded once per call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np

from shardmath.arrays import dtypes
from shardmath.arrays.base import HostArray
from shardmath.base.compiled import CompiledStep
from shardmath.base.integers import slices

# Converting an n x n block costs about 1/n of multiplying it: at 2048, 1 to 5 %. Three such blocks
# of float32 are alive at once, 48 MB.
_CONVERTED = 2048
# Adding needs a temporary for the product. The fewer rows it has, the more often BLAS packs `b`: at
# 2048^2 that costs 1 to 3 % of the time with 2048 rows, 5 % with 1024 or 512, 14 % with 128.
_ADDED_BYTES, _ADDED_ROWS = 64 << 20, 512


def bind(
    a: HostArray,
    b: HostArray,
    out: HostArray,
    *,
    accumulate: bool = False,
    conj_a: bool = False,
    conj_b: bool = False,
) -> Callable[[], object]:
    """A call that sets `out` to a @ b each time, or with `accumulate` to out + a @ b.

    `a` is (m, k) and `b` (k, n), with any strides; `conj_a` and `conj_b` take their conjugates. The
    sums are taken in float32 for narrower floats, and otherwise in the type that both operands
    promote to. `out`, which must not overlap `a` or `b`, may be wider or narrower than that. k = 0
    counts as a product of zeros; integers wrap, NaN and infinity spread, as in NumPy. Raises
    ValueError for extents or types that do not fit.
    """
    work = accumulator_of(a.dtype, b.dtype)
    shape = (a.shape[0], b.shape[1])
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"a of shape {a.shape} and b of shape {b.shape} do not multiply")
    if out.shape != shape:
        raise ValueError(f"out has shape {out.shape}, the product {shape}")
    if out.dtype != work and not _holds(out.dtype, work):
        raise ValueError(f"out of {out.dtype} cannot hold a product of {work}")
    conj_a, conj_b = conj_a and a.dtype.kind == "c", conj_b and b.dtype.kind == "c"
    if out.size == 0 or a.shape[1] == 0:
        return partial(out.fill, 0) if not accumulate else _nothing
    target = out
    if abs(out.strides[0]) < abs(out.strides[1]):  # BLAS writes rows: columns are those of out.T
        target, a, b, conj_a, conj_b = out.T, b.T, a.T, conj_b, conj_a
    if a.dtype == b.dtype == out.dtype == work and not (conj_a or conj_b):
        if not accumulate:
            return CompiledStep(np.matmul, a, b, target)
        return partial(_multiply_plain, a, b, target, accumulate)
    return partial(
        _multiply_converted,
        *(a, b, target),
        work=work,
        accumulate=accumulate,
        conj_a=conj_a,
        conj_b=conj_b,
    )


def _nothing() -> None:
    """Add a product of nothing."""


@lru_cache(maxsize=256)
def accumulator_of(a: np.dtype[Any], b: np.dtype[Any]) -> np.dtype[Any]:
    """The type in which products of elements of these types are summed. Raises ValueError."""
    own = [dtypes.accumulator(dtype) for dtype in (a, b)]
    if "V" in (own[0].kind, own[1].kind):
        raise ValueError(f"{a} and {b} are no numbers to multiply")
    return np.result_type(*map(dtypes.to_numpy, own))


def _holds(holder: np.dtype[Any], held: np.dtype[Any]) -> bool:
    """Whether `holder` can hold values of `held`, but for rounding."""
    order = "buifc"
    return order.find(dtypes.of(held).kind) <= order.find(dtypes.of(holder).kind)


def _multiply_plain(a: HostArray, b: HostArray, out: HostArray, accumulate: bool) -> None:
    """Multiply matrices that are all of one type that `np.matmul` handles."""
    if not accumulate:
        np.matmul(a, b, out=out)
        return
    room = _ADDED_BYTES // out.itemsize  # elements of the temporary
    for columns in slices(out.shape[1], room // _ADDED_ROWS):
        for rows in slices(out.shape[0], room // (columns.stop - columns.start)):
            part = out[rows, columns]
            np.add(part, np.matmul(a[rows], b[:, columns]), out=part)


def _multiply_converted(
    a: HostArray,
    b: HostArray,
    out: HostArray,
    *,
    work: np.dtype[Any],
    accumulate: bool,
    conj_a: bool,
    conj_b: bool,
) -> None:
    """Convert blocks of `a` and `b` to `work`, sum there, and round each block of `out` once."""
    for rows in slices(out.shape[0], _CONVERTED):
        for columns in slices(out.shape[1], _CONVERTED):
            part = out[rows, columns]
            total = part if out.dtype == work else np.empty(part.shape, work)
            if accumulate and total is not part:
                total[...] = part
            started = accumulate
            for inner in slices(a.shape[1], _CONVERTED):
                left = _converted(a[rows, inner], work, conj_a)
                right = _converted(b[inner, columns], work, conj_b)
                _multiply_plain(left, right, total, started)
                started = True
            if total is not part:
                part[...] = total


def _converted(x: HostArray, work: np.dtype[Any], conjugate: bool) -> HostArray:
    """`x` as `work`, in its own memory order."""
    if not conjugate:
        return x.astype(work, order="K", copy=False)
    y = x.astype(work, order="K")
    np.conjugate(y, out=y)
    return y
