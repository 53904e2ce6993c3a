"""Eight-bit floats on one rank: numbers from elements and scales, and elements from numbers.

An element stands for itself times the scale of its block. Blocks are counted from the first element
of a local part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from shardmath.arrays import dtypes
from shardmath.arrays.base import HostArray

BLOCK = 128  # elements along a side of a block, as cuBLASLt has them on Hopper
_STRIP = 1 << 20  # elements that are converted at once


class Blocks(NamedTuple):
    """The rows and columns of a block, which has one scale; None for all of them."""

    rows: int | None
    columns: int | None

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """The shape of the scales of a part of `rows` x `columns` elements."""
        return _count(rows, self.rows), _count(columns, self.columns)


def _count(extent: int, block: int | None) -> int:
    return 1 if block is None else -(-extent // block)


def dequantize(x: HostArray, scales: HostArray, blocks: Blocks, out: HostArray) -> None:
    """Set `out`, of float32, to the numbers that the elements of `x` stand for.

    `scales` has the shape that `blocks` gives for that of `x`.
    """
    rows, columns = x.shape
    assert scales.shape == blocks.shape(rows, columns), (scales.shape, blocks, x.shape)
    for top, bottom in _strips(rows, columns):
        block_rows = np.arange(top, bottom) // (blocks.rows or max(rows, 1))
        strip = scales[block_rows]
        if blocks.columns is not None:
            strip = np.repeat(strip, blocks.columns, axis=1)[:, :columns]
        np.multiply(x[top:bottom].astype(np.float32), strip, out=out[top:bottom])


def quantize(x: HostArray, scale: float, out: HostArray) -> None:
    """Set `out`, of an eight-bit type, to `x` times `scale`, rounded to the nearest.

    Too large numbers, and infinities, become the greatest finite number of their sign; NaN stays.
    """
    most: Any = np.float32(dtypes.of(out.dtype).largest)
    rows, columns = x.shape
    for top, bottom in _strips(rows, columns):
        strip = x[top:bottom] * np.float32(scale)
        np.clip(strip, -most, most, out=strip)
        out[top:bottom] = strip.astype(out.dtype)


def _strips(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows with at most _STRIP elements, but at least one row."""
    step = max(1, _STRIP // max(columns, 1))
    for top in range(0, rows, step):
        yield top, min(top + step, rows)
