"""How a factor of a product lies in one rank's memory, as kernels that multiply must know."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Factor"]


@dataclass(frozen=True)
class Factor:
    """How a matrix lies: rows ("C") or columns ("F") are contiguous, and `pitch` elements apart."""

    order: str
    pitch: int
