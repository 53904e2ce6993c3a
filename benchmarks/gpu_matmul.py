"""Products on GPUs beside cuBLAS alone, NCCL + cuBLAS and torch's fused operators, in one run.

    python benchmarks/gpu_matmul.py 8
    python benchmarks/gpu_matmul.py 8 --most 8192

bfloat16, random operands, in two sets that take turns. Every result is checked against float64 on
samples before it is timed. A figure is the median of several replays of a graph of calls (of the
calls themselves if a system cannot be captured), for the slowest rank. `local` is the product
alone, as if all its operands had been there.

On fewer than 8 GPUs n is smaller, and m and k are as on 8: a rank multiplies all rows of A with as
many columns as a rank of 8, in as many tiles. It has more of A itself, and less comes from peers
(on 4 GPUs, 3 / 4 of it instead of 7 / 8).
"""

from __future__ import annotations

from collections.abc import Iterator

from on_gpus import Ranks, command, in_turn, run

from shardmath.operators.matmul.gpu.all_gather import AllGatherGemm, product_kernel
from shardmath.operators.matmul.gpu.local_product import OperandLayout
from shardmath.operators.matmul.gpu.row_split import RowSplitProduct, choose_tiling, is_fused_faster

SETS = 2  # of operands
LIMIT = 0.005  # of the greatest results: bfloat16 rounds off 0.002

# m, n on 8 GPUs, k, and the goal.
CASES = [
    (8192, 28672, 8192, ">= 0.95 of local"),
    (16384, 53248, 16384, ">= 0.99 of local"),
    (4096, 49152, 12288, ">= 0.98 of local"),
    *((m, 28672, 8192, "<= 1.02 x the better") for m in (128, 256, 512, 1024)),
    *((m, 28672, 8192, "<= 1.02 x the better, >= 1.3 x NCCL") for m in (2048, 4096, 16384, 32768)),
]


