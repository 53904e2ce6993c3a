"""How a large array is cut for a reduction: into chunks, and each into a slice for every rank."""

from __future__ import annotations

from itertools import pairwise

from shardmath.base.immutable import Immutable

UNIT = 16  # bytes, which whole elements of every type fill


class Slice(Immutable):
    """The bytes of a chunk that one rank combines."""

    start: int
    nbytes: int


def chunked(nbytes: int, size: int, most: int) -> list[tuple[Slice, ...]]:
    """Cut `nbytes` into even chunks whose slices have at most `most` bytes: each's slices by rank.

    Slices start at multiples of 16. The last ones are shorter, and may be empty.
    """
    assert most % UNIT == 0, most
    count = -(-nbytes // (size * most))
    width = -(-nbytes // (count * size * UNIT)) * UNIT
    cuts = [min(rank * width, nbytes) for rank in range(count * size + 1)]
    slices = [Slice(start, end - start) for start, end in pairwise(cuts)]
    return [tuple(slices[first : first + size]) for first in range(0, count * size, size)]
