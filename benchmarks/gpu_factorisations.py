"""Factorisations on GPUs beside torch.linalg on one of them, in one run.

    python benchmarks/gpu_factorisations.py 2
    python benchmarks/gpu_factorisations.py 1 --sizes 8192 --blocks 256 512

float64. A rate counts n^3/3 operations for Cholesky, 2/3 n^3 for LU and 2/3 n^3 + 2 n^2 m for m
right-hand sides. torch's cuSOLVER has the whole matrix on rank 0's GPU, while the others wait; ours
is split by columns, in blocks of the width that is computed with, and by rows. Calls take turns. A
figure is the median over turns, of the slowest rank. Each result is checked before it is timed: its
residual on random vectors, beside the norms of the factors.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from on_gpus import Ranks, command, run

from shardmath.distribution import BlockCyclic, Distribution, ProcessGrid, Slab
from shardmath.linalg import cholesky, lu_factor, solve

REPEATS = 5
RIGHT_SIDES = 64
TORCH = "torch.linalg"
OPERATIONS = ("cholesky", "lu_factor", "solve")


def operations(n: int) -> dict[str, float]:
    """Operations of each factorisation."""
    lu = 2 / 3 * n**3
    return {"cholesky": n**3 / 3, "lu_factor": lu, "solve": lu + 2 * n * n * RIGHT_SIDES}


class Case:
    """Matrices of one size, and the calls: by operation and system, torch's first."""

    def __init__(self, ranks: Ranks, n: int, blocks: list[int | None]) -> None:
        self.ranks, self.n = ranks, n
        torch = ranks.torch
        generator = torch.Generator(ranks.device).manual_seed(0)
        whole = torch.randn(n, n, dtype=torch.float64, device=ranks.device, generator=generator)
        right = torch.randn(
            n, RIGHT_SIDES, dtype=torch.float64, device=ranks.device, generator=generator
        )
        positive = whole @ whole.T / n
        positive.diagonal().add_(1.0)
        self.whole = {"cholesky": positive, "lu_factor": whole, "solve": whole}
        self.right = right
        self.calls: dict[str, dict[str, Callable[[], Any]]] = {
            "cholesky": {TORCH: lambda: torch.linalg.cholesky(positive)},
            "lu_factor": {TORCH: lambda: torch.linalg.lu_factor(whole)},
            "solve": {TORCH: lambda: torch.linalg.solve(whole, right)},
        }
        b = self.part(right, Slab.X)
        for block in blocks:
            columns = BlockCyclic(ProcessGrid(shape=(1, ranks.size)), (n, block or 512))
            for how, name in ((columns, "columns"), (Slab.X, "rows")):
                if name == "rows" and block is not None:
                    continue
                system = name if block is None else f"{name}, {block}"
                self._add(system, how, b, {"block_size": block})

    def _add(self, system: str, how: Distribution, b: Any, options: dict[str, Any]) -> None:
        one, two = {"options": options}, {"options": options}
        one["distributions"], two["distributions"] = how, [how, Slab.X]
        p, g = (self.part(self.whole[name], how) for name in ("cholesky", "solve"))
        self.calls["cholesky"][system] = lambda: cholesky(p, **one)
        self.calls["lu_factor"][system] = lambda: lu_factor(g, **one)
        self.calls["solve"][system] = lambda: solve(g, b, **two)

    def part(self, whole: Any, distribution: Distribution) -> Any:
        """This rank's part; columns in column-major order, as they are computed with."""
        torch, rank, size = self.ranks.torch, self.ranks.rank, self.ranks.size
        ranges = distribution.index_ranges(rank, tuple(whole.shape), size=size)
        rows, columns = (
            torch.cat([torch.arange(lo, hi, device=whole.device) for lo, hi in axis])
            for axis in ranges
        )
        chosen = whole[rows][:, columns]
        return chosen.contiguous() if distribution is Slab.X else chosen.T.contiguous().T

    def error(self, operation: str, system: str) -> float:
        """The residual of a result beside rounding: of all ranks', the largest."""
        torch, n = self.ranks.torch, self.n
        made = self.calls[operation][system]()
        part = made[0] if operation == "lu_factor" else made
        if operation != "solve":
            # Every factor of ours is that of torch, but for rounding, pivots included.
            want = self.calls[operation][TORCH]()
            want = want[0] if operation == "lu_factor" else want
            how = Slab.X if system == "rows" else self._columns(system)
            distance = (part - self.part(want, how)).norm() / want.norm()
        else:
            x = torch.empty_like(self.right)
            self.ranks.dist.all_gather_into_tensor(x, part.contiguous())
            a = self.whole["solve"]
            distance = (a @ x - self.right).norm() / (a.norm() * x.norm())
        return self.ranks.largest(float(distance)) / (n * torch.finfo(torch.float64).eps)

    def _columns(self, system: str) -> Distribution:
        width = int(system.partition(", ")[2] or 512)
        return BlockCyclic(ProcessGrid(shape=(1, self.ranks.size)), (self.n, width))


def measure(ranks: Ranks, sizes: list[int], blocks: list[int | None]) -> list[dict]:
    """A row for each size, operation and system."""
    rows = []
    for n in sizes:
        case = Case(ranks, n, blocks)
        for operation in OPERATIONS:
            rows += measured(ranks, case, operation)
        del case
        ranks.torch.cuda.empty_cache()
    return rows


def measured(ranks: Ranks, case: Case, operation: str) -> list[dict]:
    """GFLOP/s of every system."""
    torch, calls = ranks.torch, case.calls[operation]
    seconds: dict[str, list[float]] = {system: [] for system in calls}
    errors = {system: case.error(operation, system) for system in calls if system != TORCH}
    for turn in range(REPEATS + 1):
        for system, call in calls.items():
            torch.cuda.synchronize()
            ranks.context.barrier()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            made = call() if system != TORCH or ranks.rank == 0 else None
            end.record()
            torch.cuda.synchronize()
            del made
            if turn:  # the first plans, and loads kernels
                seconds[system].append(ranks.largest(start.elapsed_time(end) * 1e-3))
    return [
        {
            "n": case.n,
            "operation": operation,
            "system": system,
            "ms": round(statistics.median(spent) * 1e3, 2),
            "TFLOP/s": round(operations(case.n)[operation] / statistics.median(spent) / 1e12, 2),
            "of torch": round(statistics.median(seconds[TORCH]) / statistics.median(spent), 3),
            "error": round(errors.get(system, 0.0), 4),
        }
        for system, spent in seconds.items()
    ]


def main() -> None:
    """Measure, print a table, keep it in results."""
    parser = command(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--blocks", type=int, nargs="*", default=[])
    options = parser.parse_args()
    rows = run("gpu_factorisations", measure, options, options.sizes, [None, *options.blocks])
    for row in rows:
        print(*(f"{name} {value}" for name, value in row.items()), sep="  ")


if __name__ == "__main__":
    main()
