"""One rank's part of a product that one kernel computes while it moves data. Pure.

It says, too, why the kernel may not fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from shardmath.arrays.dtypes import HALVES
from shardmath.cuda.device import Device
from shardmath.cuda.tensormap import ALIGNMENT
from shardmath.operators.matmul.gpu.tile_order import TILE_ROWS

_MOST_RANKS = 32  # whose slots a sender keeps account of in one word
_MOST_ELEMENTS = 1 << 34  # of the result


@dataclass(frozen=True)
class OperandLayout:
    """How a matrix lies: rows ("C") or columns ("F") are contiguous, and `pitch` elements apart."""

    order: str
    pitch: int


@dataclass(frozen=True)
class LocalProduct:
    """(sum(rows) x depth) by (depth x columns), elements of `dtype`."""

    rows: tuple[int, ...]
    columns: int
    depth: int
    dtype: str
    a: OperandLayout
    b: OperandLayout

    @property
    def height(self) -> int:
        """Rows of A on this rank, and of the result."""
        return sum(self.rows)

    @property
    def flops(self) -> float:
        """Of this rank: a multiplication and an addition count as two."""
        return 2.0 * self.height * self.columns * self.depth


@dataclass(frozen=True)
class SplitKProduct(LocalProduct):
    """A product of operands that are split along k, whose parts are added.

    Rank r has all rows of its columns of A and its rows of B. Its product is a part of every
    element of the result; the parts are added, and rank r keeps `rows[r]` rows of the sum, or all.

                   k of rank 0   1   2
        A  m rows  [  0  |  1  |  2  ]        B  [ 0 ]        result  [ rows of rank 0 ]
                                                 [ 1 ]  n             [ rows of rank 1 ]
                                                 [ 2 ]                [ rows of rank 2 ]

    `rows`, `columns` and `dtype` are the same on all ranks; `depth`, this rank's part of k, and the
    layouts `a` and `b` may differ.
    """

    @property
    def same_everywhere(self) -> list[tuple[str, object]]:
        """Facts that must be the same on all ranks, by name."""
        return [
            ("the rows of each rank", list(self.rows)),
            ("columns", self.columns),
            ("dtype", self.dtype),
        ]

    def unsupported(self, device: Device) -> str:
        """Why `device` cannot multiply so with tiles that are sent, or "" where it can."""
        if reason := no_kernel(device, self.dtype):
            return reason
        if len(self.rows) > _MOST_RANKS:
            return f"{len(self.rows)} ranks, and the kernel sends to {_MOST_RANKS} at most"
        if not 0 < self.height * self.columns < _MOST_ELEMENTS:
            return f"the result is {self.height} x {self.columns}: empty, or too large"
        if self.a.order == "F" and any(first % 8 for first in accumulate(self.rows[:-1])):
            return "columns of A are contiguous, and a rank's rows do not begin at a multiple of 8"
        odd = [f"{f.pitch} elements" for f in (self.a, self.b) if 2 * f.pitch % ALIGNMENT]
        need = f"need a multiple of {ALIGNMENT // 2}"
        return f"an operand's lines are {odd[0]} apart, and copies by boxes {need}" if odd else ""


def no_kernel(device: Device, dtype: str) -> str:
    """Why no kernel multiplies elements of that type on `device` while it moves data, or ""."""
    if device.arch != "sm_90":
        return f"the kernel is for GPUs of capability 9.0, and this one is {device.arch}"
    if dtype not in HALVES:
        return f"elements are {dtype}, and the kernel multiplies {' and '.join(HALVES)}"
    return ""


def even_rows(height: int, size: int) -> tuple[int, ...]:
    """Which rank sums how many of `height` rows: whole tiles, as evenly as they go."""
    tiles = -(-height // TILE_ROWS)
    cuts = [min(height, tiles * rank // size * TILE_ROWS) for rank in range(size + 1)]
    return tuple(high - low for low, high in pairwise(cuts))
