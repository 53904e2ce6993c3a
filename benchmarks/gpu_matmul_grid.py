"""Block-cyclic products on GPUs as fractions of the local product of the same share, in one run.

    python benchmarks/gpu_matmul_grid.py 8

The ranks form a grid of 2 rows; blocks have 512 rows and columns; all three matrices are
distributed alike. Inputs are random and alternate between two sets. Each figure is the median of
several replays of a CUDA graph that holds several calls, and of these the slowest rank's;
`eager_ms` is the same without a graph. A sample of every rank's result is checked against float64.
"""

from __future__ import annotations

import argparse
import os
import statistics

import record

from shardmath import startup
from shardmath.distribution import BlockCyclic, ProcessGrid
from shardmath.launch.function import spawn
from shardmath.linalg.advanced import Matmul
from shardmath.symmetric.allocation import allocate_symmetric_memory

REPEATS, CALLS, SAMPLE = 5, 4, 48
# (dtype, n of n x n x n): the fraction that issue 4 asks for on 8 H200.
CASES = {
    ("bfloat16", 16384): 0.88,
    ("bfloat16", 32768): 0.95,
    ("float64", 8192): 0.90,
    ("float64", 16384): 0.97,
}
TOLERANCE = {"bfloat16": 2.0**-7, "float16": 2.0**-9, "float32": 2.0**-18, "float64": 2.0**-44}


