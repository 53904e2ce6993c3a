"""How an operand of a product lies in one rank's memory, as kernels that multiply must know."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OperandLayout"]


@dataclass(frozen=True)
class OperandLayout:
    """How a matrix lies: rows ("C") or columns ("F") are contiguous, and `pitch` elements apart."""

    order: str
    pitch: int
