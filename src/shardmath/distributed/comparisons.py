"""Whether arrays are equal, or nearly: NumPy's `isclose`, `allclose` and `array_equal`."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardmath.distributed import reductions


def isclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Any:
    """Where |a - b| <= atol + rtol |b|, or both are the same infinity, as numpy.isclose."""
    with np.errstate(invalid="ignore"):  # the difference of infinities
        near = (abs(a - b) <= atol + rtol * abs(b)) & np.isfinite(b)
        same = near | (a == b)
        return same | (np.isnan(a) & np.isnan(b)) if equal_nan else same


def allclose(
    a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    """Whether all elements are close, on every rank, as numpy.allclose. Collective."""
    return bool(reductions.all(isclose(a, b, rtol, atol, equal_nan)))


def array_equal(a1: Any, a2: Any, equal_nan: bool = False) -> bool:
    """Whether shapes and elements are equal, on every rank, as numpy.array_equal. Collective."""
    if np.shape(a1) != np.shape(a2):
        return False
    same = a1 == a2
    return bool(reductions.all(same | (np.isnan(a1) & np.isnan(a2)) if equal_nan else same))
