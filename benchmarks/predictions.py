"""The predictions of `explain()`, beside measured times, on 2 ranks of one core each.

`python benchmarks/predictions.py`. Products, transforms and redistributions by the chosen strategy,
with operands on the heap, executed repeatedly: operands that fit in a cache are found there. `us`
is the median, barrier to barrier; `best us` the minimum; `cpu us` the processor time of rank 0's
core in its cheapest call, including waits that do not sleep. `ratio` is the minimum divided by the
prediction: predictions are to stay within 0.67 and 1.5.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import choices
from choices import filled, letters_of
from on_cores import run, together, turns_within
from threadpoolctl import threadpool_limits

from shardmath.context.context import DistributedContext
from shardmath.distribution import Distribution, Redistribute, Replicated, Slab
from shardmath.fft import FFT
from shardmath.linalg.advanced import Matmul
from shardmath.tools.trace import seconds_predicted

RANKS = 2
SECONDS = 1.0  # of each case
LIMIT = 1.5
X, Y, R = Slab.X, Slab.Y, Replicated()


@dataclass(frozen=True)
class Product(choices.Case):
    """A of m x k times B of k x n, with the distributions of all three."""

    def operator(self, context: DistributedContext) -> Matmul:
        """A product of random operands."""
        operands = choices.operands_of(self, context)
        return Matmul(*operands, distributions=self.distributions)


@dataclass(frozen=True)
class Transform:
    """A transform along all axes of an array of this shape."""

    shape: tuple[int, ...]
    distributions: tuple[Distribution, Distribution]
    dtype: str = "complex128"
    noun = "FFT"

    def operator(self, context: DistributedContext) -> FFT | Redistribute:
        """An operator for a random operand."""
        operand = filled(context, self.distributions[0], self.shape, self.dtype)
        return self.planned(operand)

    def planned(self, operand: Any) -> FFT | Redistribute:
        return FFT(operand, distribution=self.distributions)

    def __str__(self) -> str:
        shape = " x ".join(map(str, self.shape))
        return f"{self.noun} {shape} {self.dtype}, {letters_of(self.distributions)}"


@dataclass(frozen=True)
class Moving(Transform):
    """A redistribution of an array of this shape."""

    dtype: str = "float64"
    noun = "redistribute"

    def planned(self, operand: Any) -> Redistribute:
        return Redistribute(operand, *self.distributions)


Case = Product | Transform

CASES: tuple[Case, ...] = (
    # Matrix times vector: a rank reads 9, 34 and 134 MB.
    Product(2200, 1, 1024, (X, R, X)),
    Product(8192, 1, 1024, (X, R, X)),
    Product(16384, 1, 2048, (X, R, X)),
    Product(4400, 1, 1024, (X, R, X), "float32"),
    Product(32768, 1, 2048, (X, R, X), "float32"),
    Product(1, 2048, 1024, (R, Y, Y)),
    # Few columns, few rows, little of k.
    Product(8192, 4, 1024, (X, R, X)),
    Product(8192, 16, 1024, (X, R, X)),
    Product(8192, 16, 1024, (X, R, X), "float32"),
    Product(4, 8192, 1024, (R, Y, Y)),
    Product(4096, 4096, 8, (X, R, X)),
    Product(4096, 4096, 32, (X, R, X)),
    Product(4096, 4096, 32, (X, R, X), "float32"),
    # Bound by arithmetic.
    Product(1024, 1024, 1024, (X, R, X)),
    Product(2048, 2048, 2048, (X, X, X)),
    Product(2048, 2048, 2048, (X, X, X), "float32"),
    # Operands move, or results are added up.
    Product(4096, 64, 1024, (X, X, X)),
    Product(64, 64, 65536, (Y, X, X)),
    Product(1024, 1024, 1024, (Y, X, X)),
    Product(1024, 1024, 256, (Y, X, R)),
    Product(1, 4096, 4096, (R, X, Y)),
    Product(1024, 1024, 512, (X, R, X), "complex64"),
    Product(1024, 1024, 512, (X, R, X), "float16"),
    Transform((128, 128, 128), (X, Y)),
    Transform((256, 256, 256), (X, Y)),
    Transform((256, 256, 256), (X, X)),
    Transform((256, 256, 256), (X, Y), "complex64"),
    Transform((256, 256, 256), (X, Y), "float64"),
    Transform((2048, 2048), (X, X)),
    Moving((4096, 4096), (X, Y)),
    Moving((4096, 4096), (Y, X)),
    Moving((1024, 1024), (X, Y)),
    Moving((2048, 2048), (X, R)),
)


def measure(context: DistributedContext) -> list[dict[str, Any]]:
    """The rows, as this rank measures them."""
    with threadpool_limits(1):
        return [row(context, case) for case in CASES]


def row(context: DistributedContext, case: Case) -> dict[str, Any]:
    with case.operator(context) as operator:
        operator.plan()
        predicted = seconds_predicted(operator.explain()) or math.nan
        found = measured(context, operator.execute)
    seconds, worked = zip(*found, strict=True)
    return {
        "case": str(case),
        "predicted us": round(predicted * 1e6, 1),
        "us": round(statistics.median(seconds) * 1e6, 1),
        "best us": round(min(seconds) * 1e6, 1),
        "cpu us": round(min(worked) * 1e6, 1),
        "ratio": round(min(seconds) / predicted, 2),
    }


def measured(context: DistributedContext, call: Callable[[], object]) -> list[tuple[float, float]]:
    """Seconds that each call takes, and that this rank's threads work meanwhile."""
    first = [together(context, call)[0] for _ in range(3)]  # these touch pages, and peers' pages
    turns = turns_within(context, SECONDS, first[-1], least=10, most=2000)
    return [together(context, call) for _ in range(turns)]


if __name__ == "__main__":
    run("predictions", measure, RANKS, limit=LIMIT)
