"""The order in which a rank computes tiles of a product, and the slots where their owners keep
them.

Every rank multiplies all rows; the owner of rows gets their tiles. Each owner's tiles are cut into
the same number of chunks. A rank goes through the chunks, and in each through the owners, from the
next rank on to itself. So owners add up chunk after chunk while the product goes on, and no two
ranks send to the same owner at once:

    rank 1 of 4, 2 chunks:   owner 2 3 0 1 | 2 3 0 1
                             chunk 0 0 0 0 | 1 1 1 1

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from shardmath.base.immutable import Immutable
from shardmath.base.integers import bounds

TILE_ROWS, TILE_COLUMNS = 128, 256
_GROUP = 16  # rows of tiles that are computed column by column: they share columns of B
Words = npt.NDArray[np.uint32]
Integers = npt.NDArray[np.int64]


class Chunk(Immutable):
    """Some of an owner's tiles: a box of its rows of tiles and of its columns of tiles."""

    rows: range
    columns: range

    @property
    def tiles(self) -> int:
        """The number of its tiles."""
        return len(self.rows) * len(self.columns)


class TileSchedule(Immutable):
    """How the work is cut. Each owner's tiles are added up in `chunks`, `chunk_columns` side by
    side in bands of its rows. `reducer_blocks` blocks do not multiply: they wait for all tiles, and
    in a ReduceScatter add them up. Each cluster begins `stagger_cycles` later than the one before.
    `cluster` and `stages` are those of tile_sending.cuh.
    """

    chunks: int
    reducer_blocks: int = 2
    cluster: int = 2
    stages: int = 4
    chunk_columns: int = 1
    stagger_cycles: int = 0


class TileOrder(Immutable):
    """The tiles of a product whose result has `columns`, and `rows[r]` rows for rank r.

    An owner's chunks are `chunk_columns` side by side in bands of its rows of tiles.
    """

    rows: tuple[int, ...]
    columns: int
    chunks: int
    chunk_columns: int = 1

    @property
    def across(self) -> int:
        """Tiles side by side in each row of tiles."""
        return -(-self.columns // TILE_COLUMNS)

    def down(self, owner: int) -> int:
        """Rows of tiles of an owner, counted from its own first row."""
        return -(-self.rows[owner] // TILE_ROWS)

    def tiles(self, owner: int) -> int:
        """Tiles that an owner gets from each rank."""
        return self.down(owner) * self.across

    @property
    def count(self) -> int:
        """Tiles of all owners."""
        return sum(self.tiles(owner) for owner in range(len(self.rows)))

    def parts(self, owner: int) -> list[Chunk]:
        """The owner's chunks: in bands where it has rows enough for each, else side by side."""
        down, across = self.down(owner), self.across
        bands = self.chunks // self.chunk_columns
        if down >= bands:
            return [
                Chunk(rows, columns)
                for rows in _cut(down, bands)
                for columns in _cut(across, self.chunk_columns)
            ]
        return [Chunk(range(down), columns) for columns in _cut(across, self.chunks)]

    def owned(self, owner: int) -> Words:
        """The owner's tiles by slot: `Tile` of tile_slots.cuh, rows from its own."""
        return np.concatenate([self._words(owner, number) for number in range(self.chunks)])

    def table(self, owner: int) -> Words:
        """By chunk: the half tiles that each rank sends in a launch, and the end of the tiles."""
        words = self.owned(owner)
        chunk, rows = words[:, 2] >> 16, words[:, 2] >> 8 & 0xFF
        halves = (rows > 0).astype(np.int64) + (rows > TILE_ROWS // 2)
        numbers = np.arange(self.chunks)
        sums = np.array([halves[chunk == number].sum() for number in numbers])
        return np.column_stack([sums, np.searchsorted(chunk, numbers, "right")]).astype(np.uint32)

    def of(self, rank: int, cluster: int = 1) -> Words:
        """All tiles in the order of `rank`: `Tile` of tile_slots.cuh, rows counted from the first
        of all.

        The tiles of a `cluster` follow each other and have the same columns; where there are not
        enough, tiles without rows stand in.
        """
        size = len(self.rows)
        first = np.concatenate([[0], np.cumsum(self.rows)])
        order = [(rank + step) % size for step in range(1, size + 1)]
        ordered = []
        for number in range(self.chunks):
            lines = 0
            cycle = []
            for owner in order:
                rows, words = self.parts(owner)[number].rows, self._words(owner, number)
                line = lines + words[:, 0].astype(np.int64) // TILE_ROWS - rows.start
                words[:, 0] += np.uint32(first[owner])
                cycle.append(np.column_stack([line // _GROUP, words[:, 1], line, words]))
                lines += len(rows)
            tiles = np.concatenate(cycle)
            tiles = tiles[np.lexsort((tiles[:, 2], tiles[:, 1], tiles[:, 0]))]
            ordered.append(_filled_up(tiles, cluster)[:, 3:])
        return np.ascontiguousarray(np.concatenate(ordered), dtype=np.uint32)

    @cached_property
    def _first_slot(self) -> list[list[int]]:
        """The first slot of each chunk, by owner and chunk."""
        counts = [[part.tiles for part in self.parts(owner)] for owner in range(len(self.rows))]
        return [[sum(row[:number]) for number in range(self.chunks)] for row in counts]

    def _words(self, owner: int, chunk: int) -> Words:
        """`Tile`s of one chunk of an owner, row after row."""
        part = self.parts(owner)[chunk]
        row = np.repeat(np.array(part.rows, np.int64), len(part.columns))
        column = np.tile(np.array(part.columns, np.int64), len(part.rows))
        rows = np.minimum(self.rows[owner] - row * TILE_ROWS, TILE_ROWS)
        what = owner | rows << 8 | chunk << 16
        slot = self._first_slot[owner][chunk] + np.arange(row.size)
        words = row * TILE_ROWS, column * TILE_COLUMNS, what, slot
        return np.column_stack(words).astype(np.uint32)


def _filled_up(tiles: Integers, cluster: int) -> Integers:
    """Fill up the tiles of each group and column, the first two words, to whole clusters."""
    if not len(tiles):
        return tiles
    starts = np.flatnonzero(np.any(np.diff(tiles[:, :2], axis=0, prepend=-1), axis=1))
    ends = np.append(starts[1:], len(tiles))
    missing = -(ends - starts) % cluster
    idle = tiles.copy()
    idle[:, 5] &= ~0xFF00  # no rows
    return np.insert(
        tiles, np.repeat(ends, missing), np.repeat(idle[ends - 1], missing, axis=0), axis=0
    )


def _cut(count: int, parts: int) -> Sequence[range]:
    """range(count) in so many ranges, whose sizes differ by one at most."""
    return [range(low, high) for low, high in pairwise(bounds(count, parts))]
