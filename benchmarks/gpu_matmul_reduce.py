"""GEMM + ReduceScatter and GEMM + AllReduce beside cuBLAS alone, NCCL and torch, in one run.

    python benchmarks/gpu_matmul_reduce.py 8

A is M x K / ranks on each rank, B is K / ranks x N, random; two sets of operands take turns. Each
figure is the median of several replays of a CUDA graph that holds several calls (torch's fused
operator, which cannot be captured, is called as often), and of these the slowest rank's. Samples of
each result are checked against float64 before it is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from dataclasses import dataclass

import record

from shardmath import startup
from shardmath.arrays import dtypes
from shardmath.collectives.device import DeviceCollectives
from shardmath.launch.function import spawn
from shardmath.operators.matmul.gpu.all_reduce import GemmAllReduce, even_rows
from shardmath.operators.matmul.gpu.reduce_scatter import GemmReduceScatter
from shardmath.operators.matmul.gpu.sharded import Factor, ShardedProduct

REPEATS = 9
SAMPLES = 32  # rows
BF16 = dtypes.of("bfloat16")


@dataclass(frozen=True)
class Case:
    """One product: what follows it, its global sizes, and what issue 4 asks for on 8 H200."""

    what: str
    m: int
    n: int
    k: int
    target: str = ""

    @property
    def calls(self) -> int:
        """In one graph."""
        return 2 if self.m * self.n * self.k > 1 << 42 else 6


CASES = [
    Case("GEMM+RS", 8192, 8192, 28672, ">= 0.93 of local"),
    Case("GEMM+RS", 16384, 16384, 53248, ">= 0.98 of local"),
    Case("GEMM+RS", 4096, 12288, 49152, ">= 0.95 of local"),
    Case("GEMM+AR", 1024, 8192, 28672, "<= 0.15 ms"),
    Case("GEMM+AR", 2048, 8192, 28672),
    Case("GEMM+AR", 4096, 8192, 28672),
    Case("GEMM+AR", 8192, 8192, 28672, "<= 0.85 ms"),
]


class Ranks:
    """What a rank measures with: its context, NCCL's group, and our collectives."""

    def __init__(self, store: str, size: int) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        self.rank, self.size = int(os.environ["SHARDMATH_RANK"]), size
        torch.cuda.set_device(self.rank)
        self.device = torch.device("cuda", self.rank)
        self.context = startup.initialize(self.rank)
        dist.init_process_group(
            "nccl",
            init_method=f"file://{store}",
            rank=self.rank,
            world_size=size,
            device_id=self.device,
        )
        self.group = dist.group.WORLD.group_name
        self.moves = DeviceCollectives.together(self.context)

    def stream(self):
        """The stream that is current, or being captured."""
        return self.torch.cuda.current_stream().cuda_stream

    def time(self, call, calls, *, captured=True):
        """Milliseconds of call(i), i counting the calls: of all ranks, the slowest."""
        torch = self.torch
        for i in range(2):
            call(i)
        torch.cuda.synchronize()
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for i in range(calls):
                    call(i)
            graph.replay()
        times = []
        for _ in range(REPEATS):
            torch.cuda.synchronize()
            self.context.barrier()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            if captured:
                graph.replay()
            else:
                for i in range(calls):
                    call(i)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / calls)
        self.context.team.check()
        median = statistics.median(times)
        return max(self.context.agree("time", lambda: median, lambda times: times))


