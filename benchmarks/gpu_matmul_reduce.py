"""GEMM + ReduceScatter and GEMM + AllReduce beside cuBLAS alone, NCCL and torch, in one run.

    python benchmarks/gpu_matmul_reduce.py 8
    python benchmarks/gpu_matmul_reduce.py 2 --most 1024

A is M x K / ranks on each rank, B is K / ranks x N, random; two sets of operands take turns. Each
figure is the median of several replays of a CUDA graph that holds several calls, for the slowest
rank; torch's fused operator cannot be captured, and is called as often. Samples of each result are
checked against float64 before it is timed. Our two ways are "kernel" and "separate"; "execute" is
`Matmul.execute`, which chooses one, and "chosen" says which. For an AllReduce, "heap" is the same
with arrays on the symmetric heap, where peers write the results.

On fewer than 8 GPUs the cases that have a goal are measured once more with a rank's share of work
on 8: `as_on` says so, and k is smaller. A rank keeps more of the sums itself, and less travels (on
4 GPUs, 3 / 4 of them instead of 7 / 8).
"""

from __future__ import annotations

from collections.abc import Iterator

from on_gpus import Ranks, command, in_turn, run

from shardmath.arrays import dtypes, library_named
from shardmath.distribution import Replicated, Slab
from shardmath.handles.allocation import empty_on_heap
from shardmath.linalg.advanced import Matmul
from shardmath.operators.matmul.gpu.local_product import OperandLayout, SplitKProduct, even_rows
from shardmath.operators.matmul.gpu.reduction_choice import choose
from shardmath.operators.matmul.gpu.tile_sending import GemmAllReduce, GemmReduceScatter

SETS = 2  # of operands
SAMPLES = 32  # rows
BF16 = dtypes.of("bfloat16")
KINDS = {"GEMM+RS": "reduce-scatter", "GEMM+AR": "all-reduce"}

# What follows the product, its global sizes, and the goals on 8 H200.
CASES = [
    ("GEMM+RS", 8192, 8192, 28672, ">= 0.93 of local"),
    ("GEMM+RS", 16384, 16384, 53248, ">= 0.98 of local"),
    ("GEMM+RS", 4096, 12288, 49152, ">= 0.95 of local"),
    *(("GEMM+RS", m, 8192, 28672, "") for m in (16, 64, 256, 512, 1024, 2048)),
    *(("GEMM+AR", m, 8192, 28672, "") for m in (16, 64, 256, 512)),
    ("GEMM+AR", 1024, 8192, 28672, "<= 0.15 ms"),
    ("GEMM+AR", 2048, 8192, 28672, ""),
    ("GEMM+AR", 4096, 8192, 28672, ""),
    ("GEMM+AR", 8192, 8192, 28672, "<= 0.85 ms"),
]


