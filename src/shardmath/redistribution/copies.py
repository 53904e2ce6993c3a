"""A move as the machine sees it: one strided copy between two memories, in bytes.

Pure: addresses come later. Dimensions are dropped and joined until the fewest remain, so that the
inner loop of the copy is as long as possible; the last dimension is the one along which the
destination is densest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from shardmath.arrays.spec import Dimension, coalesced
from shardmath.geometry import Move

Strides = tuple[int, ...]  # in bytes

_PIECE = 32 << 10  # bytes that take a network about as long as one more piece does


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """`shape` units of `unit` bytes, from memory number `src` to memory number `dst`.

    Memories are the ranks' local arrays, or what else a launch numbers. Offsets and strides are
    bytes of any sign, from the element with index 0 along every axis. A unit is contiguous in both
    memories: one element, or as many as lie side by side. No two units of the target overlap.
    """

    src: int
    dst: int
    unit: int
    shape: tuple[int, ...]
    src_offset: int
    src_strides: tuple[int, ...]
    dst_offset: int
    dst_strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes that are copied."""
        return self.unit * prod(self.shape)


def lowered(
    move: Move, itemsize: int, src_strides: Sequence[int], dst_strides: Sequence[int]
) -> StridedCopy:
    """A move that is not empty as a copy, from memory number `move.src` to memory 0.

    The strides, in bytes, are those of the arrays there.
    """
    src_offset = dst_offset = 0
    dims: list[Dimension] = []
    for run, src, dst in zip(move.runs, src_strides, dst_strides, strict=True):
        src_offset += run.src_start * src
        dst_offset += run.dst_start * dst
        dims.append((run.count, run.dst_step * dst, run.src_step * src))
        dims.append((run.length, dst, src))
    return strided_copy(move.src, itemsize, dims, src_offset, dst_offset)


def own_first(
    moves: Iterable[Move],
    rank: int,
    itemsize: int,
    src_strides: Mapping[int, Sequence[int]],
    dst_strides: Sequence[int],
) -> list[StridedCopy]:
    """Moves into `rank`, none of them empty, as copies between arrays of these strides in bytes.

    The own part comes first, then those of rank + 1 and onwards, so that ranks do not all read from
    one.
    """
    copies = [lowered(move, itemsize, src_strides[move.src], dst_strides) for move in moves]
    return sorted(copies, key=lambda copy: (copy.src < rank, copy.src))


@lru_cache(maxsize=1024)
def whole(
    shape: tuple[int, ...],
    itemsize: int,
    src_strides: tuple[int, ...],
    dst_strides: tuple[int, ...],
) -> StridedCopy:
    """The copy of a whole array, of `shape` without zeros, from memory 0."""
    return strided_copy(0, itemsize, list(zip(shape, dst_strides, src_strides, strict=True)), 0, 0)


def strided_copy(
    src: int,
    itemsize: int,
    dims: Sequence[Dimension],
    src_offset: int,
    dst_offset: int,
    dst: int = 0,
) -> StridedCopy:
    """A copy with as few dimensions as possible, the destination's densest last."""
    kept = sorted(
        (dim for dim in dims if dim[0] != 1), key=lambda dim: (-abs(dim[1]), -abs(dim[2]))
    )
    unit, dims = itemsize, coalesced(reversed(kept))
    if dims and dims[0][1:] == (itemsize, itemsize):
        unit *= dims.pop(0)[0]
    dims.reverse()
    return StridedCopy(
        src=src,
        dst=dst,
        unit=unit,
        shape=tuple(dim[0] for dim in dims),
        src_offset=src_offset,
        src_strides=tuple(dim[2] for dim in dims),
        dst_offset=dst_offset,
        dst_strides=tuple(dim[1] for dim in dims),
    )


def pieces_of(copy: StridedCopy) -> list[tuple[int, int]]:
    """Ranges of bytes of the source, from its element 0, that hold what `copy` reads.

    Fetching takes time for each piece, and for its bytes. So each unit is a piece if units are long
    or far apart; otherwise all are one piece, with what lies between them.
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
