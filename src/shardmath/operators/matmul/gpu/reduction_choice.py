"""Choosing how the ranks' products are added up: by one kernel, or by cuBLAS and a collective.

Predicted times decide, counted from bytes, operations and the rates of one table. Pure, and the
same on all ranks for the same largest `depth`.
"""

from __future__ import annotations

from functools import lru_cache

from shardmath.arrays.dtypes import HALVES
from shardmath.base.immutable import Immutable
from shardmath.local.epilog import MatmulEpilog
from shardmath.machine import h200
from shardmath.operators.matmul.gpu.local_product import OperandLayout, SplitKProduct, even_rows
from shardmath.operators.matmul.gpu.patterns import Pattern, pattern_of
from shardmath.operators.matmul.gpu.tile_order import (
    TILE_COLUMNS,
    TILE_ROWS,
    TileOrder,
    TileSchedule,
)
from shardmath.operators.matmul.strategy import Strategy

_MULTIPLIERS = 128  # multiprocessors that multiply tiles in our kernel
_REDUCER_BLOCKS = 4
_BAND = 8  # rows of tiles that are multiplied at once, at least: they share columns of B
_MOST_BANDS, _MOST_CHUNKS = 16, 64
_EXACT_BYTES = 512 << 10  # of the largest result whose parts are added unrounded, as float32


class Choice(Immutable):
    """Whether one kernel is faster, and the predicted seconds of both ways."""

    fused: bool
    fused_seconds: float
    separate_seconds: float

    def __str__(self) -> str:
        names = ("one kernel", "cuBLAS and a collective")
        first, second = names if self.fused else names[::-1]
        times = sorted((self.fused_seconds, self.separate_seconds))
        return f"{first} ({times[0] * 1e6:.0f} us; {second} {times[1] * 1e6:.0f} us)"


EPILOGS = (MatmulEpilog.DEFAULT, MatmulEpilog.ALLREDUCE)  # those that the kernels can do


@lru_cache(256)
def choose(kind: str, problem: SplitKProduct) -> Choice:
    """The faster way to a "reduce-scatter", after which rank r has `rows[r]` rows of the sum, or to
    an "all-reduce", after which every rank has all rows.
    """
    if kind == "reduce-scatter":
        fused, separate = _scattering(problem), _separate(problem, ways=1)
    else:
        fused, separate = _sharing(problem), _separate(problem, ways=2)
    return Choice(fused < separate, fused, separate)


def predicted(strategy: Strategy) -> float | None:
    """The seconds of a product of 16-bit floats that is added up, by the faster of the two ways;
    None for other products.
    """
    pattern, problem = pattern_of(strategy), strategy.problem
    if pattern is None or not pattern.adds or problem.dtype not in HALVES:
        return None
    choice = choose(pattern.kind, split_k_product(strategy, pattern))
    fuses = choice.fused and problem.epilog in EPILOGS
    return choice.fused_seconds if fuses else choice.separate_seconds


