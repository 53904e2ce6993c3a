"""What one rank multiplies in a product that one kernel computes while it moves data: pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LocalProduct", "OperandLayout"]


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
