"""Text drawings of which rank owns what.

A drawing shows one character per element of a small array, and one per block of a large one,
whatever the sizes of the blocks; only the blocks that are shown are computed.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence

from shardmath.geometry.spans import Spans

ROWS = 32
WIDTH = 64
_SYMBOLS = string.digits + string.ascii_lowercase + string.ascii_uppercase


def draw(global_shape: Sequence[int], parts: Mapping[int, Sequence[Spans]]) -> str:
    """A drawing of `parts`, by rank, on an array of `global_shape`.

    A character is the rank (0-9, then a-z, A-Z), # for a rank past these or not known (-1), * for
    several owners, and a dot for none. From 3 axes on: one line per axis and distinct part.
    """
    if len(global_shape) not in (1, 2):
        return "\n".join(_summary(global_shape, parts))
    if 0 in global_shape:
        return f"(empty: {' x '.join(map(str, global_shape))})"
    rows = _along(0, global_shape, parts, ROWS) if len(global_shape) == 2 else [(0, 1)]
    columns = _along(len(global_shape) - 1, global_shape, parts, WIDTH)
    lines = []
    for row, _ in rows:
        line = ""
        for column, _ in columns:
            index = (row, column)[-len(global_shape) :]
            line += _symbol(
                [r for r, p in parts.items() if all(i in s for i, s in zip(index, p, strict=True))]
            )
        lines.append(line + ("..." if _stops_short(columns, global_shape[-1]) else ""))
    if len(global_shape) == 2 and _stops_short(rows, global_shape[0]):
        lines.append("...")
    note = _note(global_shape, rows, columns)
    return "\n".join([note, *lines] if note else lines)


def _along(
    axis: int, shape: Sequence[int], parts: Mapping[int, Sequence[Spans]], limit: int
) -> list[tuple[int, int]]:
    """The (start, length) of each character along an axis: elements, or blocks if too many."""
    extent = shape[axis]
    if extent <= limit:
        return [(i, 1) for i in range(extent)]
    column = {part[axis] for part in parts.values()}
    blocks: list[tuple[int, int]] = []
    start = 0
    while start < extent and len(blocks) < limit:
        cuts = [cut for s in column if (cut := s.cut_after(start)) is not None]
        upto = min([extent, *cuts])
        blocks.append((start, upto - start))
        start = upto
    return blocks


def _stops_short(pieces: Sequence[tuple[int, int]], extent: int) -> bool:
    return sum(pieces[-1]) < extent


def _note(shape: Sequence[int], *axes: Sequence[tuple[int, int]]) -> str:
    """Which axes are drawn by blocks, and how large these are."""
    said = []
    for axis, pieces in zip(range(len(shape)), axes[-len(shape) :], strict=True):
        if len(pieces) < shape[axis]:
            longest = max(length for _, length in pieces)
            said.append(f"axis {axis} of {shape[axis]} by blocks of up to {longest}")
    return f"({', '.join(said)})" if said else ""


def _symbol(owners: Sequence[int]) -> str:
    if len(owners) != 1:
        return "*" if owners else "."
    return _SYMBOLS[owners[0]] if 0 <= owners[0] < len(_SYMBOLS) else "#"


def _summary(shape: Sequence[int], parts: Mapping[int, Sequence[Spans]]) -> list[str]:
    """One line per axis and distinct part: the indices, then the ranks that hold them."""
    lines = [f"{' x '.join(map(str, shape)) or 'scalar'} on {len(parts)} ranks"]
    for axis, extent in enumerate(shape):
        holders: dict[Spans, list[int]] = {}
        for rank, part in parts.items():
            holders.setdefault(part[axis], []).append(rank)
        for spans, ranks in holders.items():
            names = "all ranks" if len(holders) == 1 else _ranks(ranks)
            lines.append(f"axis {axis} ({extent}): {spans} on {names}")
    return lines


def _ranks(ranks: Sequence[int]) -> str:
    shown = " ".join(map(str, ranks[:16])) + (" ..." if len(ranks) > 16 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
