"""AllGather + GEMM: rows arrive from all ranks while those that are here are multiplied.

    side stream        push this rank's rows to every peer, chunk by chunk (`RowPush`)
    product's stream   tiles of own rows, then of each peer's rows as they arrive

A plan has symmetric memory for all ranks' rows: see `plan_memory`. A rank whose wait has timed out
signals nothing, so no peer multiplies rows that have not arrived.

Copy engines write a rank's rows straight into the memory of each peer:

    to the nearest ranks on the right    [ 0 1 | 2 3 | 4 5 | 6 7 ]    chunks of k
    to those behind them                 [ 0 1   2 3   4 5   6 7 ]

Every rank begins with its right neighbour, so no two begin with the same. Ranks that need the rows
for their first tiles get them in pieces. Behind each copy of rows follows a copy of the words that
announce it: see `kernels/row_push.cuh`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from shardmath.base.immutable import Immutable
from shardmath.base.integers import bounds, up
from shardmath.context.context import Context
from shardmath.cuda.kernel import Argument, Kernel
from shardmath.cuda.stream import SideStream, StreamOrder
from shardmath.cuda.tensormap import ALIGNMENT, NBYTES, require_aligned
from shardmath.operators.matmul.gpu.copy_engines import EngineCopy
from shardmath.operators.matmul.gpu.plan_memory import KernelPlan, PlanMemory
from shardmath.operators.matmul.gpu.row_split import (
    CHUNKS,
    DEPTH,
    PIECES,
    TILE_ROWS,
    RowSplitProduct,
    Tiling,
    choose_tiling,
)
from shardmath.symmetric.team import Team

_THREADS = 384
_ASKING_THREADS = 64  # one for each peer that there can be


class AllGatherGemm(KernelPlan[RowSplitProduct]):
    """`launch` multiplies all ranks' rows with this rank's columns. Made by `create`.

    Plans on several streams take turns.
    """

    def __init__(
        self, context: Context, problem: RowSplitProduct, tiling: Tiling, memory: PlanMemory
    ) -> None:
        super().__init__(problem, memory)
        self.tiling = tiling
        self._row_push = RowPush(memory.team, problem, tiling, memory.bases)
        device = self.team.device
        device.activate()
        # Two products at once could leave no multiprocessor for the kernel that begins copies.
        self._order: StreamOrder = context.cache(
            "stream order of products", lambda: StreamOrder(device)
        )
        self._side: SideStream = context.cache("side of rows", lambda: SideStream(device))

    @classmethod
    def create(
        cls, context: Context, problem: RowSplitProduct, tiling: Tiling | None = None
    ) -> AllGatherGemm:
        """A plan. Collective.

        Raises ValueError on all ranks where they do not mean the same product, or where
        `problem.unsupported` speaks on one of them; HeapExhausted.
        """
        device, words = context.gpu_team.device, signals_bytes(context.size)
        memory = PlanMemory.create(
            context,
            "a product of gathered rows",
            problem,
            lambda _: words + problem.offsets[-1],
            lambda address: device.zero(address, words),
        )
        tiling = tiling or choose_tiling(problem, context.rank, device.processors)
        return cls(context, problem, tiling, memory)

    def launch(self, a: int, b: int, result: int, stream: int, *, pitch: int | None = None) -> None:
        """Put the product on `stream`; this rank's rows of A, its columns of B and the result lie
        at these addresses.

        `pitch` is how many elements the result's rows (columns, in the order "F") are apart; None
        is as few as can be. Never waits on the host, and can be captured in a CUDA graph.
        Collective, in stream order.
        """
        self._memory.require_usable()
        problem = self.problem
        if pitch is None:
            pitch = problem.columns if problem.out == "C" else problem.height
        if not problem.height:
            return
        if self.team.size == 1:
            self._multiply(a, b, result, pitch, stream)
            return
        with self._order.section(stream), self._side.forked(stream) as side:
            self._row_push.put(a, side)
            self._multiply(a, b, result, pitch, stream)

    # -- the product -------------------------------------------------------------------------------

    def _multiply(self, a: int, b: int, result: int, pitch: int, stream: int) -> None:
        problem, tiling = self.problem, self.tiling
        kernel = product_kernel(self.team, problem, tiling, aligned=self._aligned(result, pitch))
        argument = self._argument(self._packed, a, b, result, pitch)
        kernel.launch(stream, tiling.blocks, _THREADS, argument)

    def _aligned(self, result: int, pitch: int) -> bool:
        """Whether the result of each rank's rows can be stored 16 bytes at a time."""
        problem, unit = self.problem, ALIGNMENT // 2
        cuts = [problem.columns] if problem.out == "C" else problem.rows
        return result % ALIGNMENT == 0 and pitch % unit == 0 and not any(cut % unit for cut in cuts)

    def _packed(self, a: int, b: int, result: int, pitch: int) -> bytes:
        """The struct `GatheredArgument`."""
        problem, tiling, rank, size = self.problem, self.tiling, self.team.rank, self.team.size
        require_aligned(A=a if problem.rows[rank] else 0, B=b if problem.columns else 0)
        arrivals = problem.arrivals(rank)
        absent = size - len(arrivals)
        maps = [self._map_of_rows(src, a) for src in arrivals] + [bytes(NBYTES)] * absent
        boxes = DEPTH // tiling.cluster, tiling.width // tiling.cluster  # what a block loads
        maps.append(self._map(b, problem.b, (problem.depth, problem.columns), *boxes))
        parts, units = [], 0
        for src in arrivals:
            unit_rows = tiling.unit_rows(problem.rows[src])
            parts += [units, unit_rows, problem.rows[src], src]
            units += unit_rows * tiling.tile_columns(problem.columns)
        starts = [problem.starts[src] for src in arrivals]
        counts = [len(arrivals), units, -(-problem.depth // DEPTH), problem.columns]
        counts += [problem.chunk, len(problem.chunks)]
        packed = b"".join(maps) + self.team.packed()
        packed += struct.pack(f"{size}Q", *self.bases)
        packed += struct.pack("QQ6I", result, 2 * pitch, *counts)
        packed += struct.pack(f"{4 * size}I", *parts, *[0] * 4 * absent)
        packed += struct.pack(f"{size}I", *starts, *[0] * absent)
        return packed + bytes(-len(packed) % 64)

    def _map_of_rows(self, src: int, a: int) -> bytes:
        """The tensor map of the rows of `src`; this rank's own rows are the caller's."""
        problem, layout = self.problem, self.problem.a
        if src != self.team.rank:
            a, layout = self._row_push.rows(self.team.rank, src), problem.gathered(src)
        return self._map(a, layout, (problem.rows[src], problem.depth), TILE_ROWS, DEPTH)


class RowPush:
    """Copies of one rank's rows to all others. `bases` is where the struct `Words` of every rank
    lies, and behind it the rows of all ranks.
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
        self._kernel.load()  # loading may wait for a product, which waits for rows

    def rows(self, rank: int, src: int) -> int:
        """The address of the rows of `src` on `rank`."""
        return self._bases[rank] + signals_bytes(self._size) + self._problem.offsets[src]

    def put(self, a: int, stream: Any) -> None:
        """Put on `stream` the copies of the rows at `a` to all peers, by copy engines."""
        self._kernel.launch(stream, 1, _ASKING_THREADS, self._argument)
        for step in self._steps:
            step.rows.put(a + step.offset, step.there, stream)
            step.words.put(self._sending, step.word, stream)

    def _step(self, rank: int, peer: int, first: int, last: int) -> _Step:
        """The copies of chunks `first` to before `last` of the rows of `rank`."""
        problem, rows = self._problem, self._problem.rows[rank]
        own, pitch = 2 * problem.a.pitch, 2 * problem.gathered(rank).pitch
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


class _Step(Immutable):
    """A copy of rows, from `offset` in A to `there`, and one of the words that announce it."""

    rows: EngineCopy
    offset: int
    there: int
    words: EngineCopy
    word: int


def copy_steps(
    size: int, piecewise: int, problem: RowSplitProduct
) -> Iterator[tuple[int, int, int]]:
    """(distance of the rank to the right, first chunk, the one behind the last) of each copy, in
    order. The first `piecewise` ranks get theirs in pieces, in turn.
    """
    chunks = len(problem.chunks)
    for first, last in pairwise(sorted({*bounds(chunks, PIECES)})):
        for step in range(1, 1 + min(piecewise, size - 1)):
            yield step, first, last
    for step in range(1 + piecewise, size):
        if chunks:
            yield step, 0, chunks


def signals_bytes(size: int) -> int:
    """Bytes of the struct `Words`, rounded up so that what follows is aligned."""
    words = (CHUNKS + 1) * size + CHUNKS + 3
    return up(8 * words, 1024)


def product_kernel(
    team: Team, problem: RowSplitProduct, tiling: Tiling, *, aligned: bool = True
) -> Kernel:
    """The kernel for a problem, compiled when first asked for, for an `aligned` result or not."""
    b_along_k = problem.b.order == "F"
    defines = (
        f"ELEMENT={problem.dtype.capitalize()}",
        f"A_ALONG_K={problem.a.order == 'C':d}",
        f"B_ALONG_K={b_along_k:d}",
        f"C_ALONG_N={problem.out == 'C':d}",
        f"WIDTH={tiling.width}",
        f"CLUSTER={tiling.cluster}",
        f"STAGES={tiling.stages}",
        f"ALIGNED={aligned:d}",
    )
    shared = tiling.shared_bytes(b_along_k=b_along_k)
    return team.kernel("all_gather_gemm", "all_gather_gemm", defines, shared=shared, features="a")
