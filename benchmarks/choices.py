"""Whether the strategy that is chosen for a product is the fastest: it, and others, timed in turn.

    python benchmarks/choices.py              2 ranks of one core each
    python benchmarks/choices.py --gpus 2

The products are those where the memory that arithmetic touches decides: vectors, few rows, few
columns, little of k. `without` is what would be chosen if only operations and links were counted,
and `ratio` its time divided by that of the choice, beside the predicted one: below 1 the choice is
wrong. Operands are on the heap. A figure is the fastest of many calls, which other programs on the
same cores disturb least; of GPUs, the median of graphs of calls.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import record

from shardmath import startup
from shardmath.context import Context
from shardmath.distribution import Distribution, Replicated, Slab
from shardmath.geometry import Layout
from shardmath.launch import spawn
from shardmath.linalg.advanced import Matmul, MatmulOptions
from shardmath.local.epilog import MatmulEpilog
from shardmath.machine import Machine, Rates
from shardmath.operators.matmul.gpu.reduction_choice import predicted
from shardmath.operators.matmul.problem import Problem
from shardmath.operators.matmul.strategy import Strategy, choose
from shardmath.symmetric.allocation import allocate_symmetric_memory

RANKS = 2
SECONDS = 1.0  # of each case on cores
CALLS = 20  # of a graph
X, Y, R = Slab.X, Slab.Y, Replicated()
Triple = tuple[Distribution, Distribution, Distribution]


@dataclass(frozen=True)
class Case:
    """A of m x k times B of k x n: how these and the result are distributed."""

    m: int
    n: int
    k: int
    distributions: Triple
    dtype: str = "float64"

    @property
    def operands(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Their shapes."""
        return (self.m, self.k), (self.k, self.n)

    def problem(self, size: int) -> Problem:
        """What `size` ranks agree on."""
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
        letters = ("R" if isinstance(x, Replicated) else x.name for x in self.distributions)
        return f"{self.m} x {self.k} times {self.k} x {self.n} {self.dtype}, {' '.join(letters)}"


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
)


def chosen(case: Case, machine: Machine) -> tuple[Strategy, Strategy, float]:
    """The strategy chosen, that chosen without memory traffic, and the predicted ratio."""
    fused = [] if machine.kind == "cpu" else [predicted]
    problem = case.problem(len(machine.hosts))
    best, compared = choose(problem, machine.rates, *fused)
    without, _ = choose(problem, without_memory(machine.rates), *fused)
    seconds = {strategy.label: cost.seconds for strategy, cost in compared}
    return best, without, seconds[without.label] / seconds[best.label]


def without_memory(rates: Rates) -> Rates:
    """The same where arithmetic touches memory at no cost."""
    return replace(rates, memory=math.inf, cache=0, packing=math.inf)


def row(case: Case, machine: Machine, times: dict[str, float]) -> dict[str, Any]:
    """What is kept of a case; `times` are seconds by label."""
    best, without, expected = chosen(case, machine)
    return {
        "case": str(case),
        "chosen": str(best),
        "us": round(times[best.label] * 1e6, 1),
        "without": str(without),
        "without us": round(times[without.label] * 1e6, 1),
        "ratio": round(times[without.label] / times[best.label], 2),
        "predicted ratio": round(expected, 2),
    }


def products(case: Case, context: Context, operands: Sequence[Any]) -> dict[str, Matmul]:
    """The two products by label, planned."""
    machine = Machine("cpu" if context.team is None else "cuda", context.hosts)
    found = {}
    for strategy in chosen(case, machine)[:2]:
        options = MatmulOptions(strategy=strategy.label)
        product = Matmul(*operands, distributions=case.distributions, options=options)
        product.plan()
        found[strategy.label] = product
    return found


def on_cores() -> list[dict[str, Any]]:
    """The rows, as this rank measures them."""
    context = startup.initialize("cpu")
    rows = []
    for case in ON_CORES:
        operands = []
        for each, shape in zip(case.distributions[:2], case.operands, strict=True):
            own = each.shape(context.rank, shape)
            x = allocate_symmetric_memory(own, np, dtype=case.dtype, skip_symmetric_check=True)
            x[...] = np.random.default_rng(context.rank).random(own)
            operands.append(x)
        systems = products(case, context, operands)
        rows.append(row(case, Machine("cpu", context.hosts), in_turn(context, systems)))
        for product in systems.values():
            product.free()
    startup.finalize()
    return rows


def in_turn(context: Context, systems: dict[str, Matmul]) -> dict[str, float]:
    """The least seconds of each, barrier to barrier, as long as rank 0 has found that there is time
    for.
    """
    found: dict[str, list[float]] = {label: [] for label in systems}
    repeats, done = 4, 0
    while done < repeats:
        for label, product in systems.items():
            context.barrier()
            start = time.perf_counter()
            product.execute()
            context.barrier()
            found[label].append(time.perf_counter() - start)
        done += 1
        if done == 3:
            each = sum(times[-1] for times in found.values())
            fit = min(1000, max(11, int(SECONDS / each)))
            told = context.board.exchange("repeats", fit.to_bytes(8, "little"))
            repeats = int.from_bytes(told[0], "little")
    return {label: min(times) for label, times in found.items()}


def on_gpus(ranks: Any) -> list[dict[str, Any]]:
    """The rows of `ON_GPUS`."""
    torch, context, rows = ranks.torch, ranks.context, []
    for case in ON_GPUS:
        operands = []
        for each, shape in zip(case.distributions[:2], case.operands, strict=True):
            own, dtype = each.shape(ranks.rank, shape), getattr(torch, case.dtype)
            x = allocate_symmetric_memory(own, torch, dtype=dtype, skip_symmetric_check=True)
            operands.append(x.copy_(torch.rand(own, device=ranks.device)))
        systems = products(case, context, operands)
        calls = {label: product.execute for label, product in systems.items()}
        times = {label: us * 1e-6 for label, us in ranks.times(calls, CALLS).items()}
        rows.append(row(case, Machine("cuda", context.hosts), times))
        for product in systems.values():
            product.free()
    return rows


def main() -> None:
    """Measure, print a table, write results/choices.json, or choices_<how many>.json of GPUs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--commit", default="", help="where the source has no repository")
    options = parser.parse_args()
    if options.gpus:
        from on_gpus import run

        rows = run("choices", on_gpus, options)
    else:
        os.environ["SHARDMATH_THREADS"] = "1"
        rows = spawn(on_cores, RANKS)[0]
        record.keep("choices", rows, options.commit, ranks=RANKS)
    for each in rows:
        print(
            f"{each['case']:52} {each['chosen']:34}{each['us']:10.1f} us   {each['without']:34}"
            f"{each['without us']:10.1f} us {each['ratio']:6.2f} predicted "
            f"{each['predicted ratio']:.2f}{'  <--' * (each['ratio'] < 0.95)}"
        )


if __name__ == "__main__":
    main()