class Gathered:
    """A by rows, B and the result by columns. `systems` are calls that take a number of operands'
    set, and return what `error` checks: the result.
    """

    def __init__(self, ranks: Ranks, m: int, n: int, k: int) -> None:
        torch, size = ranks.torch, ranks.size
        self.ranks, self.torch = ranks, torch
        self.shape = (m, n // size, k)
        rows, columns = m // size, n // size
        generator = torch.Generator(ranks.device).manual_seed(1 + ranks.rank)

        def some(*shape):
            x = torch.randn(shape, device=ranks.device, generator=generator)
            return x.bfloat16()

        self.a = [some(rows, k) for _ in range(SETS)]
        self.b = [some(columns, k).T for _ in range(SETS)]
        self.whole = [torch.empty(m, k, device=ranks.device).bfloat16() for _ in range(SETS)]
        for whole, part in zip(self.whole, self.a, strict=True):
            ranks.dist.all_gather_into_tensor(whole, part)
        self.out = [torch.empty(m, columns, device=ranks.device).bfloat16() for _ in range(SETS)]
        self.room = torch.empty_like(self.whole[0])
        self.problem = problem_of(ranks, m, n, k)
        self.how = "fused" if is_fused_faster(self.problem) else "gather first"
        self.plan = AllGatherGemm.create(ranks.context, self.problem) if self.fused else None
        if self.plan:
            self.how += f", {self.plan.tiling}"
        self.systems = {
            "local": self.local,
            "nccl": self.nccl,
            "torch": self.fused_by_torch,
            "ours": self.ours,
        }

    @property
    def fused(self):
        """Whether ours multiplies while rows arrive."""
        return self.how.startswith("fused")

    def local(self, turn):
        """The product by cuBLAS alone, on rows that are already here."""
        return self.torch.mm(self.whole[turn], self.b[turn], out=self.out[turn])

    def nccl(self, turn):
        """NCCL's gather, then the product by cuBLAS."""
        self.ranks.dist.all_gather_into_tensor(self.room, self.a[turn])
        return self.torch.mm(self.room, self.b[turn], out=self.out[turn])

    def fused_by_torch(self, turn):
        """Copies by copy engines, a product of cuBLAS for the rows of each rank."""
        fused = self.torch.ops.symm_mem.fused_all_gather_matmul
        arguments = (self.a[turn], [self.b[turn]], 0, self.ranks.group)
        return fused(*arguments, return_A=False)[1][0]

    def ours(self, turn):
        """What `is_fused_faster` says: the plan, or one gather and cuBLAS."""
        a, b, out, stream = self.a[turn], self.b[turn], self.out[turn], self.ranks.stream()
        if self.plan:
            self.plan.launch(a.data_ptr(), b.data_ptr(), out.data_ptr(), stream)
            return out
        table = [[1] * self.ranks.size] * self.ranks.size
        addresses = a.data_ptr(), self.room.data_ptr()
        self.ranks.moves.move(*addresses, table, a.nbytes, stream, whole=True)
        return self.torch.mm(self.room, self.b[turn], out=out)

    def error(self, out, turn):
        """The greatest error of samples from every rank's rows, relative to the result's scale."""
        m, n, k = self.shape
        torch, device = self.torch, self.ranks.device
        generator = torch.Generator(device).manual_seed(7)
        rows = torch.randint(0, m, (256,), device=device, generator=generator)
        columns = torch.randint(0, n, (256,), device=device, generator=generator)
        wanted = self.whole[turn][rows].double() @ self.b[turn][:, columns].double()
        return float((out[rows][:, columns].double() - wanted).abs().max()) / k**0.5 / 4

    def free(self):
        """Give the plan's memory back to the heap."""
        if self.plan:
            self.plan.free()


def problem_of(ranks: Ranks, m: int, n: int, k: int) -> RowSplitProduct:
    """A by rows of m, B by columns of n."""
    rows, factors = (m // ranks.size,) * ranks.size, (OperandLayout("C", k), OperandLayout("F", k))
    return RowSplitProduct(rows, n // ranks.size, k, "bfloat16", *factors)


def compile_all(ranks: Ranks, cases: list) -> None:
    """Compile what the cases need. Each rank begins with another kernel: the others, which it needs
    next, are then on disk.
    """
    team = ranks.context.team
    problems = [problem_of(ranks, *case[:3]) for case in cases]
    needed = [
        (problem, choose_tiling(problem, ranks.rank, team.device.processors))
        for problem in problems
        if is_fused_faster(problem)
    ]
    kernels = list({(t.width, t.cluster, t.stages): (p, t) for p, t in needed}.values())
    for number in range(len(kernels)):
        product_kernel(team, *kernels[(number + ranks.rank) % len(kernels)])


NO_GRAPHS = {"torch"}  # its fused operator cannot be captured


def measure_case(ranks: Ranks, m: int, n: int, k: int, target: str) -> dict:
    """One row: milliseconds of every system, and how ours compares."""
    torch = ranks.torch
    torch.cuda.empty_cache()
    work = Gathered(ranks, m, n, k)
    row = {"what": "AG+GEMM", "m": m, "n": n, "k": k, "share": [*work.shape], "how": work.how}
    row["target"] = target
    calls = 4 if 2.0 * m * n * k / ranks.size > 5e11 else 10
    for name, call in work.systems.items():
        for turn in range(SETS):
            out = call(turn)
            torch.cuda.synchronize()
            error = work.error(out, turn)
            worst = ranks.largest(error)
            assert worst <= LIMIT, f"{m} {n} {k} by {name}: error {worst}"
        if name == "ours":
            row["error"] = worst
    systems = {name: in_turn(call, SETS) for name, call in work.systems.items()}
    found = ranks.times(systems, calls, eager=NO_GRAPHS)
    row |= {f"{name}_ms": us / 1e3 for name, us in found.items()}
    row["of_local"] = row["local_ms"] / row["ours_ms"]
    row["to_nccl"] = row["nccl_ms"] / row["ours_ms"]
    peers = [row[f"{name}_ms"] for name in work.systems if name not in ("local", "ours")]
    row["to_best_peer"] = min(peers) / row["ours_ms"]
    work.free()
    return row


def measure(ranks: Ranks, cases: list) -> Iterator[dict]:
    import torch.distributed._symmetric_memory  # noqa: F401  (registers the fused operators)

    compile_all(ranks, cases)
    for case in cases:
        yield measure_case(ranks, *case)


if __name__ == "__main__":
    parser = command(__doc__)
    parser.add_argument("--most", type=int, default=1 << 30, help="the largest m")
    options = parser.parse_args()
    size = options.gpus
    cases = [[m, n * size // 8, k, target] for m, n, k, target in CASES if m <= options.most]
    run("gpu_matmul", measure, options, cases)
