"""How a rank's rows come to its peers: copy engines write them straight into the memory of each.

    to the nearest ranks on the right    [ 0 1 | 2 3 | 4 5 | 6 7 ]    chunks of k
    to those behind them                 [ 0 1   2 3   4 5   6 7 ]

Every rank begins with its right neighbour, so no two begin with the same. Ranks that need the rows
for tiles which they compute first get them in pieces. Behind every copy follows one of the words
that say that it has come: `kernels/shards.cuh`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from shardmath.cuda.driver import bindings, call
from shardmath.cuda.kernel import Argument
from shardmath.operators.matmul.gpu.gathered import CHUNKS, PIECES, GatheredProduct, Tiling
from shardmath.symmetric.team import Team

__all__ = ["Handing", "steps_of_engines", "words_bytes"]

_THREADS = 64  # one for each peer that there can be


class Handing:
    """The rows of one rank on their way to all others; `bases` is where every rank's `Words` lie,
    and behind them the rows of all ranks.
    """

    def __init__(
        self, team: Team, problem: GatheredProduct, tiling: Tiling, bases: Sequence[int]
    ) -> None:
        self._team, self._problem, self._bases = team, problem, bases
        self._peers = [(team.rank + step) % team.size for step in range(1, team.size)]
        self._steps = tuple(steps_of_engines(team.size, tiling.early, problem))
        self._argument = Argument(team.packed() + struct.pack("Q", bases[team.rank]))
        self._kernel = team.kernel("handing", "begin_handing")
        self._kernel.load()  # now, and not while a product waits for rows

    def rows(self, rank: int, src: int) -> int:
        """Where the rows of `src` lie on `rank`."""
        return self._bases[rank] + words_bytes(self._team.size) + self._problem.offsets[src]

    def put(self, a: int, stream: Any) -> None:
        """Let copy engines bring the rows at `a` to all peers, on `stream`."""
        problem, team = self._problem, self._team
        self._kernel.launch(stream, 1, _THREADS, self._argument)
        if not problem.rows[team.rank]:
            return
        sending = self._bases[team.rank] + 8 * (CHUNKS + 1) * team.size
        for step, first, last in self._steps:
            peer = self._peers[step - 1]
            self._copy(a, self.rows(peer, team.rank), first, last, stream)
            word = self._bases[peer] + 8 * (CHUNKS * team.rank + first)
            call("cuMemcpyAsync", word, sending, 8 * (last - first), stream)

    def _copy(self, a: int, there: int, first: int, last: int, stream: Any) -> None:
        """Chunks from `first` to before `last`."""
        problem, rank = self._problem, self._team.rank
        pitch, own = problem.pitch(rank), problem.a.pitch
        begin, end = problem.chunks[first][0], problem.chunks[last - 1][1]
        if problem.a.order == "C":
            a, there = a + 2 * begin, there + 2 * begin
            width, lines = end - begin, problem.rows[rank]
        else:
            a, there = a + 2 * begin * own, there + 2 * begin * pitch
            width, lines = problem.rows[rank], end - begin
        if own == width == pitch:
            call("cuMemcpyAsync", there, a, 2 * width * lines, stream)
        else:
            call("cuMemcpy2DAsync", _block(a, own, there, pitch, width, lines), stream)


def steps_of_engines(
    size: int, early: int, problem: GatheredProduct
) -> Iterator[tuple[int, int, int]]:
    """(which rank on the right, first chunk, the last and one) of each copy, in order. The first
    `early` ranks get theirs in pieces, in turn.
    """
    chunks = len(problem.chunks)
    bounds = sorted({chunks * piece // PIECES for piece in range(PIECES + 1)})
    for first, last in pairwise(bounds):
        for step in range(1, 1 + min(early, size - 1)):
            yield step, first, last
    for step in range(1 + early, size):
        if chunks:
            yield step, 0, chunks


def words_bytes(size: int) -> int:
    """Bytes of the struct `Words`, as many as keep what follows aligned."""
    words = (CHUNKS + 1) * size + CHUNKS + 3
    return -(-8 * words // 1024) * 1024


def _block(source: int, source_pitch: int, target: int, pitch: int, width: int, lines: int) -> Any:
    """A copy of `lines` of `width` elements of two bytes."""
    driver = bindings()
    device = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    block = driver.CUDA_MEMCPY2D()
    block.srcMemoryType = block.dstMemoryType = device
    block.srcDevice, block.srcPitch = source, 2 * source_pitch
    block.dstDevice, block.dstPitch = target, 2 * pitch
    block.WidthInBytes, block.Height = 2 * width, lines
    return block
