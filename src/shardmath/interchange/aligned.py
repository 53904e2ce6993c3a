"""NumPy arrays that begin where JAX can share them: at a multiple of 64 bytes.

An operand that is an `AlignedArray` computes as any of NumPy's does, and new results that follow
from it are plain ndarrays, aligned. JAX copies what begins elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from shardmath.arrays import dtypes
from shardmath.arrays.base import HostArray, Library
from shardmath.arrays.dtypes import DType
from shardmath.arrays.libraries.numpy import NumPy

ALIGNMENT = 64


class AlignedNumPy(NumPy):
    """NumPy, whose new arrays begin at a multiple of `ALIGNMENT` bytes."""

    def maker(
        self,
        shape: Sequence[int],
        dtype: DType | str,
        order: Literal["C", "F"],
        device: str = "cpu",
    ) -> Callable[[], HostArray]:
        """See Library."""
        if device != "cpu":
            raise ValueError(f"numpy has no arrays on {device}")
        native, extents = dtypes.to_numpy(dtype), tuple(shape)
        nbytes = math.prod(extents) * native.itemsize + ALIGNMENT

        def make() -> HostArray:
            raw = np.empty(nbytes, np.uint8)
            start = -raw.__array_interface__["data"][0] % ALIGNMENT
            return np.ndarray(extents, native, raw, start, order=order)

        return make


class AlignedArray(np.ndarray[Any, np.dtype[Any]]):
    """A view of an operand's memory, which asks for aligned results."""

    __shardmath_library__: ClassVar[Library] = AlignedNumPy()