class Product:
    """The operands of one case on one rank, and each way to multiply them and add up."""

    def __init__(self, ranks: Ranks, case: Case) -> None:
        torch, depth = ranks.torch, case.k // ranks.size
        self.ranks, self.case, self.depth = ranks, case, depth
        generator = torch.Generator(ranks.device).manual_seed(ranks.rank)

        def random(rows, columns):
            shape = {"device": ranks.device, "generator": generator}
            return torch.randn(rows, columns, **shape).bfloat16()

        self.sets = [(random(case.m, depth), random(depth, case.n)) for _ in range(2)]
        self.partial = random(case.m, case.n)
        self.rows = case.m // ranks.size
        self.first = 0 if case.what == "GEMM+AR" else ranks.rank * self.rows
        height = case.m if case.what == "GEMM+AR" else self.rows
        self.result = torch.empty(height, case.n, device=ranks.device, dtype=torch.bfloat16)

    def local(self, i):
        """Only cuBLAS: this rank's part of all elements."""
        self.ranks.torch.mm(*self.sets[i % 2], out=self.partial)

    def nccl(self, i):
        """Product by cuBLAS, then NCCL."""
        self.local(i)
        if self.case.what == "GEMM+AR":
            self.ranks.dist.all_reduce(self.partial)
        else:
            self.ranks.dist.reduce_scatter_tensor(self.result, self.partial)

    def separate(self, i):
        """Product by cuBLAS, then our collective."""
        self.local(i)
        moves, stream = self.ranks.moves, self.ranks.stream()
        places = self.partial.data_ptr(), self.result.data_ptr()
        if self.case.what == "GEMM+AR":
            moves.all_reduce(*places, self.partial.numel(), BF16, "sum", stream)
        else:
            counts = [self.rows * self.case.n] * self.ranks.size
            moves.reduce_scatter(*places, counts, BF16, "sum", stream)

    def torch_fused(self):
        """The call of torch, and whether it can be captured."""
        import torch.distributed._symmetric_memory as symm

        torch, group, case = self.ranks.torch, self.ranks.group, self.case
        if case.what == "GEMM+RS":
            ops = torch.ops.symm_mem
            return (
                lambda i: ops.fused_matmul_reduce_scatter(*self.sets[i % 2], "sum", 0, group)
            ), False
        shared = symm.empty(case.m, case.n, dtype=torch.bfloat16, device=self.ranks.device)
        symm.rendezvous(shared, group)

        def two_shot(i):
            torch.mm(*self.sets[i % 2], out=shared)
            torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", group)

        return two_shot, True

    def fused(self):
        """Our plan, and its call."""
        case, size = self.case, self.ranks.size
        everywhere = case.what == "GEMM+AR"
        rows = even_rows(case.m, size) if everywhere else (self.rows,) * size
        factors = Factor("C", self.depth), Factor("C", case.n)
        problem = ShardedProduct(rows, case.n, self.depth, "bfloat16", *factors)
        kind = GemmAllReduce if everywhere else GemmReduceScatter
        plan = kind.together(self.ranks.context, problem)

        def call(i):
            a, b = self.sets[i % 2]
            plan.launch(a.data_ptr(), b.data_ptr(), self.result.data_ptr(), self.ranks.stream())

        return plan, call

    def check(self, call):
        """Sampled rows of the result against float64."""
        torch, ranks = self.ranks.torch, self.ranks
        self.result.fill_(float("nan"))
        call(1)
        torch.cuda.synchronize()
        ranks.context.team.check()
        for owner in range(ranks.size):
            height = self.result.shape[0]
            chosen = torch.arange(SAMPLES, device=ranks.device) * 7919 % height
            first = torch.tensor([self.first], device=ranks.device)
            ranks.dist.broadcast(first, owner)
            a, b = self.sets[1]
            wanted = a[chosen + first].double() @ b.double()
            ranks.dist.all_reduce(wanted)
            if owner == ranks.rank or self.case.what == "GEMM+AR":
                off = (self.result[chosen].double() - wanted).abs().max() / self.case.k**0.5
                assert float(off) < 0.04, f"rank {ranks.rank}: off by {float(off)}"
            if self.case.what == "GEMM+AR":
                break


def measured(ranks: Ranks, case: Case):
    product = Product(ranks, case)
    row = {"what": case.what, "m": case.m, "n": case.n, "k": case.k}
    product.check(product.separate)
    plan, ours = product.fused()
    product.check(ours)
    before = ranks.time(product.local, case.calls)
    row["ours_ms"] = ranks.time(ours, case.calls)
    after = ranks.time(product.local, case.calls)
    row["local_ms"] = (before + after) / 2
    row["separate_ms"] = ranks.time(product.separate, case.calls)
    row["nccl_ms"] = ranks.time(product.nccl, case.calls)
    theirs, captured = product.torch_fused()
    row["torch_ms"] = ranks.time(theirs, case.calls, captured=captured)
    row["of_local"] = row["local_ms"] / row["ours_ms"]
    plan.free()
    ranks.context.barrier()
    return {**row, "target": case.target}


def measure(store, size):
    ranks = Ranks(store, size)
    rows = []
    for case in CASES:
        rows.append(measured(ranks, case))
        if ranks.rank == 0:
            kept = {k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()}
            print(json.dumps(kept), flush=True)
    facts = record.of_gpus(ranks.torch, size)
    ranks.torch.cuda.synchronize()
    ranks.dist.destroy_process_group()
    startup.finalize()
    return [rows, facts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gpus", type=int, nargs="?", default=8)
    parser.add_argument("--commit", default="", help="where the source has no repository")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows, facts = spawn(measure, options.gpus, f"{folder}/store", options.gpus)[0]
    record.keep("gpu_matmul_reduce", rows, options.commit, **facts)


if __name__ == "__main__":
    main()