def split_k_product(strategy: Strategy, pattern: Pattern) -> SplitKProduct:
    """The product of the rank with most of k, in a strategy of such a pattern."""
    problem = strategy.problem
    m, n, k = problem.shape
    most = max(part.length for part in strategy.depth)
    rows = pattern.rows or even_rows(m, problem.size)
    factors = OperandLayout("C", k), OperandLayout("C", n)
    return SplitKProduct(rows, m * n // max(1, sum(rows)), most, problem.dtype, *factors)


def adds_in_half_precision(elements: int) -> bool:
    """Whether the ranks' parts of so many 16-bit floats are rounded before a collective adds them.

    The kernel always does so. Parts of a small result stay float32, which takes a few microseconds
    more at most.
    """
    return 2 * elements > _EXACT_BYTES


def choose_schedule(problem: SplitKProduct) -> TileSchedule:
    """The schedule of a reduce-scatter. Four multiprocessors add up and 128 multiply: the tiles of
    most large products divide evenly among 128, and not among 132.
    """
    return TileSchedule(
        min(8, _down(problem)), _REDUCER_BLOCKS, stagger_cycles=_stagger_cycles(problem)
    )


def choose_shared_schedule(problem: SplitKProduct) -> TileSchedule:
    """The schedule of an all-reduce.

    A chunk is at least half of what all multiprocessors multiply at once: a band of few rows of
    tiles, of all owners, cut by columns.
    """
    tiles = TileOrder(problem.rows, problem.columns, 1).count
    high = sum(-(-rows // TILE_ROWS) for rows in problem.rows)  # rows of tiles of all ranks
    across = -(-problem.columns // TILE_COLUMNS)
    bands = min(_down(problem), max(1, high // _BAND), _MOST_BANDS)
    chunk_columns = max(
        1, min(across // 4, round(2 * tiles / bands / _MULTIPLIERS), _MOST_CHUNKS // bands)
    )
    return TileSchedule(
        bands * chunk_columns, chunk_columns=chunk_columns, stagger_cycles=_stagger_cycles(problem)
    )


def _stagger_cycles(problem: SplitKProduct) -> int:
    """By how many cycles each pair of blocks begins later than the one before, so that they send
    one after another: the last begins when the first has sent its tiles. Where each multiplies one
    tile only, all begin at once.
    """
    tiles = TileOrder(problem.rows, problem.columns, 1).count
    if tiles <= _MULTIPLIERS:
        return 0
    sent = 2 * TILE_ROWS * TILE_COLUMNS * (1 - 1 / len(problem.rows)) / h200.BURST
    wave = _multiplying(problem) / -(-tiles // _MULTIPLIERS)
    return int(2 * min(sent, wave / _MULTIPLIERS) * h200.CLOCK)


def _scattering(problem: SplitKProduct) -> float:
    """Seconds of GEMM + ReduceScatter by one kernel, which sends tiles while it multiplies."""
    together = max(_multiplying(problem), _reading(problem), _sent(problem) / h200.SCATTERED)
    return 4 * h200.KERNEL_START + together + _last(problem) / h200.SCATTERED


def _sharing(problem: SplitKProduct) -> float:
    """Seconds of GEMM + AllReduce by one kernel: sums are pushed to all, and copied at last."""
    last, sent = _last(problem), _sent(problem)
    product = max(_multiplying(problem), _reading(problem)) + (sent - last) / h200.BESIDE
    together = max(product, (2 * sent - last) / h200.MIXED)
    copied = h200.GRAPH_STEP + sent / h200.COPIED
    return 4 * h200.KERNEL_START + together + 2 * last / h200.BURST + copied


def _last(problem: SplitKProduct) -> float:
    """Bytes that a rank sends after its last tiles: those of one on each multiprocessor."""
    tiles = 2.0 * _MULTIPLIERS * TILE_ROWS * TILE_COLUMNS
    return min(1.0, tiles / _result(problem)) * _sent(problem)


def _separate(problem: SplitKProduct, *, ways: int) -> float:
    """Seconds of cuBLAS and then one collective, which sends the result once or, with two `ways`,
    there and back.

    cuBLAS cuts k where there are few tiles, so that operations or memory limit it.
    """
    wide = not adds_in_half_precision(problem.height * problem.columns)
    sent = (2 if wide else 1) * ways * _sent(problem) / (h200.SCATTERED, h200.SHARED)[ways - 1]
    rounding = wide * (h200.GRAPH_STEP + 3 * _result(problem) / h200.READING)
    product = max(problem.flops / h200.HALF_PRODUCT, _reading(problem))
    return h200.KERNEL_START + product + h200.GRAPH_STEP + h200.COLLECTIVE + sent + rounding


def _multiplying(problem: SplitKProduct) -> float:
    """Seconds to multiply, in rounds of one tile on each multiprocessor."""
    tiles = TileOrder(problem.rows, problem.columns, 1).count
    work = 2.0 * TILE_ROWS * TILE_COLUMNS * max(problem.depth, 64)
    return -(-tiles // _MULTIPLIERS) * work * h200.PROCESSORS / h200.HALF_PRODUCT


def _reading(problem: SplitKProduct) -> float:
    """Seconds to read both operands once."""
    return 2 * problem.depth * (problem.height + problem.columns) / h200.READING


def _result(problem: SplitKProduct) -> int:
    """Bytes of the whole result."""
    return 2 * problem.height * problem.columns


def _sent(problem: SplitKProduct) -> float:
    """Bytes that a rank sends when every rank gets its rows."""
    return _result(problem) * (1 - 1 / len(problem.rows))


def _down(problem: SplitKProduct) -> int:
    """Rows of tiles of the rank with most rows."""
    return max(1, -(-max(problem.rows) // TILE_ROWS))
