"""A product whose rows are split: what each rank multiplies after a gather, and why it may not fit.

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
from shardmath.cuda.tensormap import ALIGNMENT
from shardmath.geometry.integers import up
from shardmath.machine import h200
from shardmath.operators.matmul.gpu.local_product import LocalProduct, OperandLayout

WIDTHS = (256, 224, 192, 160, 128)
TILE_ROWS = 128
CHUNKS = 8  # of k, at most, in which rows come
PIECES = 4  # in which copy engines bring what is waited for: a copy takes long to begin
DEPTH = 64  # of k, that is multiplied at once
_LINE = 128  # bytes
_SHARED_BYTES = 226 << 10  # that a block may have, less what the barriers need


class RowSplitProduct(LocalProduct):
    """See LocalProduct: rows of A come from all ranks.

    `rows`, of A on each rank, `depth`, `dtype` and the order of A are the same on all ranks;
    `columns`, those of this rank, the pitches, the layout of B and `out`, the order of the result,
    may differ.
    """

    out: str = "C"

    most_ranks = 64  # whose maps fit in a kernel's argument

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
        """The first k of each, and the last and one."""
        length = self.chunk * DEPTH
        return tuple((k, min(self.depth, k + length)) for k in range(0, self.depth, length))

    # -- where the gathered rows lie, the same on all ranks ----------------------------------------

    def gathered(self, rank: int) -> OperandLayout:
        """How the rows of `rank` lie: in the order of A."""
        length = self.depth if self.a.order == "C" else self.rows[rank]
        return OperandLayout(self.a.order, up(length, ALIGNMENT // 2))

    def lines(self, rank: int) -> int:
        """How many rows ("C") or columns ("F") they have."""
        return self.rows[rank] if self.a.order == "C" else self.depth

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Bytes before the rows of each rank; the last is the size of all."""
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
        """The ranks whose rows `rank` multiplies, in order of arrival, its own first. Ranks without
        rows are left out.
        """
        size = len(self.rows)
        order = [(rank - step) % size for step in range(size)]
        return [src for src in order if self.rows[src]]


class Tiling(Immutable):
    """`width` columns in a tile, `cluster` tiles above each other that share them, `stages` of k
    that are on their way at once, on `blocks` multiprocessors. The nearest `piecewise` ranks on the
    right get this rank's rows in pieces, so that their tiles can begin soon.
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
        """Units, of `cluster` tiles each, that `rows` have above each other."""
        return -(-rows // (TILE_ROWS * self.cluster))

    def tile_columns(self, columns: int) -> int:
        """Tiles next to each other."""
        return -(-columns // self.width)

    def shared_bytes(self, *, b_along_k: bool) -> int:
        """Bytes of shared memory, as all_gather_gemm.cu lays it out."""
        b = self.width if b_along_k else up(self.width, 64)
        return 1024 + self.stages * (TILE_ROWS + b) * DEPTH * 2


def choose_tiling(problem: RowSplitProduct, rank: int, processors: int) -> Tiling:
    """The tiling for which `predicted` says that the last tile is done first."""
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
    """Seconds until the last tile is done: units are dealt out in turn, and wait for their rows."""
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
    """When the first chunk of each rank's rows comes, and the last, in the order of `arrivals`."""
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
    """Whether to multiply while rows arrive; else gather first, and multiply then.

    To be asked of the same problem on all ranks: that of the rank with most columns. A product of
    few rows has too few tiles for the GPU, which cuBLAS cuts along k: then one gather and cuBLAS
    are done first.
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
_SPARE = 4  # multiprocessors for what starts the copies: beside a block of the product, no quarter
# of a multiprocessor has the registers of a warp left
_EFFICIENCY = {256: 1.0, 224: 0.99, 192: 0.92, 160: 0.88, 128: 0.82}


def _stages(width: int) -> int:
    """The stages that fit into the shared memory of a multiprocessor, at most 6."""
    return min(6, (_SHARED_BYTES - 1024) // ((TILE_ROWS + up(width, 64)) * DEPTH * 2))


def _with_even_blocks(tiling: Tiling, problem: RowSplitProduct) -> Tiling:
    """No more blocks than finish in as many turns: those left over have the rest to do."""
    units = sum(tiling.unit_rows(rows) for rows in problem.rows) * tiling.tile_columns(
        problem.columns
    )
    clusters = max(1, min(tiling.clusters, units))
    turns = -(-units // clusters)
    fewest = -(-units // turns) if turns else 1
    return replace(tiling, blocks=fewest * tiling.cluster)
