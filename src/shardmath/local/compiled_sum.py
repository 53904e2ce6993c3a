"""Sums of what several ranks have, in one pass, where the package was installed with a C compiler.

`sum.c` says why. Without it, and for other operations and types, NumPy does the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from shardmath.arrays import dtypes
from shardmath.arrays.base import HostArray
from shardmath.base.compiled import library_beside

Sums = Callable[[Sequence[HostArray], Sequence[HostArray]], bool]

LEAST = 64 << 10  # bytes of a row from which on the call costs less than it gains
_SUMMED = ("float32", "float64", "int32", "int64")


@lru_cache(maxsize=1)
def built() -> Sums | None:
    """The sums of the library that was built with the package, or None without it."""
    library = library_beside(__file__, "_sum")
    return None if library is None else sums(library)


def sums(library: ctypes.CDLL) -> Sums | None:
    """`add(inputs, outputs)`: each output becomes the sum of the inputs. None if there is none.

    All are two-dimensional, of one shape; an output may be the very memory of an input. Returns
    False, having done nothing, where NumPy is needed, or does better.
    """
    functions = _functions(library)
    if functions is None:
        return None
    for function in functions.values():
        function.argtypes = [ctypes.c_int, ctypes.c_void_p] * 2 + [ctypes.c_int64]
        function.restype = None

    def add(inputs: Sequence[HostArray], outputs: Sequence[HostArray]) -> bool:
        first = inputs[0]
        rows, columns = first.shape
        nbytes = columns * first.itemsize
        if nbytes < LEAST:
            return False
        function = functions.get(_numbers_of(first.dtype))
        whole = all(_in_rows(each, first) for each in (*inputs, *outputs))
        if function is None or not whole:
            return False
        for row in range(rows):
            taken, made = (
                (ctypes.c_void_p * len(arrays))(*(each[row].ctypes.data for each in arrays))
                for arrays in (inputs, outputs)
            )
            function(len(inputs), taken, len(outputs), made, nbytes)
        return True

    return add


def address_for(dtype: np.dtype[Any]) -> int | None:
    """Where compiled code finds the function of `sum.c` that adds elements of this type; None where
    there is none.
    """
    library = library_beside(__file__, "_sum")
    functions = None if library is None else _functions(library)
    function = functions and functions.get(_numbers_of(dtype))
    return ctypes.cast(function, ctypes.c_void_p).value if function else None


def _functions(library: ctypes.CDLL) -> dict[str, Any] | None:
    try:
        return {name: getattr(library, f"shardmath_sum_{name}") for name in _SUMMED}
    except AttributeError:
        return None


@lru_cache(maxsize=64)
def _numbers_of(dtype: np.dtype[Any]) -> str:
    """The type of the numbers of which such elements consist, as additions see them."""
    known = dtypes.of(dtype)
    return known.real or known.name.removeprefix("u")


def _in_rows(array: HostArray, like: HostArray) -> bool:
    return (
        array.dtype == like.dtype
        and array.dtype.isnative
        and array.strides[1] == array.itemsize
        and array.flags.aligned
    )
