"""A matrix in memory that this rank's GPU can address: its own, or a peer's.

Strides are counted in elements and may be any numbers. `leading` tells whether BLAS can take a
matrix as it is.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from shardmath.arrays import dtypes

NO_MATRIX = bytes(24)  # as a kernel's argument

_MATRIX = struct.Struct("Qqq")
_ITEMSIZES = {name: dtypes.of(name).itemsize for name in dtypes.NAMES}


class Matrix(NamedTuple):
    """`rows` x `columns` elements; `address` is that of element (0, 0)."""

    address: int
    rows: int
    columns: int
    row_stride: int
    column_stride: int
    dtype: str

    @classmethod
    def packed(cls, address: int, shape: tuple[int, int], dtype: str, order: str) -> Matrix:
        """A matrix without gaps, by rows ("C") or by columns ("F")."""
        rows, columns = shape
        strides = (1, max(rows, 1)) if order == "F" else (max(columns, 1), 1)
        return cls(address, rows, columns, *strides, dtype)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return _ITEMSIZES[self.dtype]

    @property
    def argument(self) -> bytes:
        """The struct `Matrix` of the kernels, which get rows and columns separately."""
        return _MATRIX.pack(self.address, self.row_stride, self.column_stride)

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.rows * self.columns

    @property
    def by_columns(self) -> bool:
        """Whether neighbours in a column are closer in memory than neighbours in a row."""
        if self.rows == 1 or self.columns == 1:
            return self.columns == 1 and self.rows > 1
        return abs(self.row_stride) < abs(self.column_stride)

    @property
    def leading(self) -> int | None:
        """The distance between columns where each is contiguous, as BLAS wants it; else None."""
        if self.rows > 1 and self.row_stride != 1:
            return None
        distance = self.column_stride if self.columns > 1 else self.rows
        return distance if distance >= max(self.rows, 1) else None

    def transposed(self) -> Matrix:
        """The matrix on this memory whose rows are the columns of this one."""
        address, rows, columns, row_stride, column_stride, dtype = self
        return Matrix(address, columns, rows, column_stride, row_stride, dtype)

    def part(self, rows: tuple[int, int], columns: tuple[int, int]) -> Matrix:
        """The rows and columns in these ranges, each (first, behind the last)."""
        start = rows[0] * self.row_stride + columns[0] * self.column_stride
        return self._replace(
            address=self.address + start * self.itemsize,
            rows=rows[1] - rows[0],
            columns=columns[1] - columns[0],
        )
