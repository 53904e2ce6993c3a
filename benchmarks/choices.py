"""Whether the chosen strategy of a product is the fastest: it and others are timed in turn.

    python benchmarks/choices.py              2 ranks of one core each
    python benchmarks/choices.py --gpus 2

The products are those where memory traffic decides: vectors, few rows, few columns, a short k. The
choice and up to four strategies that are predicted to take at most 2.5 times as long take turns.
`ratio` is the time of the fastest of the others divided by that of the choice: below 1 the choice
is wrong. Operands are on the heap. A figure is the minimum of many calls, which other programs on
the same cores disturb least; on GPUs it is the median of graphs of calls.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import record
from on_cores import in_turn, on_ranks, together, turns_within

from shardmath.context.context import DistributedContext
from shardmath.distribution import Distribution, Replicated, Slab
from shardmath.geometry import Layout
from shardmath.handles.allocation import allocate_symmetric_memory
from shardmath.linalg.advanced import Matmul, MatmulOptions
from shardmath.local.epilog import MatmulEpilog
from shardmath.machine import Machine
from shardmath.operators.matmul.gpu.reduction_choice import predicted
from shardmath.operators.matmul.problem import Problem
from shardmath.operators.matmul.strategy import choose

RANKS = 2
MOST, RANGE = 4, 2.5  # strategies of a case, and times the choice's prediction
SECONDS = 1.0  # of each case on cores
CALLS = 20  # of a graph
X, Y, R = Slab.X, Slab.Y, Replicated()
Triple = tuple[Distribution, Distribution, Distribution]


@dataclass(frozen=True)
class Case:
    """A of m x k times B of k x n, with the distributions of all three."""

    m: int
    n: int
    k: int
    distributions: Triple
    dtype: str = "float64"

    @property
    def operands(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The shapes of A and B."""
        return (self.m, self.k), (self.k, self.n)

    def problem(self, size: int) -> Problem:
        """The problem on which `size` ranks agree."""
        shapes = (*self.operands, (self.m, self.n))
        a, b, d = (
            Layout.bind([each] * size, shape)
            for each, shape in zip(self.distributions, shapes, strict=True)
        )
        return Problem(
            a, b, d, self.dtype, self.dtype, (False, False), (False, False),
            has_c=False, sums_c=False, epilog=MatmulEpilog.DEFAULT, strategy=None,
        )  # fmt: skip

    def __str__(self) -> str:
        letters = letters_of(self.distributions)
        return f"{self.m} x {self.k} times {self.k} x {self.n} {self.dtype}, {letters}"


ON_CORES = (
    Case(1, 1024, 1024, (X, R, X)),
    Case(1024, 1, 1024, (R, Y, Y)),
    Case(4096, 4, 4096, (R, R, R), "float32"),
    Case(4, 4096, 4096, (R, R, X)),
    Case(4096, 4, 4096, (R, R, Y)),
    Case(4, 64, 16384, (R, R, X)),
    Case(4, 4096, 4096, (X, R, R), "float32"),
    Case(4, 4096, 64, (X, R, R)),
    Case(4, 1024, 16384, (R, R, X)),
    Case(4, 64, 16384, (X, R, Y)),
    Case(16384, 4, 64, (R, R, Y)),
    Case(4, 1024, 16384, (Y, R, X)),
    Case(4, 16384, 1024, (Y, R, X)),
    Case(256, 16384, 256, (Y, X, X)),
    Case(64, 16, 256, (X, R, R)),
    Case(16, 16, 16384, (X, Y, X)),
    Case(64, 4, 16384, (R, R, R)),
    Case(4096, 256, 4096, (R, R, R), "float32"),
    Case(256, 256, 16384, (X, Y, R), "float32"),
    # Small: the overhead of each step decides.
    Case(4, 64, 1024, (Y, X, Y)),
    Case(1, 64, 1024, (X, X, R)),
    Case(1, 1024, 64, (X, X, R)),
    Case(1024, 4, 64, (Y, Y, Y), "float32"),
    Case(256, 256, 256, (Y, X, X)),
    Case(64, 64, 1024, (Y, R, X)),
)
ON_GPUS = (
    Case(1, 1024, 16384, (R, R, X)),
    Case(4, 1024, 16384, (X, R, R)),
    Case(1024, 4, 16384, (R, R, R)),
    Case(1024, 4, 16384, (R, R, Y)),
    Case(64, 1024, 16384, (Y, R, X)),
    Case(64, 1024, 16384, (X, R, Y)),
    Case(1024, 64, 16384, (R, R, R)),
    Case(64, 4096, 4096, (X, R, R)),
    Case(64, 1024, 1024, (Y, X, X), "bfloat16"),
    Case(256, 1024, 1024, (Y, X, X)),
    Case(256, 4096, 1024, (R, X, Y)),
    Case(256, 16384, 1024, (R, R, R)),
    Case(16384, 256, 256, (X, R, R)),
    Case(4096, 1024, 1024, (X, Y, Y)),
    Case(4096, 4096, 4096, (R, X, R), "bfloat16"),
    Case(4096, 4096, 4096, (Y, R, R), "bfloat16"),
    # Small: the overhead of each step decides.
    Case(64, 64, 64, (Y, R, X)),
    Case(4, 256, 64, (Y, R, X), "bfloat16"),
    Case(64, 64, 16384, (Y, R, X)),
    Case(16, 16384, 64, (R, X, X)),
    Case(4, 16384, 64, (Y, X, X), "bfloat16"),
    Case(256, 256, 64, (Y, X, X), "bfloat16"),
    Case(64, 256, 16384, (X, R, R), "bfloat16"),
    Case(512, 4096, 512, (X, R, R)),
    Case(1024, 1024, 1024, (Y, R, X), "bfloat16"),
)