class Ranks:
    """What a rank measures with."""

    def __init__(self, size: int) -> None:
        import torch

        self.torch, self.size = torch, size
        self.rank = int(os.environ["SHARDMATH_RANK"])
        torch.cuda.set_device(self.rank)
        self.context = startup.initialize(self.rank)
        rows = 2 if size % 2 == 0 else 1
        self.grid = ProcessGrid(shape=(rows, size // rows), layout=ProcessGrid.Layout.COL_MAJOR)

    def time(self, calls, *, graph=True):
        """Milliseconds of one of `calls`, called in turn: of all ranks, the slowest."""
        torch, times = self.torch, []
        for call in calls:
            call()
        torch.cuda.synchronize()
        self.context.barrier()
        if graph:
            held = torch.cuda.CUDAGraph()
            with torch.cuda.graph(held):
                for turn in range(CALLS):
                    calls[turn % len(calls)]()
            held.replay()
        for _ in range(REPEATS):
            torch.cuda.synchronize()
            self.context.barrier()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            if graph:
                held.replay()
            else:
                for turn in range(CALLS):
                    calls[turn % len(calls)]()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / CALLS)
        self.context.team.check()
        median = statistics.median(times)
        return max(self.context.agree("time", lambda: median, lambda found: found))

    def indices(self, layout, n, axis):
        """The global indices of this rank's part along an axis."""
        spans = layout.part(self.rank, (n, n), size=self.size)[axis]
        found = [i for lo, hi in spans.ranges() for i in range(lo, hi)]
        return self.torch.tensor(found, device="cuda", dtype=self.torch.float64)

    def elements(self, rows, columns, seed, dtype):
        """Elements between -0.5 and 0.5 that any rank can compute from their indices."""
        torch = self.torch
        made = torch.empty(len(rows), len(columns), device="cuda", dtype=getattr(torch, dtype))
        for lo in range(0, len(rows), 1024):
            angle = rows[lo : lo + 1024, None] * 12.9898 + columns[None] * (78.233 + seed)
            made[lo : lo + 1024] = ((angle.sin_() * 43758.5453).frac_() * 0.5).to(made.dtype)
        return made


def on_heap(ranks, part, order):
    torch = ranks.torch
    made = allocate_symmetric_memory(
        tuple(part.shape), torch, dtype=part.dtype, axis_order=order, skip_symmetric_check=True
    )
    made.copy_(part)
    return made


def measure(ranks, dtype, n, order):
    """One row: the times of the local product and of ours, and the greatest error of a sample."""
    torch = ranks.torch
    blocks = BlockCyclic(ranks.grid, (512, 512))
    rows, columns = ranks.indices(blocks, n, 0), ranks.indices(blocks, n, 1)
    sets = [
        [
            on_heap(ranks, ranks.elements(rows, columns, seed + turn, dtype), order)
            for seed in (0, 5)
        ]
        for turn in (0, 1)
    ]
    share = [
        torch.randn(shape, device="cuda", dtype=torch.float32).to(getattr(torch, dtype))
        for shape in ((len(rows), n), (n, len(columns)))
    ]
    local = [ranks.time([lambda: torch.matmul(*share)])]
    planned = [Matmul(a, b, distributions=[blocks] * 3) for a, b in sets]
    for each in planned:
        each.plan()
    calls = [each.execute for each in planned]
    ours, eager = ranks.time(calls), ranks.time(calls, graph=False)
    local.append(ranks.time([lambda: torch.matmul(*share)]))
    error = check(ranks, planned[1].execute(), (rows, columns), n, dtype)
    mean = statistics.mean(local)  # before and after: GPUs that are warm are slower
    row = {"dtype": dtype, "n": n, "order": order, "ours_ms": ours, "local_ms": mean}
    row |= {
        "eager_ms": eager,
        "locals_ms": local,
        "fraction": mean / ours,
        "target": CASES.get((dtype, n)),
    }
    row |= {"chosen": planned[0].explain().splitlines()[1], "error": error}
    assert error <= TOLERANCE[dtype] * n**0.5, row
    for each in planned:
        each.free()
    return row


def check(ranks, d, indices, n, dtype):
    """The greatest error of a sample of this rank's result."""
    torch = ranks.torch
    generator = torch.Generator().manual_seed(ranks.rank)
    chosen = [torch.randint(len(x), (SAMPLE,), generator=generator).cuda() for x in indices]
    every = torch.arange(n, device="cuda", dtype=torch.float64)
    a = ranks.elements(indices[0][chosen[0]], every, 1, dtype).double()
    b = ranks.elements(every, indices[1][chosen[1]], 6, dtype).double()
    found = d[chosen[0]][:, chosen[1]].double()
    return float((found - a @ b).abs().max())


def run(size, cases, orders):
    ranks = Ranks(size)
    found = []
    with ranks.context:
        for dtype, n in cases:
            for order in orders:
                row = measure(ranks, dtype, n, order)
                found.append(row)
                if ranks.rank == 0:
                    shown = {
                        key: row[key] for key in ("dtype", "n", "order", "eager_ms", "locals_ms")
                    }
                    print(
                        f"{row['fraction']:.3f} of the local product: {row['ours_ms']:.3f} ms",
                        shown,
                        row["chosen"],
                        f"error {row['error']:.2g}",
                        flush=True,
                    )
                ranks.torch.cuda.empty_cache()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ranks", type=int, nargs="?", default=8)
    parser.add_argument("--cases", default="", help="such as bfloat16:16384,float64:8192")
    parser.add_argument("--orders", default="C", help="of the matrices: C, F, or CF")
    parser.add_argument("--commit", default="", help="where the source has no repository")
    options = parser.parse_args()
    cases = [
        (dtype, int(n))
        for dtype, _, n in (text.partition(":") for text in options.cases.split(","))
        if dtype
    ] or list(CASES)
    rows = spawn(run, options.ranks, options.ranks, cases, list(options.orders))[0]
    for row in rows:
        goal = "" if row["target"] is None else f"  (goal {row['target']:.2f})"
        print(
            f"{row['dtype']:>9} {row['n']:>6} {row['order']}  local {row['local_ms']:8.3f} ms  "
            f"ours {row['ours_ms']:8.3f} ms = {row['fraction']:.3f} of it{goal}"
        )
    record.keep("gpu_matmul_grid", rows, options.commit, ranks=options.ranks)


if __name__ == "__main__":
    main()
