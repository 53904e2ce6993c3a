"""Whether a product whose parts are added up is fused with what follows, or done in two steps.

Two steps are cuBLAS and one collective. Their predicted times decide; the constants are measured on
8 H200, and only their ratios matter. Pure: the same on all ranks for the same largest `depth`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shardmath.operators.matmul.gpu.sending import Shape
from shardmath.operators.matmul.gpu.sharded import ShardedProduct
from shardmath.operators.matmul.gpu.walk import TILE_COLUMNS, TILE_ROWS, Walk

__all__ = ["Choice", "choose_all_reduce", "choose_reduce_scatter", "choose_shape"]

_RATE = 780e12  # operations per second of one GPU
_MULTIPLIERS = 128  # multiprocessors that share out the tiles
_LINK = 290e9  # bytes per second of a collective, sent by each rank
_READ = 250e9  # bytes per second in which all multiprocessors read peers' memory
_SUM = 3.5e12  # bytes per second of the local memory in a sum
_TAKERS = 4
_TAKEN = 1.6e11  # bytes per second that the takers add up, while others multiply
_STEP = 5e-6  # seconds until a kernel has started and what peers do is seen
_COLLECTIVE = 12e-6


@dataclass(frozen=True)
class Choice:
    """What was chosen, and the predicted seconds of both ways."""

    fused: bool
    fused_seconds: float
    separate_seconds: float

    def __str__(self) -> str:
        names = ("fused", "cuBLAS and a collective")
        first, second = names if self.fused else names[::-1]
        times = sorted((self.fused_seconds, self.separate_seconds))
        return f"{first} ({times[0] * 1e6:.0f} us; {second} {times[1] * 1e6:.0f} us)"


@lru_cache(256)
def choose_reduce_scatter(problem: ShardedProduct) -> Choice:
    """For rank r's `rows[r]` rows of the product."""
    nbytes = 2 * problem.height * problem.columns
    sent = nbytes * (1 - 1 / len(problem.rows))
    last = nbytes / min(8, _down(problem)) / _SUM
    burst = min(sent, 2.0 * _MULTIPLIERS * TILE_ROWS * TILE_COLUMNS) / _LINK
    fused = max(_multiplying(problem), sent / _LINK) + burst + last + 3 * _STEP
    return _choice(fused, problem.flops / _RATE + sent / _LINK + _COLLECTIVE)


@lru_cache(256)
def choose_all_reduce(problem: ShardedProduct) -> Choice:
    """For all rows on every rank."""
    nbytes = 2 * problem.height * problem.columns
    sent = nbytes * (1 - 1 / len(problem.rows))
    scatter = choose_reduce_scatter(problem).fused_seconds
    late = sent / min(8, _down(problem)) * min(3, _down(problem))
    fused = max(scatter + late / _READ, 2 * sent / _LINK) + 2 * _STEP
    return _choice(fused, problem.flops / _RATE + 2 * sent / _LINK + _COLLECTIVE)


def choose_shape(problem: ShardedProduct) -> Shape:
    """How to cut the work. The takers get what they can add up before the product ends.

    Four multiprocessors take, and 128 multiply: most large products have tiles for 128 in even
    numbers, and not for 132.
    """
    chunks = min(8, _down(problem))
    each = 2 * problem.height * problem.columns / chunks / _TAKEN
    left = problem.flops / _RATE * (1 - 1 / chunks)  # after the first chunk has come
    return Shape(chunks, _TAKERS, late=chunks - min(chunks - 1, int(left / each)))


def _multiplying(problem: ShardedProduct) -> float:
    """Seconds: tiles are computed in rounds of one on each multiprocessor."""
    tiles = Walk(problem.rows, problem.columns, 1).count
    each = 2.0 * TILE_ROWS * TILE_COLUMNS * max(problem.depth, 64) * _MULTIPLIERS / _RATE
    return -(-tiles // _MULTIPLIERS) * each


def _down(problem: ShardedProduct) -> int:
    """Rows of tiles of the rank that has most."""
    return max(1, -(-max(problem.rows) // TILE_ROWS))


def _choice(fused: float, separate: float) -> Choice:
    return Choice(fused < separate, fused, separate)