class Product:
    """The operands of one case on one rank, and each way to multiply them and add up."""

    def __init__(self, ranks: Ranks, what: str, m: int, n: int, k: int) -> None:
        torch, size = ranks.torch, ranks.size
        self.ranks, self.k, self.depth = ranks, k, k // size
        self.everywhere = what == "GEMM+AR"
        generator = torch.Generator(ranks.device).manual_seed(ranks.rank)

        def random(rows, columns):
            shape = {"device": ranks.device, "generator": generator}
            return torch.randn(rows, columns, **shape).bfloat16()

        self.sets = [(random(m, self.depth), random(self.depth, n)) for _ in range(SETS)]
        self.partial = random(m, n)
        self.rows = m // size
        self.first = 0 if self.everywhere else ranks.rank * self.rows
        height = m if self.everywhere else self.rows
        self.result = torch.empty(height, n, device=ranks.device, dtype=torch.bfloat16)
        rows = even_rows(m, size) if self.everywhere else (self.rows,) * size
        factors = OperandLayout("C", self.depth), OperandLayout("C", n)
        self.problem = SplitKProduct(rows, n, self.depth, "bfloat16", *factors)
        self.choice = choose(KINDS[what], self.problem)
        kind = GemmAllReduce if self.everywhere else GemmReduceScatter
        self.plan = kind.create(ranks.context, self.problem)
        distributions = [Slab.Y, Slab.X, Replicated() if self.everywhere else Slab.X]
        self.results = [self.result]
        with ranks.context:
            self.planned = [Matmul(*each, distributions=distributions) for each in self.sets]
            self.planned_on_heap = self.on_heap(distributions) if self.everywhere else []
            for each in (*self.planned, *self.planned_on_heap):
                each.plan()

    def local(self, turn):
        """The product by cuBLAS alone: this rank's part of the sum of each element."""
        self.ranks.torch.mm(*self.sets[turn], out=self.partial)

    def nccl(self, turn):
        """Product by cuBLAS, then NCCL."""
        self.local(turn)
        if self.everywhere:
            self.ranks.dist.all_reduce(self.partial)
        else:
            self.ranks.dist.reduce_scatter_tensor(self.result, self.partial)

    def separate(self, turn):
        """Product by cuBLAS, then our collective, both in bfloat16."""
        self.local(turn)
        moves, stream = self.ranks.moves, self.ranks.stream()
        addresses = self.partial.data_ptr(), self.result.data_ptr()
        if self.everywhere:
            moves.all_reduce(*addresses, self.partial.numel(), BF16, "sum", stream)
        else:
            counts = [self.rows * self.partial.shape[1]] * self.ranks.size
            moves.reduce_scatter(*addresses, counts, BF16, "sum", stream)
        return self.result

    def kernel(self, turn):
        """Our kernel that sends tiles while it multiplies."""
        addresses = [x.data_ptr() for x in (*self.sets[turn], self.result)]
        self.plan.launch(*addresses, self.ranks.stream())
        return self.result

    def execute(self, turn):
        """What a user calls."""
        return self.planned[turn].execute()

    def heap(self, turn):
        """What a user calls, with all arrays on the heap."""
        return self.planned_on_heap[turn].execute()

    def on_heap(self, distributions):
        """Products of copies on the heap, which share one result there."""

        def shared(x):
            library = library_named("torch")
            return empty_on_heap(self.ranks.context, library, x.shape, "bfloat16").copy_(x)

        self.results.append(shared(self.result))
        named = {"distributions": distributions, "beta": 0.0, "options": {"inplace": True}}
        return [Matmul(*map(shared, each), self.results[-1], **named) for each in self.sets]

    def torch_fused(self):
        """The call of torch, and whether it can be captured."""
        import torch.distributed._symmetric_memory as symm

        torch, group = self.ranks.torch, self.ranks.group
        if not self.everywhere:
            ops = torch.ops.symm_mem
            return (
                lambda turn: ops.fused_matmul_reduce_scatter(*self.sets[turn], "sum", 0, group)
            ), False
        shape = {"dtype": torch.bfloat16, "device": self.ranks.device}
        shared = symm.empty(*self.partial.shape, **shape)
        symm.rendezvous(shared, group)

        def two_shot(turn):
            torch.mm(*self.sets[turn], out=shared)
            torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", group)

        return two_shot, True

    def check(self, call):
        """Sampled rows of the result against float64."""
        torch, ranks = self.ranks.torch, self.ranks
        for result in self.results:
            result.fill_(float("nan"))
        result = call(1)
        torch.cuda.synchronize()
        ranks.context.team.check()
        for owner in range(ranks.size):
            chosen = torch.arange(SAMPLES, device=ranks.device) * 7919 % result.shape[0]
            first = torch.tensor([self.first], device=ranks.device)
            ranks.dist.broadcast(first, owner)
            a, b = self.sets[1]
            wanted = a[chosen + first].double() @ b.double()
            ranks.dist.all_reduce(wanted)
            if owner == ranks.rank or self.everywhere:
                off = (result[chosen].double() - wanted).abs().max() / self.k**0.5
                assert float(off) < 0.04, f"rank {ranks.rank}: off by {float(off)}"
            if self.everywhere:
                break

    def close(self):
        """Give the memory back."""
        self.plan.free()
        for each in (*self.planned, *self.planned_on_heap):
            each.free()
        self.ranks.context.barrier()


def measured(ranks: Ranks, what: str, m: int, n: int, k: int, as_on: int, target: str):
    """The row of one case, in microseconds."""
    product = Product(ranks, what, m, n, k)
    names = ["kernel", "separate", "execute"] + ["heap"] * product.everywhere
    ways = {name: getattr(product, name) for name in names}
    for way in ways.values():
        product.check(way)
    theirs, captured = product.torch_fused()
    ways = {"local": product.local, **ways, "nccl": product.nccl, "torch": theirs}
    calls = 2 if m * n * k > 1 << 42 else 6
    systems = {name: in_turn(way, SETS) for name, way in ways.items()}
    times = ranks.times(systems, calls, eager=() if captured else ("torch",))
    product.close()
    row = {"what": what, "m": m, "n": n, "k": k, "as_on": as_on, "chosen": str(product.choice)}
    row |= {f"{name}_us": us for name, us in times.items()}
    row["of_local"] = times["local"] / times["execute"]
    return {**row, "target": target}


def measure(ranks: Ranks, most: int, only: str) -> Iterator[dict]:
    """A row for each case, and one with the share of 8 ranks for those that have a goal."""
    for what, m, n, k, target in CASES:
        if m > most or only not in what:
            continue
        for as_on in (ranks.size, 8) if target and ranks.size < 8 else (ranks.size,):
            depth = k // as_on * ranks.size
            yield measured(ranks, what, m, n, depth, as_on, target)


if __name__ == "__main__":
    parser = command(__doc__)
    parser.add_argument("--most", type=int, default=1 << 30, help="rows of A")
    parser.add_argument("--only", default="", help="GEMM+RS or GEMM+AR")
    options = parser.parse_args()
    run("gpu_matmul_reduce", measure, options, options.most, options.only)
