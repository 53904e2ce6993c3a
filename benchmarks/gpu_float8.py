"""Products of eight-bit floats, by granularity of their scales, beside torch._scaled_mm.

    python benchmarks/gpu_float8.py 1
    python benchmarks/gpu_float8.py 8

float8_e4m3fn, A by rows, B by columns; random operands and scales, in two sets that take turns.
With several ranks A is split by rows, B and the result by columns, and torch's product follows
after NCCL has gathered A and its scales. Both are called by their public functions. Every result is
checked against float64 on samples. A figure is the median of several replays of a graph of calls,
for the slowest rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from on_gpus import Ranks, command, in_turn, run

from shardmath.distribution import Slab
from shardmath.linalg.advanced import matmul

SETS = 2  # of operands
LIMIT = 0.006  # of the greatest results: bfloat16 rounds off 0.004
BFLOAT16, E4M3 = 14, 28

# m, n and k of all ranks, the granularities of a and of b, the result.
CASES = [
    (8192, 8192, 8192, "tensor", "tensor", "bfloat16"),
    (8192, 8192, 8192, "tensor", "tensor", "float8_e4m3fn"),
    (8192, 8192, 8192, "outer", "outer", "bfloat16"),
    (8192, 8192, 8192, "1 x 128", "1 x 128", "bfloat16"),
    (8192, 8192, 8192, "1 x 128", "128 x 128", "bfloat16"),
    (4096, 4096, 4096, "tensor", "tensor", "bfloat16"),
    (4096, 4096, 4096, "outer", "outer", "bfloat16"),
    (4096, 4096, 4096, "1 x 128", "128 x 128", "bfloat16"),
    (8192, 28672, 8192, "tensor", "tensor", "bfloat16"),
    (8192, 28672, 8192, "outer", "outer", "bfloat16"),
    (8192, 28672, 8192, "1 x 128", "128 x 128", "bfloat16"),
]


class Case:
    """One product's operands and scales on this rank, and its `systems`."""

    def __init__(self, ranks: Ranks, m: int, n: int, k: int, *kinds: str) -> None:
        torch, size = ranks.torch, ranks.size
        self.ranks, self.torch, self.kinds = ranks, torch, kinds
        self.shape = m, n // size, k
        self.narrow = kinds[2] != "bfloat16"
        generator = torch.Generator(ranks.device).manual_seed(1 + ranks.rank)

        def some(*shape):
            x = torch.randn(shape, device=ranks.device, generator=generator)
            return x.to(torch.float8_e4m3fn)

        self.a = [some(m // size, k) for _ in range(SETS)]
        self.b = [some(n // size, k).T for _ in range(SETS)]
        self.scale_a = self._scales(kinds[0], m // size, k, generator)
        self.scale_b = self._scales(kinds[1], n // size, k, generator).T
        self.systems = {"ours": self.ours, "torch": self.with_torch}

    def _scales(self, kind: str, lines: int, k: int, generator):
        """Lines first. Those of vectors have contiguous lines, as cuBLASLt and torch want them."""
        torch, device = self.torch, self.ranks.device
        if kind == "tensor":
            return torch.full((1, 1), 0.5, device=device)
        shape = {
            "outer": (lines, 1),
            "1 x 128": (lines, k // 128),
            "128 x 128": (lines // 128, k // 128),
        }[kind]
        made = torch.rand(shape[::-1], device=device, generator=generator) + 0.5
        return made.T.contiguous() if kind == "128 x 128" else made.T

    def ours(self, i: int):
        """Our product of set `i`."""
        scales = {"a": self.scale_a, "b": self.scale_b, **({"d": 1.0} if self.narrow else {})}
        for name, kind in zip("ab", self.kinds, strict=False):
            if kind == "tensor":
                scales[name] = 0.5
        return matmul(
            self.a[i],
            self.b[i],
            distributions=[Slab.X, Slab.Y, Slab.Y],
            quantization_scales=scales,
            options={"result_type": E4M3 if self.narrow else BFLOAT16},
        )

    def with_torch(self, i: int):
        """The product of set `i` by torch, after NCCL has gathered A and its scales."""
        torch, a, scale_a = self.torch, self.a[i], self.scale_a
        if self.ranks.size > 1:
            a = self._gathered(a.view(torch.uint8)).view(a.dtype)
            if self.kinds[0] != "tensor":
                vectors = self.kinds[0] == "1 x 128"
                scale_a = self._gathered(scale_a.contiguous())
                scale_a = scale_a.T.contiguous().T if vectors else scale_a
        result = torch.float8_e4m3fn if self.narrow else torch.bfloat16
        ones = {"tensor": (1,)}
        one, two = (
            x.reshape(ones[kind]) if kind in ones else x
            for x, kind in zip((scale_a, self.scale_b), self.kinds, strict=False)
        )
        return torch._scaled_mm(a, self.b[i], one, two, out_dtype=result)

    def _gathered(self, part):
        rows = part.shape[0] * self.ranks.size
        whole = self.torch.empty(rows, *part.shape[1:], dtype=part.dtype, device=part.device)
        self.ranks.dist.all_gather_into_tensor(whole, part)
        return whole

    def error(self, got) -> float:
        """The greatest error of sampled rows, in units of the greatest result."""
        torch = self.torch
        step = max(1, self.a[0].shape[0] // 16)
        rows = torch.arange(0, self.shape[0], step, device=got.device)
        a = self._expanded(self.a[0], self.scale_a, self.kinds[0])[::step].contiguous()
        a = self._gathered(a) if self.ranks.size > 1 else a
        b = self._expanded(self.b[0].T, self.scale_b.T, self.kinds[1])
        want = a @ b.T
        found = got[rows].double()
        if self.narrow:
            want = want.clamp(-448, 448)
        return ((found - want).abs().max() / want.abs().max()).item()

    def _expanded(self, x, scale, kind: str):
        blocks = {"1 x 128": (1, 128), "128 x 128": (128, 128)}.get(kind)
        full = scale
        if blocks is not None:
            full = scale.repeat_interleave(blocks[0], 0).repeat_interleave(blocks[1], 1)
        return x.double() * full


def measure(ranks: Ranks, most: int) -> Iterator[dict]:
    """A row for each case."""
    for m, n, k, *kinds in CASES:
        if max(m, n, k) > most:
            continue
        case = Case(ranks, m, n, k, *kinds)
        row = {"m": m, "n": n, "k": k, "a": kinds[0], "b": kinds[1], "result": kinds[2]}
        systems = {}
        for name, call in case.systems.items():
            try:
                error = ranks.largest(case.error(call(0)))
            except Exception as reason:
                row[name] = f"{type(reason).__name__}: {reason}"[:120]
                continue
            limit = LIMIT + 0.07 * case.narrow
            if error <= limit:
                systems[name] = in_turn(call, SETS)
            else:
                row[name] = f"wrong by {error:.2g}"
        times = ranks.times(systems, 10)
        flops = 2 * m * (n // ranks.size) * k
        yield {
            **row,
            **times,
            **{f"{name} TFLOP/s": flops / us / 1e6 for name, us in times.items()},
        }


if __name__ == "__main__":
    parser = command(__doc__)
    parser.add_argument("--most", type=int, default=1 << 30, help="leave out larger extents")
    options = parser.parse_args()
    run("gpu_float8", measure, options, options.most)
