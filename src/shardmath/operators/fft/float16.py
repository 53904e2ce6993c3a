"""Half precision on cores, where no library transforms it: computed in float32, rounded once.

An array of complex32 is a NumPy array of pairs; here it is converted to complex64 and back.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardmath.arrays import dtypes
from shardmath.arrays.base import HostArray
from shardmath.operators.fft.options import COMPUTE_TYPE
from shardmath.operators.fft.problem import Problem

__all__ = ["narrow_into", "wide", "wide_like", "widened"]


def widened(problem: Problem) -> Problem:
    """What is computed: the same transform from and to types that libraries know."""
    if "complex32" not in (problem.dtype, problem.result):
        return problem
    dtype = "complex64" if problem.dtype == "complex32" else problem.dtype
    return replace(problem, dtype=dtype, half_precision=False)


def wide(array: HostArray) -> HostArray:
    """complex64 for complex32; another array is returned as it is."""
    if array.dtype != dtypes.to_numpy("complex32"):
        return array
    made = wide_like(array)
    made.real, made.imag = array["real"], array["imag"]
    return made


def wide_like(array: HostArray) -> HostArray:
    """An array for what is to be rounded into `array`: complex64 for complex32, and so on."""
    name = COMPUTE_TYPE[dtypes.of(array.dtype).name]
    return np.empty_like(array, dtypes.to_numpy(name))


def narrow_into(array: HostArray, made: HostArray) -> None:
    """Round `made` into `array`. What is too large becomes infinite, as on GPUs."""
    with np.errstate(over="ignore"):
        if made.dtype.kind == "c":
            array["real"], array["imag"] = made.real, made.imag
        else:
            array[...] = made
