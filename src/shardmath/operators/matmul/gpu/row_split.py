"""A product of rows that all ranks gather: what each rank multiplies, in which order. Pure.

Rank r has some rows of A and some columns of B, and all rows of the result in its columns. Each
rank hands its rows to the others, its right neighbour first, so that they come in the order own,
left, left of the left, and the tiles of the result are computed in that order.

              k                n of rank 0   1   2
    A  [ rows of rank 0 ]      B  [        |   |   ]      result  [        |   |   ]
       [ rows of rank 1 ]    k    [        |   |   ]         m    [        |   |   ]
       [ rows of rank 2 ]
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from shardmath.base.immutable import Immutable
from shardmath.base.integers import up
from shardmath.cuda.tensormap import ALIGNMENT
from shardmath.machine import h200
from shardmath.operators.matmul.gpu.local_product import LocalProduct, OperandLayout

WIDTHS = (256, 224, 192, 160, 128)
TILE_ROWS = 128
CHUNKS = 8  # the most parts of k in which rows come
PIECES = 4  # parts in which copy engines bring rows that are waited for: a copy takes long to begin
DEPTH = 64  # indices of k that are multiplied at once
_LINE = 128  # bytes
_SHARED_BYTES = 226 << 10  # of a block, less what the barriers need


class RowSplitProduct(LocalProduct):
    """A LocalProduct whose rows of A come from all ranks.

    `rows`, of A on each rank, `depth`, `dtype` and the order of A are the same on all ranks;
    `columns`, those of this rank, the pitches, the layout of B and `out`, the order of the result,
    may differ.
    """

    out: str = "C"

    most_ranks = 64  # their tensor maps fit in a kernel's argument

    @property
    def same_everywhere(self) -> list[tuple[str, object]]:
        return [*super().same_everywhere, ("depth", self.depth), ("the order of A", self.a.order)]

    # -- how rows come, the same on all ranks ------------------------------------------------------

    @property
    def chunk(self) -> int:
        """Steps of DEPTH in a chunk of k."""
        return max(1, -(-self.depth // (DEPTH * CHUNKS)))

    @cached_property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """The bounds of each chunk along k."""
        length = self.chunk * DEPTH
        return tuple((k, min(self.depth, k + length)) for k in range(0, self.depth, length))

    # -- where the gathered rows lie, the same on all ranks ----------------------------------------

    def gathered(self, rank: int) -> OperandLayout:
        """The layout of the gathered rows of `rank`, in the order of A."""
        length = self.depth if self.a.order == "C" else self.rows[rank]
        return OperandLayout(self.a.order, up(length, ALIGNMENT // 2))

    def lines(self, rank: int) -> int:
        """How many contiguous lines those are: rows ("C") or columns ("F")."""
        return self.rows[rank] if self.a.order == "C" else self.depth

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The bytes before the rows of each rank, and the size of all."""
        offsets = [0]
        for rank in range(len(self.rows)):
            offsets.append(
                offsets[-1] + up(2 * self.lines(rank) * self.gathered(rank).pitch, _LINE)
            )
        return tuple(offsets)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first row of each rank in the result."""
        return tuple(sum(self.rows[:rank]) for rank in range(len(self.rows)))

    def arrivals(self, rank: int) -> list[int]:
        """The ranks whose rows `rank` multiplies, in order of arrival: its own first. Ranks without
        rows are left out.
        """
        size = len(self.rows)
        order = [(rank - step) % size for step in range(size)]
        return [src for src in order if self.rows[src]]


class Tiling(Immutable):
    """How one rank cuts its work: tiles of `width` columns, `cluster` of them above each other
    share these, `stages` of k in flight at once, on `blocks` multiprocessors. The nearest
    `piecewise` ranks on the right get this rank's rows in pieces, so that their tiles can begin
    soon.
    """

    width: int
    cluster: int
    stages: int
    blocks: int
    piecewise: int = 0

    @property
    def clusters(self) -> int:
        """The number of clusters of blocks that multiply at once."""
        return max(1, self.blocks // self.cluster)

    def unit_rows(self, rows: int) -> int:
        """How many units of `cluster` tiles lie above each other in `rows`."""
        return -(-rows // (TILE_ROWS * self.cluster))

    def tile_columns(self, columns: int) -> int:
        """How many tiles lie side by side in `columns`."""
        return -(-columns // self.width)

    def shared_bytes(self, *, b_along_k: bool) -> int:
        """Bytes of shared memory, as all_gather_gemm.cu lays it out."""
        b = self.width if b_along_k else up(self.width, 64)
        return 1024 + self.stages * (TILE_ROWS + b) * DEPTH * 2


def choose_tiling(problem: RowSplitProduct, rank: int, processors: int) -> Tiling:
    """The tiling whose last tile is predicted to be done first."""
    cluster = 2 if max(problem.rows, default=0) > TILE_ROWS else 1
    size = len(problem.rows)
    blocks = processors - _SPARE if size > 1 else processors
    tilings = [
        _with_even_blocks(Tiling(width, cluster, _stages(width), blocks, piecewise), problem)
        for width in WIDTHS
        for piecewise in range(min(size, 1 + _MOST_PIECEWISE))
    ]
    return min(tilings, key=lambda tiling: predicted(problem, rank, tiling))


def predicted(problem: RowSplitProduct, rank: int, tiling: Tiling) -> float:
    """Seconds until the last tile is done: clusters take units in turn, which wait for rows."""
    unit = 2.0 * TILE_ROWS * tiling.width * max(problem.depth, 1) / _FLOPS + h200.TILE
    unit /= _EFFICIENCY[tiling.width]
    free = [0.0] * tiling.clusters
    number, tile_columns = 0, tiling.tile_columns(problem.columns)
    parts = zip(problem.arrivals(rank), _coming(problem, rank, tiling), strict=True)
    for src, (begun, here) in parts:
        for _ in range(tiling.unit_rows(problem.rows[src]) * tile_columns):
            cluster = number % tiling.clusters
            free[cluster] = max(max(free[cluster], begun) + unit, here + unit / PIECES)
            number += 1
    return max(free)


def _coming(problem: RowSplitProduct, rank: int, tiling: Tiling) -> list[tuple[float, float]]:
    """When the first and the last chunk of each rank's rows come, in the order of `arrivals`."""
    peers = problem.arrivals(rank)
    arrivals = [(0.0, 0.0)] * peers.count(rank)
    peers = peers[len(arrivals) :]
    nbytes = [2.0 * problem.rows[src] * problem.depth for src in peers]
    piecewise, late = nbytes[: tiling.piecewise], nbytes[tiling.piecewise :]
    clock = h200.ENGINES_MET
    if piecewise:
        piece_seconds = h200.ENGINE_COPY * len(piecewise) + sum(piecewise) / PIECES / h200.ENGINE
        arrivals += [(clock + piece_seconds, clock + PIECES * piece_seconds)] * len(piecewise)
        clock += PIECES * piece_seconds
    for more in late:
        clock += h200.ENGINE_COPY + more / h200.ENGINE
        arrivals.append((clock, clock))
    return arrivals