def compared(case: Case, machine: Machine) -> dict[str, tuple[str, float]]:
    """What is compared, by label: the strategy and its predicted seconds, the choice first."""
    fused = [] if machine.kind == "cpu" else [predicted]
    _, found = choose(case.problem(len(machine.hosts)), machine.rates, *fused)
    worth = [each for each in found if each[1].seconds <= RANGE * found[0][1].seconds][:MOST]
    return {strategy.label: (str(strategy), cost.seconds) for strategy, cost in worth}


def row(case: Case, machine: Machine, times: dict[str, float]) -> dict[str, Any]:
    """What is kept of a case; `times` are seconds by label."""
    found = compared(case, machine)
    strategies = [
        {"strategy": name, "us": round(times[label] * 1e6, 1), "predicted us": round(s * 1e6, 1)}
        for label, (name, s) in found.items()
    ]
    choice, *others = found
    ratio = round(min(map(times.get, others)) / times[choice], 2) if others else None
    return {"case": str(case), "strategies": strategies, "ratio": ratio}


def letters_of(distributions: Sequence[Distribution]) -> str:
    """The letters of slabs, and R for what all ranks have."""
    return " ".join("R" if isinstance(x, Replicated) else x.name for x in distributions)


def filled(
    context: DistributedContext, distribution: Distribution, shape: tuple[int, ...], dtype: str
) -> Any:
    """This rank's part of an array of random numbers, on the heap."""
    own = distribution.shape(context.rank, shape)
    array = allocate_symmetric_memory(own, np, dtype=dtype, skip_symmetric_check=True)
    array[...] = np.random.default_rng(context.rank).random(own)
    return array


def operands_of(case: Case, context: DistributedContext) -> list[Any]:
    """A and B of a case, on cores."""
    pairs = zip(case.distributions, case.operands, strict=False)
    return [filled(context, distribution, shape, case.dtype) for distribution, shape in pairs]


def products(case: Case, context: DistributedContext, operands: Sequence[Any]) -> dict[str, Matmul]:
    """A planned product by each strategy that is compared, by label."""
    machine = Machine("cpu" if context.team is None else "cuda", context.hosts)
    found = {}
    for label in compared(case, machine):
        options = MatmulOptions(strategy=label)
        product = Matmul(*operands, distributions=case.distributions, options=options)
        product.plan()
        found[label] = product
    return found


def on_cores(context: DistributedContext) -> list[dict[str, Any]]:
    """The rows, as this rank measures them."""
    rows = []
    for case in ON_CORES:
        systems = products(case, context, operands_of(case, context))
        calls = {label: product.execute for label, product in systems.items()}
        rows.append(row(case, Machine("cpu", context.hosts), least_seconds(context, calls)))
        for product in systems.values():
            product.free()
    return rows


def least_seconds(context: DistributedContext, calls: dict[str, Any]) -> dict[str, float]:
    """The least seconds of each call, in as many turns as there is time for."""

    def seconds(label: str) -> float:
        return together(context, calls[label])[0]

    turn = sum(times[-1] for times in in_turn(calls, 2, seconds).values())
    turns = turns_within(context, SECONDS, turn, least=11, most=1000)
    return {label: min(times) for label, times in in_turn(calls, turns, seconds).items()}


def on_gpus(ranks: Any) -> Iterator[dict[str, Any]]:
    """The rows of `ON_GPUS`."""
    torch, context = ranks.torch, ranks.context
    for case in ON_GPUS:
        operands = []
        for each, shape in zip(case.distributions[:2], case.operands, strict=True):
            own, dtype = each.shape(ranks.rank, shape), getattr(torch, case.dtype)
            x = allocate_symmetric_memory(own, torch, dtype=dtype, skip_symmetric_check=True)
            operands.append(x.copy_(torch.rand(own, device=ranks.device)))
        systems = products(case, context, operands)
        calls = {label: product.execute for label, product in systems.items()}
        times = {label: us * 1e-6 for label, us in ranks.times(calls, CALLS).items()}
        yield row(case, Machine("cuda", context.hosts), times)
        for product in systems.values():
            product.free()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--commit", default="", help="where the source has no repository")
    options = parser.parse_args()
    if options.gpus:
        from on_gpus import run

        run("choices", on_gpus, options)
    else:
        os.environ["SHARDMATH_THREADS"] = "1"
        record.keep("choices", on_ranks(on_cores, RANKS), options.commit, ranks=RANKS)
