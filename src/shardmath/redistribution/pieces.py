"""Which bytes of a peer's local array a copy reads, for memory that is fetched piece by piece.

Pure, as the copies are. Fetching costs by the number of pieces and by their bytes: what lies close
together is fetched in one piece, with what lies between.
"""

from __future__ import annotations

from itertools import product
from math import prod

from shardmath.redistribution.copies import StridedCopy, strided_copy

__all__ = ["pieces_of"]

_PIECE = 32 << 10  # bytes that a network carries in about the time that one more piece takes


def pieces_of(copy: StridedCopy) -> list[tuple[int, int]]:
    """Ranges of bytes of the source, from its element 0, that hold what `copy` reads.

    Each unit alone where they are long enough or far enough apart, else one range with all between.
    """
    dims = [(n, abs(step), step) for n, step in zip(copy.shape, copy.src_strides, strict=True)]
    low = copy.src_offset + sum((n - 1) * step for n, _, step in dims if step < 0)
    upward = strided_copy(copy.src, copy.unit, [(n, up, up) for n, up, _ in dims], low, low)
    extents, strides, unit = upward.shape, upward.src_strides, upward.unit
    high = low + unit + sum((n - 1) * step for n, step in zip(extents, strides, strict=True))
    if prod(extents) * (unit + _PIECE) >= high - low or 0 in strides:
        return [(low, high)]
    steps = [range(0, n * step, step) for n, step in zip(extents, strides, strict=True)]
    starts = (low + sum(offsets) for offsets in product(*steps))
    return [(start, start + unit) for start in starts]
