"""Strided boxes as `kernels/boxes.cu` takes them: a table of boxes, and their tiles.

Pure: no address is known here. Every byte of a box is in exactly one tile. Tiles of different
memories alternate from the first to the last, in proportion to the bytes of each memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from shardmath.base.immutable import Immutable
from shardmath.redistribution.copies import StridedCopy, strided_copy

BASES = 128  # kBases: sources and targets together
_DIMS = 8  # kDims
_SHARED_BYTES = 24 << 10  # kSharedBytes
_MAX_ROWS = 1 << 30  # numbers below 2^31 can be divided by multiplication
_MIN_TILE, _MAX_TILE = 4 << 10, 64 << 10
_TRANSPOSED_TILE = 16 << 10
_TILES = 4096  # of a launch, where the bytes suffice: ten for each block
_SHORT = 128  # bytes of a unit below which it matters what lies next to it

_DIM = np.dtype(
    [("from", "<i8"), ("to", "<i8"), *((name, "<u4") for name in ("extent", "magic", "shift", "_"))]
)
_STEPS = ("from", "to", "from_along", "to_along", "from_across", "to_across")
_NUMBERS = (
    *("source", "target", "unit", "transposed", "count", "ndim", "rows", "piece", "pieces"),
    *("along", "across", "tile_along", "tile_across", "tiles_along", "tiles_across"),
    *("from_strides", "to_strides", "_", "__", "___"),
)
_BOX = np.dtype(
    [
        *((name, "<i8") for name in _STEPS),
        *((name, "<u4") for name in _NUMBERS),
        ("dims", _DIM, (_DIMS,)),
    ]
)


class Tables(Immutable):
    """Tables that a launch reads: `boxes`, one row each, and `tiles`, (box, number), in order.

    `sources` and `targets` are the numbers of memories; `nbytes` are copied. With `unaligned`, some
    rows do not begin, or do not end, at multiples of 16 bytes.
    """

    boxes: npt.NDArray[Any]
    tiles: npt.NDArray[np.uint32]
    sources: int
    targets: int
    nbytes: int
    unaligned: bool


def tables(boxes: Iterable[StridedCopy]) -> Tables:
    """The tables of `boxes`. Raises ValueError for more memories than a launch has room for.

    The tiles of memories are interleaved in the order in which the memories first appear.
    """
    given = [box for box in boxes if box.nbytes]
    sources = max((box.src for box in given), default=-1) + 1
    targets = max((box.dst for box in given), default=-1) + 1
    if sources + targets > BASES:
        raise ValueError(f"boxes between {sources} and {targets} memories; the most is {BASES}")
    nbytes = sum(box.nbytes for box in given)
    tile = _MIN_TILE
    while tile < _MAX_TILE and tile * _TILES < nbytes:
        tile *= 2
    pieces = [piece for box in given for piece in _pieces(_coalesced(box))]
    rows = np.zeros(len(pieces), _BOX)
    counts = [_fill(row, piece, tile) for row, piece in zip(rows, pieces, strict=True)]
    rows["target"] += sources  # their addresses come after those of the sources
    links = [(piece.src, piece.dst) for piece in pieces]
    names = ("from", "to", "unit", "from_strides", "to_strides")
    unaligned = any((rows[name][rows["transposed"] == 0] & 15).any() for name in names)
    return Tables(rows, _interleaved(links, counts), sources, targets, nbytes, unaligned)


def _coalesced(box: StridedCopy) -> StridedCopy:
    """The box with as few axes as possible, and no negative stride in the target."""
    source_offset, target_offset = box.src_offset, box.dst_offset
    dims = []
    for extent, src, dst in zip(box.shape, box.src_strides, box.dst_strides, strict=True):
        if dst < 0:
            source_offset += (extent - 1) * src
            target_offset += (extent - 1) * dst
            dims.append((extent, -dst, -src))
        else:
            dims.append((extent, dst, src))
    return strided_copy(box.src, box.unit, dims, source_offset, target_offset, box.dst)


def _pieces(box: StridedCopy) -> Iterator[StridedCopy]:
    """`box` in parts that the kernel can number: few axes, and at most 2^30 rows and bytes."""
    if len(box.shape) > _DIMS or prod(box.shape) > _MAX_ROWS:
        extent, *rest = box.shape
        step = 1 if len(box.shape) > _DIMS else max(1, extent // 2)
        for start in range(0, extent, step):
            part = replace(
                box,
                shape=(min(step, extent - start), *rest),
                src_offset=box.src_offset + start * box.src_strides[0],
                dst_offset=box.dst_offset + start * box.dst_strides[0],
            )
            yield from _pieces(_coalesced(part) if part.shape[0] == 1 else part)
    elif box.unit > _MAX_ROWS:
        for start in range(0, box.unit, _MAX_ROWS):
            yield replace(
                box,
                unit=min(_MAX_ROWS, box.unit - start),
                src_offset=box.src_offset + start,
                dst_offset=box.dst_offset + start,
            )
    else:
        yield box


def _fill(row: Any, box: StridedCopy, tile: int) -> int:
    """Write a box to its row, and return the number of its tiles."""
    row["from"], row["to"] = box.src_offset, box.dst_offset
    row["source"], row["target"], row["unit"] = box.src, box.dst, box.unit
    dims = list(zip(box.shape, box.src_strides, box.dst_strides, strict=True))
    across = _across(box)
    if across is None:
        count = _fill_rows(row, box, tile)
    else:
        along = dims.pop()
        count = _fill_transposed(row, box, along, dims.pop(across), min(tile, _TRANSPOSED_TILE))
    row["ndim"] = len(dims)
    for place, (extent, src, dst) in zip(row["dims"], dims, strict=False):
        magic, shift = _divisor(extent)
        place["from"], place["to"], place["extent"] = src, dst, extent
        place["magic"], place["shift"] = magic, shift
        row["from_strides"] |= src & 15
        row["to_strides"] |= dst & 15
    return count


def _across(box: StridedCopy) -> int | None:
    """The axis along which the source is densest, if that is not the target's and it matters."""
    if len(box.shape) < 2 or box.unit >= _SHORT:
        return None
    steps = [abs(stride) for stride in box.src_strides]
    moving = [axis for axis, step in enumerate(steps[:-1]) if step]
    if not moving or not steps[-1]:
        return None
    dense = min(moving, key=steps.__getitem__)
    return dense if steps[dense] < min(steps[-1], _SHORT) else None


