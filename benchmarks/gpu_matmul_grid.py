"""Block-cyclic products on GPUs as fractions of the local product of the same size, in one run.

    python benchmarks/gpu_matmul_grid.py 8

The ranks form a grid, 2 x 4 for 8 ranks; blocks have 512 rows and columns; all three matrices are
distributed alike. A case n is the work that a rank has of n x n x n on a grid of 2 x 4: n / 2 rows
and n / 4 columns of the result, whatever the grid. Inputs are random and alternate between two
sets. Figures are medians over graphs of several calls, in which the local product and ours take
turns, for the slowest rank; `eager_ms` is the same without a graph. A sample of every rank's result
is checked against float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from on_gpus import Ranks, command, in_turn, run

from shardmath.distribution import BlockCyclic, ProcessGrid
from shardmath.handles.allocation import allocate_symmetric_memory
from shardmath.linalg.advanced import Matmul

CALLS, SAMPLE = 4, 48
GRIDS = {8: [(2, 4)], 4: [(2, 2)], 2: [(1, 2), (2, 1)]}
# (dtype, n): the fraction that is asked for on 8 H200.
CASES = {
    ("bfloat16", 16384): 0.88,
    ("bfloat16", 32768): 0.95,
    ("float64", 8192): 0.90,
    ("float64", 16384): 0.97,
}
TOLERANCE = {"bfloat16": 2.0**-7, "float16": 2.0**-9, "float32": 2.0**-18, "float64": 2.0**-44}


class Product:
    """One product on a rank: its matrices are made from their indices, so that any rank can."""

    def __init__(self, ranks: Ranks, grid: tuple[int, int], dtype: str, n: int, order: str) -> None:
        self.ranks, self.dtype, self.order = ranks, dtype, order
        process = ProcessGrid(shape=grid, layout=ProcessGrid.Layout.COL_MAJOR)
        self.blocks = BlockCyclic(process, (512, 512))
        self.shape = grid[0] * n // 2, grid[1] * n // 4, n
        self.sets = [[self.factor(index, turn) for index in (0, 1)] for turn in (0, 1)]

    def indices(self, shape: tuple[int, int], axis: int) -> Any:
        """The global indices of this rank's part along an axis."""
        torch, ranks = self.ranks.torch, self.ranks
        spans = self.blocks.part(ranks.rank, shape, size=ranks.size)
        found = [i for lo, hi in spans[axis].ranges() for i in range(lo, hi)]
        return torch.tensor(found, device="cuda", dtype=torch.float64)

    def factor(self, index: int, turn: int) -> Any:
        """This rank's part of A or B, on the heap."""
        m, n, k = self.shape
        shape = (m, k) if index == 0 else (k, n)
        part = self.elements(self.indices(shape, 0), self.indices(shape, 1), turn + 5 * index)
        made = allocate_symmetric_memory(
            tuple(part.shape),
            self.ranks.torch,
            dtype=part.dtype,
            axis_order=self.order,
            skip_symmetric_check=True,
        )
        made.copy_(part)
        return made

    def elements(self, rows: Any, columns: Any, seed: int) -> Any:
        """Elements between -0.5 and 0.5 of these rows and columns."""
        torch = self.ranks.torch
        made = torch.empty(len(rows), len(columns), device="cuda", dtype=getattr(torch, self.dtype))
        for lo in range(0, len(rows), 1024):
            angle = rows[lo : lo + 1024, None] * 12.9898 + columns[None] * (78.233 + seed)
            made[lo : lo + 1024] = ((angle.sin_() * 43758.5453).frac_() * 0.5).to(made.dtype)
        return made

    def share(self) -> list[Any]:
        """Random factors of the same share, whole."""
        torch, (m, n, k) = self.ranks.torch, self.shape
        rows, columns = len(self.indices((m, n), 0)), len(self.indices((m, n), 1))
        return [
            torch.rand(shape, device="cuda").sub_(0.5).to(getattr(torch, self.dtype))
            for shape in ((rows, k), (k, columns))
        ]

    def error(self, d: Any) -> float:
        """The greatest of a sample of the result of the second set."""
        torch, (m, n, k) = self.ranks.torch, self.shape
        generator = torch.Generator().manual_seed(self.ranks.rank)
        places = [self.indices((m, n), axis) for axis in (0, 1)]
        chosen = [torch.randint(len(x), (SAMPLE,), generator=generator).cuda() for x in places]
        every = torch.arange(k, device="cuda", dtype=torch.float64)
        a = self.elements(places[0][chosen[0]], every, 1).double()
        b = self.elements(every, places[1][chosen[1]], 6).double()
        return float((d[chosen[0]][:, chosen[1]].double() - a @ b).abs().max())


def measured(ranks: Ranks, grid: tuple[int, int], dtype: str, n: int, order: str) -> dict[str, Any]:
    """One row: the times of the local product and of ours, and the greatest error of a sample."""
    product, torch = Product(ranks, grid, dtype, n, order), ranks.torch
    share = product.share()
    planned = [Matmul(a, b, distributions=[product.blocks] * 3) for a, b in product.sets]
    for each in planned:
        each.plan()
    ours = in_turn(lambda turn: planned[turn].execute(), 2)
    systems = {"local": lambda: torch.matmul(*share), "ours": ours, "eager": ours}
    times = ranks.times(systems, CALLS, eager=("eager",))
    row = {"dtype": dtype, "n": n, "grid": list(grid), "shape": list(product.shape), "order": order}
    row |= {f"{name}_ms": time / 1e3 for name, time in times.items()}
    row |= {"fraction": times["local"] / times["ours"], "target": CASES.get((dtype, n), "")}
    row |= {"chosen": planned[0].explain().splitlines()[1]}
    row |= {"error": ranks.largest(product.error(planned[1].execute()))}
    assert row["error"] <= TOLERANCE[dtype] * n**0.5, row
    for each in planned:
        each.free()
    return row


def measure(
    ranks: Ranks, grids: list[tuple[int, int]], cases: list[tuple[str, int]], orders: str
) -> Iterator[dict[str, Any]]:
    """A row for each grid, case and memory order."""
    for grid, (dtype, n), order in product(grids, cases, orders):
        yield measured(ranks, grid, dtype, n, order)
        ranks.torch.cuda.empty_cache()


if __name__ == "__main__":
    parser = command(__doc__)
    parser.add_argument("--cases", default="", help="such as bfloat16:16384,float64:8192")
    parser.add_argument("--orders", default="C", help="of the matrices: C, F, or CF")
    options = parser.parse_args()
    cases = [
        (dtype, int(n))
        for dtype, _, n in (text.partition(":") for text in options.cases.split(","))
        if dtype
    ] or list(CASES)
    size = options.gpus
    grids = GRIDS.get(size, [(2, size // 2) if size % 2 == 0 else (1, size)])
    run("gpu_matmul_grid", measure, options, grids, cases, options.orders)
