"""The columns of a square matrix, dealt to the ranks in blocks: who has which, and where."""

from __future__ import annotations

from collections.abc import Sequence

from shardmath.base.immutable import Immutable
from shardmath.geometry import Layout, Spans

_NOTHING = Spans(0, 0, 0, 0)

Rows = tuple[int, int]  # from, to


class Blocks(Immutable):
    """Blocks of `width` of the n columns of an n x n matrix, dealt to `size` ranks in turn."""

    n: int
    width: int
    size: int

    @property
    def count(self) -> int:
        """The number of blocks; the last may be narrower."""
        return -(-self.n // self.width)

    def bounds(self, k: int) -> tuple[int, int]:
        """The first column of block `k`, and the one behind it; also the rows of its diagonal."""
        return k * self.width, min((k + 1) * self.width, self.n)

    def owner(self, k: int) -> int:
        """The rank that has block `k`."""
        return k % self.size

    def before(self, k: int, rank: int) -> int:
        """How many columns `rank` has of blocks before `k`."""
        owned = len(range(rank, min(k, self.count), self.size))
        return min(owned * self.width, self.spans[rank].length)

    def place(self, k: int) -> tuple[int, int]:
        """The columns of block `k` among those of its owner."""
        first = self.before(k, self.owner(k))
        lo, hi = self.bounds(k)
        return first, first + hi - lo

    def owned(self, rank: int) -> range:
        """The blocks of `rank`."""
        return range(rank, self.count, self.size)

    @property
    def spans(self) -> list[Spans]:
        """The columns of each rank."""
        return [Spans.cyclic(self.n, self.width, self.size, rank) for rank in range(self.size)]

    @property
    def layout(self) -> Layout:
        """The layout of the matrix: every rank has all rows of its columns."""
        return Layout.product((self.n, self.n), [None, self.spans], size=self.size)

    @property
    def vector(self) -> Layout:
        """The layout of a vector with an element for each column, on the rank of the column."""
        return Layout.product((self.n,), [self.spans], size=self.size)

    def read(self, k: int, rows: Sequence[Rows | None]) -> Layout:
        """The layout of the rows of block `k` that each rank reads, None if it reads nothing."""
        columns, nothing = Spans.interval(*self.bounds(k)), (_NOTHING, _NOTHING)
        parts = tuple(nothing if own is None else (Spans.interval(*own), columns) for own in rows)
        return Layout((self.n, self.n), parts)
