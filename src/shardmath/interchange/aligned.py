"""NumPy arrays that begin where JAX can share them: at a multiple of 64 bytes.

An operand that is an `AlignedArray` computes as any of NumPy's does, and new results that follow
from it are plain ndarrays, aligned. JAX copies what begins elsewhere.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from shardmath.arrays.base import HostArray, Library
from shardmath.arrays.libraries.numpy import NumPy
from shardmath.arrays.spec import Packed

ALIGNMENT = 64


class AlignedNumPy(NumPy):
    """NumPy, whose new arrays begin at a multiple of `ALIGNMENT` bytes."""

    @staticmethod
    def _new(shape: tuple[int, ...], dtype: np.dtype[Any], order: Packed) -> HostArray:
        raw = np.empty(math.prod(shape) * dtype.itemsize + ALIGNMENT, np.uint8)
        start = -raw.__array_interface__["data"][0] % ALIGNMENT
        return np.ndarray(shape, dtype, raw, start, order=order)


class AlignedArray(np.ndarray[Any, np.dtype[Any]]):
    """A view of an operand's memory, which asks for aligned results."""

    __shardmath_library__: ClassVar[Library] = AlignedNumPy()