def is_fused_faster(problem: RowSplitProduct) -> bool:
    """Whether to multiply while rows arrive, or first to gather, and then to multiply by cuBLAS.

    All ranks must ask about the same problem, that of the rank with most columns. A product of few
    rows has too few tiles for the GPU; cuBLAS cuts it along k, and is done sooner.
    """
    size = len(problem.rows)
    if size == 1:
        return False
    tiling = choose_tiling(problem, 0, h200.PROCESSORS)
    sent = 2.0 * max(problem.rows) * problem.depth * (size - 1)
    alone = problem.flops / h200.FUSED_PRODUCT + h200.TILE
    return predicted(problem, 0, tiling) < h200.GATHER_START + sent / h200.GATHERED + alone


_FLOPS = h200.FUSED_PRODUCT / h200.PROCESSORS  # of one multiprocessor
_MOST_PIECEWISE = 3  # ranks
# Multiprocessors for the kernel that starts the copies: a block of the product leaves no quarter of
# its multiprocessor the registers for another warp.
_SPARE = 4
_EFFICIENCY = {256: 1.0, 224: 0.99, 192: 0.92, 160: 0.88, 128: 0.82}


def _stages(width: int) -> int:
    """The stages that fit into the shared memory of a multiprocessor, at most 6."""
    return min(6, (_SHARED_BYTES - 1024) // ((TILE_ROWS + up(width, 64)) * DEPTH * 2))


def _with_even_blocks(tiling: Tiling, problem: RowSplitProduct) -> Tiling:
    """The tiling with as few blocks as finish in the same number of turns."""
    units = sum(tiling.unit_rows(rows) for rows in problem.rows) * tiling.tile_columns(
        problem.columns
    )
    clusters = max(1, min(tiling.clusters, units))
    turns = -(-units // clusters)
    fewest = -(-units // turns) if turns else 1
    return replace(tiling, blocks=fewest * tiling.cluster)
