"""One rank's part of a product that one kernel computes while it moves data. Pure."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import ClassVar

from shardmath.arrays.dtypes import HALVES
from shardmath.base.immutable import Immutable
from shardmath.cuda.device import Device
from shardmath.cuda.tensormap import ALIGNMENT
from shardmath.operators.matmul.gpu.tile_order import TILE_ROWS

_MOST_ELEMENTS = 1 << 34  # of the result


class OperandLayout(Immutable):
    """The layout of a matrix: contiguous rows ("C") or columns ("F"), `pitch` elements apart."""

    order: str
    pitch: int


class LocalProduct(Immutable):
    """(sum(rows) x depth) by (depth x columns), elements of `dtype`."""

    most_ranks: ClassVar[int]  # that the kernel can serve

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
        """The operations of this rank, multiplications and additions."""
        return 2.0 * self.height * self.columns * self.depth

    @property
    def same_everywhere(self) -> list[tuple[str, object]]:
        """What must be the same on all ranks, by name."""
        return [("the rows of each rank", list(self.rows)), ("dtype", self.dtype)]

    def unsupported(self, device: Device) -> str:
        """Why the kernel cannot do this product on `device`, or "" where it can."""
        if device.arch != "sm_90":
            return f"the kernel is for GPUs of capability 9.0, and this one is {device.arch}"
        if self.dtype not in HALVES:
            return f"elements are {self.dtype}, and the kernel multiplies {' and '.join(HALVES)}"
        if len(self.rows) > self.most_ranks:
            return f"{len(self.rows)} ranks, and the kernel is for {self.most_ranks} at most"
        for name, operand in (("A", self.a), ("B", self.b)):
            if 2 * operand.pitch % ALIGNMENT:
                return (
                    f"{name}'s {'rows' if operand.order == 'C' else 'columns'} are {operand.pitch} "
                    f"elements apart, and copies by boxes need a multiple of {ALIGNMENT // 2}"
                )
        return ""


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

    most_ranks = 32  # a sender keeps account of their slots in one word

    @property
    def same_everywhere(self) -> list[tuple[str, object]]:
        return [*super().same_everywhere, ("columns", self.columns)]

    def unsupported(self, device: Device) -> str:
        if reason := super().unsupported(device):
            return reason
        if not 0 < self.height * self.columns < _MOST_ELEMENTS:
            return f"the result is {self.height} x {self.columns}: empty, or too large"
        if self.a.order == "F" and any(first % 8 for first in accumulate(self.rows[:-1])):
            return "columns of A are contiguous, and a rank's rows do not begin at a multiple of 8"
        return ""


def even_rows(height: int, size: int) -> tuple[int, ...]:
    """How many of `height` rows each rank sums: whole tiles, as evenly as possible."""
    tiles = -(-height // TILE_ROWS)
    cuts = [min(height, tiles * rank // size * TILE_ROWS) for rank in range(size + 1)]
    return tuple(high - low for low, high in pairwise(cuts))