def _fill_rows(row: Any, box: StridedCopy, tile: int) -> int:
    count = prod(box.shape)
    row["count"] = count
    row["piece"] = min(tile, box.unit)
    row["pieces"] = pieces = -(-box.unit // min(tile, box.unit))
    row["rows"] = rows = 1 if pieces > 1 else max(1, tile // box.unit)
    return int(pieces * -(-count // rows))


_Axis = tuple[int, int, int]  # extent, stride in the source, stride in the target


def _fill_transposed(row: Any, box: StridedCopy, along: _Axis, across: _Axis, tile: int) -> int:
    row["transposed"] = 1
    row["along"], row["from_along"], row["to_along"] = along
    row["across"], row["from_across"], row["to_across"] = across
    row["from_strides"], row["to_strides"] = along[1] & 15, across[2] & 15
    row["count"] = count = box.nbytes // (box.unit * along[0] * across[0])
    wide, high, many = _tile(box.unit, along[0], across[0], count, tile)
    row["tile_along"], row["tile_across"], row["rows"] = wide, high, many
    row["tiles_along"] = tiles_along = -(-along[0] // wide)
    row["tiles_across"] = tiles_across = -(-across[0] // high)
    return int(tiles_along * tiles_across * -(-count // many))


def _tile(unit: int, along: int, across: int, count: int, tile: int) -> tuple[int, int, int]:
    """The units of a tile along the target's densest axis, the source's densest, and all others."""
    units = max(1, tile // unit)
    wide = 1 << (units.bit_length() // 2)
    high = max(1, units // wide)
    wide, high = min(along, wide), min(across, high)
    if wide == along:
        high = _rounded(min(across, max(1, units // wide)), across, unit)
    if high == across:
        wide = _rounded(min(along, max(1, units // high)), along, unit)
    many = max(1, min(count, units // (wide * high)))
    while many > 1 and _shared_bytes(unit, wide, high, many) > _SHARED_BYTES:
        many //= 2
    while wide > 1 and _shared_bytes(unit, wide, high, many) > _SHARED_BYTES:
        wide = _rounded(wide // 2, along, unit)
    return wide, high, many


def _rounded(extent: int, most: int, unit: int) -> int:
    """The extent, rounded down to a multiple of 16 bytes unless it is all there is."""
    group = max(1, 16 // unit)
    return extent if extent == most or extent < group else extent // group * group


def _shared_bytes(unit: int, wide: int, high: int, many: int) -> int:
    """The most shared memory that the kernel needs: rows are padded to an odd number of words."""
    return many * wide * (high * unit + 32)


def _divisor(extent: int) -> tuple[int, int]:
    """(magic, shift): n // extent is (n * magic >> 32) >> shift, for 0 <= n < 2^31, extent > 1."""
    if extent == 1:
        return 0, 0
    bits = 31 + (extent - 1).bit_length()
    return -(-(1 << bits) // extent), bits - 32


def _interleaved(links: Sequence[tuple[int, int]], counts: Sequence[int]) -> npt.NDArray[np.uint32]:
    """All tiles; those of each link spread evenly over the whole."""
    total = sum(counts)
    box = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum([0, *counts[:-1]]) if counts else np.zeros(0, int)
    tiles = np.empty((total, 2), np.uint32)
    tiles[:, 0] = box
    tiles[:, 1] = np.arange(total) - np.repeat(starts, counts)
    number = {link: place for place, link in enumerate(dict.fromkeys(links))}
    lane = np.array([number[link] for link in links], int)[box]
    order = np.argsort(lane, kind="stable")  # by link, each in its own order
    sizes = np.bincount(lane, minlength=len(number))
    within = np.arange(total) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    time = within / np.repeat(np.maximum(sizes, 1), sizes)
    return np.ascontiguousarray(tiles[order[np.lexsort((lane[order], time))]])
