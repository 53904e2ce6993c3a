"""Tokens to their experts and back on GPUs, beside NCCL's all-to-all with its permutes, in one run.

    python benchmarks/gpu_experts.py 2

Every rank has 8192 tokens, or as many as the case says, sorted by expert; some experts are chosen
much more often than others. Dispatch is `torch.ops.symm_mem.all_to_all_vdev_2d`, combine
`all_to_all_vdev_2d_offset`, whose counts lie on the GPU. NCCL's all_to_all_single takes the counts
from the host, which costs it nothing here, and one index_select each brings its tokens to the order
of experts and back. `wire` is NCCL's all-to-all without these. Each figure is the slowest rank's
median, in CUDA graphs and in eager calls, and of these also what a call takes the host; results are
compared with NCCL's before timing.
"""

from __future__ import annotations

from itertools import accumulate

from on_gpus import command, run

from shardmath import symmetric_memory as symm_mem

WIDTH, EXPERTS = 4096, 64  # of all ranks
CALLS = 8
HOST_CALLS = 50  # fewer than a GPU's queue has room for
GOAL = 1.3  # times NCCL's, with its permutes
FAVOURED = 4.0  # how much more often the first experts are asked for than the last


class Layer:
    """One rank's tokens, and how many go to each expert; by rank what is sent, and what comes."""

    def __init__(self, ranks, tokens, width):
        torch, self.ranks, size = ranks.torch, ranks, ranks.size
        device = ranks.device
        generator = torch.Generator().manual_seed(0)
        often = torch.linspace(FAVOURED, 1, EXPERTS)[torch.randperm(EXPERTS, generator=generator)]
        generator.manual_seed(1 + ranks.rank)
        chosen = torch.multinomial(often, tokens, replacement=True, generator=generator)
        counts = torch.bincount(chosen, minlength=EXPERTS)
        words = ranks.context.agree("counts", counts.tolist, lambda all_counts: all_counts)
        table, own = torch.tensor(words).view(size, size, EXPERTS // size), EXPERTS // size
        coming = table[:, ranks.rank]  # [src, expert]
        self.sent = table[ranks.rank].sum(1).tolist()
        self.came = coming.sum(1).tolist()
        self.x = self.empty(tokens, width).normal_()
        self.splits = symm_mem.empty(EXPERTS, dtype=torch.int64, device=device).copy_(counts)
        self.there, self.back = (
            symm_mem.empty(2, EXPERTS, dtype=torch.int64, device=device) for _ in range(2)
        )
        largest = max(int(table[:, rank].sum()) for rank in range(size)) + own
        self.out, self.home = self.empty(largest, width), self.empty(tokens, width)
        # NCCL reads torch's own memory: it registers what it finds in a graph.
        total = sum(self.came)
        self.given, self.returned = self.x.clone(), torch.empty_like(self.x)
        self.arrived, self.ordered, self.mixed = (
            torch.empty(total, width, dtype=torch.bfloat16, device=device) for _ in range(3)
        )
        starts = list(accumulate(coming.reshape(-1).tolist(), initial=0))
        order = [
            index
            for expert in range(own)
            for src in range(size)
            for index in range(starts[src * own + expert], starts[src * own + expert + 1])
        ]
        self.order = torch.tensor(order, dtype=torch.int64, device=device)
        self.inverse = torch.argsort(self.order)

    def empty(self, *shape):
        return symm_mem.empty(*shape, dtype=self.ranks.torch.bfloat16, device=self.ranks.device)

    # -- ours --------------------------------------------------------------------------------------

    def dispatch(self):
        ops = self.ranks.torch.ops.symm_mem
        ops.all_to_all_vdev_2d(self.x, self.out, self.splits, self.there, "experts")

    def combine(self):
        ops = self.ranks.torch.ops.symm_mem
        ops.all_to_all_vdev_2d_offset(self.out, self.home, self.there, self.back, "experts")

    # -- NCCL's ------------------------------------------------------------------------------------

    def dispatch_wire(self):
        self.ranks.dist.all_to_all_single(self.arrived, self.given, self.came, self.sent)

    def dispatch_by_nccl(self):
        self.dispatch_wire()
        self.ranks.torch.index_select(self.arrived, 0, self.order, out=self.ordered)

    def combine_wire(self):
        self.ranks.dist.all_to_all_single(self.returned, self.mixed, self.sent, self.came)

    def combine_by_nccl(self):
        self.ranks.torch.index_select(self.ordered, 0, self.inverse, out=self.mixed)
        self.combine_wire()

    def check(self):
        """Raise AssertionError unless the experts get the same tokens, and all tokens return."""
        torch = self.ranks.torch
        for call in (self.dispatch, self.combine, self.dispatch_by_nccl, self.combine_by_nccl):
            call()
        torch.cuda.synchronize()
        chunks = [self.out[start : start + count] for count, start in self.there.T.tolist()]
        assert torch.equal(torch.cat(chunks), self.ordered), "dispatch"
        assert torch.equal(self.home, self.x), "combine"
        assert torch.equal(self.returned, self.given), "NCCL's combine"


def measure(ranks):
    """The rows, few tokens before many."""
    symm_mem.set_group_info("experts", ranks.rank, ranks.size)
    symm_mem.register()
    for tokens in (128, 1024, 8192):
        layer = Layer(ranks, tokens, WIDTH)
        layer.check()
        stays = layer.sent[ranks.rank] / tokens
        for what in ("dispatch", "combine"):
            systems = {
                "ours": getattr(layer, what),
                "nccl": getattr(layer, f"{what}_by_nccl"),
                "wire": getattr(layer, f"{what}_wire"),
            }
            for graph in (True, False):
                times = ranks.times(systems, CALLS, eager=() if graph else systems)
                sent = tokens * WIDTH * 2 * (1 - stays)
                row = {"what": f"{what} {tokens} x {WIDTH}, {EXPERTS} experts", "graph": graph}
                row |= {f"{name}_us": micros for name, micros in times.items()}
                row |= {f"{name}_GBps": sent / micros / 1e3 for name, micros in times.items()}
                if not graph:
                    for name, call in systems.items():
                        row[f"{name}_host_us"] = ranks.slowest_us(
                            ranks.host_times(call, HOST_CALLS)
                        )
                row["ratio_to_nccl"], row["goal"] = times["nccl"] / times["ours"], GOAL
                yield row
        layer.check()


if __name__ == "__main__":
    run("gpu_experts", measure, command(__doc__).parse_args())
