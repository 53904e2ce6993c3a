"""How a rank's rows come to its peers: copy engines write them straight into the memory of each.

    to the nearest ranks on the right    [ 0 1 | 2 3 | 4 5 | 6 7 ]    chunks of k
    to those behind them                 [ 0 1   2 3   4 5   6 7 ]

Every rank begins with its right neighbour, so no two begin with the same. Ranks that need the rows
for tiles which they compute first get them in pieces. Behind every copy follows one of the words
that say that it has come: `kernels/row_push.cuh`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from shardmath.cuda.kernel import Argument
from shardmath.operators.matmul.gpu.copy_engines import EngineCopy
from shardmath.operators.matmul.gpu.row_split import CHUNKS, PIECES, RowSplitProduct, Tiling
from shardmath.symmetric.team import Team

__all__ = ["RowPush", "copy_steps", "signals_bytes"]

_THREADS = 64  # one for each peer that there can be


class RowPush:
    """The rows of one rank on their way to all others; `bases` is where every rank's `Words` lie,
    and behind them the rows of all ranks.
    """

    def __init__(
        self, team: Team, problem: RowSplitProduct, tiling: Tiling, bases: Sequence[int]
    ) -> None:
        self._size, self._problem, self._bases = team.size, problem, bases
        self._sending = bases[team.rank] + 8 * (CHUNKS + 1) * team.size
        self._steps = [
            self._step(team.rank, (team.rank + step) % team.size, first, last)
            for step, first, last in copy_steps(team.size, tiling.piecewise, problem)
            if problem.rows[team.rank]
        ]
        self._argument = Argument(team.packed() + struct.pack("Q", bases[team.rank]))
        self._kernel = team.kernel("row_push", "await_readers")
        self._kernel.load()  # now, and not while a product waits for rows

    def rows(self, rank: int, src: int) -> int:
        """Where the rows of `src` lie on `rank`."""
        return self._bases[rank] + signals_bytes(self._size) + self._problem.offsets[src]

    def put(self, a: int, stream: Any) -> None:
        """Let copy engines bring the rows at `a` to all peers, on `stream`."""
        self._kernel.launch(stream, 1, _THREADS, self._argument)
        for step in self._steps:
            step.rows.put(a + step.offset, step.there, stream)
            step.words.put(self._sending, step.word, stream)

    def _step(self, rank: int, peer: int, first: int, last: int) -> _Step:
        """Chunks from `first` to before `last` of the rows of `rank`."""
        problem, rows = self._problem, self._problem.rows[rank]
        own, pitch = 2 * problem.a.pitch, 2 * problem.pitch(rank)
        begin, end = problem.chunks[first][0], problem.chunks[last - 1][1]
        if problem.a.order == "C":
            offset, skipped, width, lines = 2 * begin, 2 * begin, 2 * (end - begin), rows
        else:
            offset, skipped, width, lines = own * begin, pitch * begin, 2 * rows, end - begin
        flat = own == width == pitch
        return _Step(
            EngineCopy(width * lines) if flat else EngineCopy(width, [(lines, own, pitch)]),
            offset,
            self.rows(peer, rank) + skipped,
            EngineCopy(8 * (last - first)),
            self._bases[peer] + 8 * (CHUNKS * rank + first),
        )


@dataclass(frozen=True)
class _Step:
    """A copy of rows, from `offset` in A to `there`, and one of the words that say so."""

    rows: EngineCopy
    offset: int
    there: int
    words: EngineCopy
    word: int


def copy_steps(
    size: int, piecewise: int, problem: RowSplitProduct
) -> Iterator[tuple[int, int, int]]:
    """(which rank on the right, first chunk, the last and one) of each copy, in order. The first
    `piecewise` ranks get theirs in pieces, in turn.
    """
    chunks = len(problem.chunks)
    bounds = sorted({chunks * piece // PIECES for piece in range(PIECES + 1)})
    for first, last in pairwise(bounds):
        for step in range(1, 1 + min(piecewise, size - 1)):
            yield step, first, last
    for step in range(1 + piecewise, size):
        if chunks:
            yield step, 0, chunks


def signals_bytes(size: int) -> int:
    """Bytes of the struct `Words`, as many as keep what follows aligned."""
    words = (CHUNKS + 1) * size + CHUNKS + 3
    return -(-8 * words // 1024) * 1024
