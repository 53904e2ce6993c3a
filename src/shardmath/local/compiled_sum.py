"""Sums of several ranks' arrays in one pass, where the package was installed with a C compiler.

`sum.c` says why. Without it, and for other operations and types, NumPy does the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from shardmath.arrays import dtypes
from shardmath.arrays.base import HostArray
from shardmath.base.compiled import library_beside

LEAST = 64 << 10  # bytes of a row, from which on the call gains more than it costs
_SUMMED = ("float32", "float64", "int32", "int64")


def add(inputs: Sequence[HostArray], outputs: Sequence[HostArray]) -> bool:
    """Set each output to the sum of the inputs. All are two-dimensional, of one shape; an output
    may be the very memory of an input.

    Returns False, having done nothing, where NumPy is needed, or does better.
    """
    first = inputs[0]
    rows, columns = first.shape
    nbytes = columns * first.itemsize
    function = None if nbytes < LEAST else functions().get(_numbers_of(first.dtype))
    if function is None or not all(_in_rows(array, first) for array in (*inputs, *outputs)):
        return False
    for row in range(rows):
        sources, targets = (
            (ctypes.c_void_p * len(arrays))(*(array[row].ctypes.data for array in arrays))
            for arrays in (inputs, outputs)
        )
        function(len(inputs), sources, len(outputs), targets, nbytes)
    return True


def address_for(dtype: np.dtype[Any]) -> int | None:
    """The address of the function of `sum.c` that adds elements of this type; None if there is
    none.
    """
    function = functions().get(_numbers_of(dtype))
    return ctypes.cast(function, ctypes.c_void_p).value if function else None


@lru_cache(maxsize=1)
def functions() -> dict[str, Any]:
    """The functions of `sum.c`, by the type of numbers that they add; none if it was not built."""
    library = library_beside(__file__, "_sum")
    return {} if library is None else functions_of(library)


def functions_of(library: ctypes.CDLL) -> dict[str, Any]:
    """The functions of that library; none if it is another."""
    try:
        functions = {name: getattr(library, f"shardmath_sum_{name}") for name in _SUMMED}
    except AttributeError:
        return {}
    for function in functions.values():
        function.argtypes = [ctypes.c_int, ctypes.c_void_p] * 2 + [ctypes.c_int64]
        function.restype = None
    return functions


@lru_cache(maxsize=64)
def _numbers_of(dtype: np.dtype[Any]) -> str:
    """The type of the numbers to add: parts of complex ones, and signed in place of unsigned."""
    known = dtypes.of(dtype)
    return known.real or known.name.removeprefix("u")


def _in_rows(array: HostArray, like: HostArray) -> bool:
    return (
        array.dtype == like.dtype
        and array.dtype.isnative
        and array.strides[1] == array.itemsize
        and array.flags.aligned
    )
