"""One GPU's product with an epilog: within cuBLASLt, or by our kernel after it; beside torch.

    python benchmarks/gpu_epilogs.py 1

D = F(A B), by columns, with random A of M x K and B of K x N. "plain" is the product alone;
"kernel" the product in the accumulator's type, then our kernel; "within" cuBLASLt's own epilog,
with our kernel in place for what it leaves; "torch" what a user of torch would write. Each figure
is the median of several replays of a CUDA graph that holds several calls; two sets of operands take
turns. Microseconds. Results are checked against torch's.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from on_gpus import Ranks, command, in_turn, run

from shardmath.arrays import dtypes
from shardmath.local.epilog import MatmulEpilog
from shardmath.local.gpu import Matrix
from shardmath.local.gpu.blaslt import WORKSPACE
from shardmath.local.gpu.epilog import combine
from shardmath.local.gpu.fused_epilog import fused_epilog, split
from shardmath.local.gpu.gemm import has_algorithm, multiply

SETS, CALLS = 2, 4
SHAPES = [(4096, 4096, 4096), (8192, 8192, 1024), (1024, 8192, 8192), (256, 8192, 8192)]
EPILOGS = ("RELU", "BIAS", "RELU_BIAS", "GELU_BIAS", "GELU_AUX_BIAS", "DRELU", "DGELU")
LIMIT = 0.02  # of the greatest result


class Case:
    """The arrays of one shape and epilog, and each way to fill D."""

    def __init__(self, ranks: Ranks, epilog: MatmulEpilog, m: int, n: int, k: int) -> None:
        torch = ranks.torch
        self.ranks, self.epilog, self.torch = ranks, epilog, torch
        self.device = ranks.context.team.device

        def random(rows, columns):
            """A random matrix that is stored by columns."""
            return torch.randn(columns, rows, device=ranks.device).bfloat16().t()

        self.sets = [(random(m, k), random(k, n)) for _ in range(SETS)]
        self.bias = torch.randn(m, device=ranks.device).bfloat16()
        self.room = torch.empty(WORKSPACE, dtype=torch.uint8, device=ranks.device)
        self.d = random(m, n)
        self.first, self.rest = split(epilog, "bfloat16")
        self.wide = torch.empty(n, m, device=ranks.device).t()
        self.aux = random(m, n)
        if epilog.gradient == "relu":
            rows = -(-m // 128) * 16
            self.aux = torch.randint(0, 256, (n, rows), device=ranks.device).to(torch.uint8).t()
        self.given = {
            "bias": (self.bias.data_ptr(), 1) if epilog.has_bias else None,
            "aux": self.matrix(self.aux) if epilog.makes_aux or epilog.needs_aux else None,
        }

    def matrix(self, x):
        """How the product sees an array."""
        name = str(x.dtype).removeprefix("torch.")
        return Matrix(x.data_ptr(), *x.shape, *x.stride(), dtypes.of(name).name)

    def _multiply(self, turn, d, **extras):
        factors = map(self.matrix, self.sets[turn])
        place = {"stream": self.ranks.stream(), "workspace": self.room.data_ptr()}
        multiply(self.device, *factors, self.matrix(d), **place, **extras)

    def plain(self, turn):
        """No epilog."""
        self._multiply(turn, self.d)

    def kernel(self, turn):
        """The product, then our kernel."""
        self._multiply(turn, self.wide)
        d, parts = self.matrix(self.d), [self.matrix(self.wide)]
        combine(self.device, self.ranks.stream(), d, parts, epilog=self.epilog, **self.given)

    @property
    def _found(self):
        """The epilog of cuBLASLt."""
        aux = self.given["aux"] if self.first.makes_aux else None
        return fused_epilog(self.first, self.matrix(self.d), bias=self.given["bias"], aux=aux)

    def fused_epilog(self, turn):
        """The epilog of cuBLASLt, and our kernel in place for the rest."""
        found, d = self._found, self.matrix(self.d)
        self._multiply(turn, self.d, extras=found.extras, bias=found.bias, aux=found.aux)
        if self.rest:
            aux = self.given["aux"]
            combine(self.device, self.ranks.stream(), d, [d], epilog=self.rest, aux=aux)

    def by_torch(self, turn):
        """What a user of torch would write; torch's GELU is the approximation by tanh."""
        torch, name = self.torch, self.epilog.name
        a, b = self.sets[turn]
        turned = b.t(), a.t()  # D's transpose, by rows
        d = torch.addmm(self.bias, *turned) if self.epilog.has_bias else torch.mm(*turned)
        if name.startswith("RELU"):
            d = torch.relu(d)
        if name.startswith("GELU"):
            d = torch.nn.functional.gelu(d, approximate="tanh")
        if name == "DGELU":
            d = torch.ops.aten.gelu_backward(d, self.aux.t(), approximate="tanh")
        return d

    @property
    def ways(self):
        """The ways to fill D, by name. torch has no masks of bits, so it is left out for these."""
        ways = {"plain": self.plain, "kernel": self.kernel}
        found = self._found
        places = [*map(self.matrix, self.sets[0]), self.matrix(self.d)]
        if found and has_algorithm(self.device, *places, extras=found.extras):
            ways["within"] = self.fused_epilog
        return ways if self.epilog.gradient == "relu" else {**ways, "torch": self.by_torch}

    def check(self):
        """Both of our ways against torch's, or against each other."""
        ways, found = self.ways, []
        for name in ("kernel", "within"):
            if name in ways:
                self.d.fill_(float("nan"))
                ways[name](1)
                found.append(self.d.double())
        if "torch" in ways:
            found.append(self.by_torch(1).t().double())
        for x in found[1:]:
            off = ((x - found[0]).abs().max() / found[0].abs().max()).item()
            assert off < LIMIT, f"{self.epilog.name}: off by {off}"


def measure(ranks: Ranks) -> Iterator[dict]:
    """A row for each shape and epilog."""
    for shape, name in product(SHAPES, EPILOGS):
        case = Case(ranks, MatmulEpilog[name], *shape)
        case.check()
        systems = {way: in_turn(call, SETS) for way, call in case.ways.items()}
        times = ranks.times(systems, CALLS)
        row = {"epilog": name, **dict(zip("mnk", shape, strict=True))}
        yield {**row, **{f"{way}_us": us for way, us in times.items()}}


if __name__ == "__main__":
    run("gpu_epilogs", measure, command(__doc__).parse_args())
