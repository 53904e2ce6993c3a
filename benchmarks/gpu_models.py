"""Layers of models on GPUs, forward and backward, beside torch's ways to split them, in one run.

    python benchmarks/gpu_models.py 2
    python benchmarks/gpu_models.py 2 --only block --most 4096 --eager

bfloat16. Every rank has tokens / ranks rows of x, and of a pair of weights the rows of the first
and the columns of the second that belong to them:

    mlp    gelu(x w1') w2'                                      2 products
    block  h + mlp(norm(h)), h = x + attention(norm(x)) mix'    4 products, causal attention

A step is the forward and the backward pass, with the gradients of x and of all weights. Figures are
medians of several runs, in microseconds of the slowest rank. Systems:

    local      products of one rank alone, on tokens that are there, whose sums are not added
    nccl       all_gather_into_tensor, cuBLAS, reduce_scatter_tensor, one after the other
    fused      torch.ops.symm_mem.fused_all_gather_matmul and fused_matmul_reduce_scatter
    dtensor    torch's ColwiseParallel and RowwiseParallel
    ours       nn.linear

These are called step by step; `_graph` is the step in one CUDA graph, `_compiled` by torch.compile
(of nccl by torch's functional collectives, of dtensor with inductor's asynchronous tensor
parallelism), `_reduced` in its mode "reduce-overhead", and `_compiled_graph` what was compiled, in
one CUDA graph. `--eager` leaves out what is compiled. Before it is timed, every system's result and
gradients are compared with those of nccl; of what cannot run, the reason is printed and kept.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from on_gpus import Ranks, command, run

from shardmath import nn
from shardmath.distribution import Slab

SIZES = ("tokens", "width", "hidden")
CASES = [  # what, and these
    ("mlp", 4096, 1024, 4096),
    ("block", 4096, 1024, 4096),
    ("mlp", 8192, 8192, 28672),
    ("block", 8192, 8192, 28672),
]
FEATURES = 128  # of a head
LIMIT = 0.03  # of the greatest number: bfloat16, and sums in another order
Products = tuple[Callable[..., Any], Callable[..., Any]]  # tokens to features, and back
Step = Callable[[], list[Any]]


class Case:
    """The arrays of one case, and the steps of all systems."""

    def __init__(self, ranks: Ranks, what: str, tokens: int, width: int, hidden: int) -> None:
        torch = ranks.torch
        self.ranks, self.torch, self.what, self.tokens = ranks, torch, what, tokens
        generator = torch.Generator(ranks.device).manual_seed(1 + ranks.rank)

        def some(rows: int, columns: int, scale: float = 1.0) -> Any:
            x = torch.randn((rows, columns), device=ranks.device, generator=generator)
            return (x * scale).bfloat16().requires_grad_()

        own, narrow = hidden // ranks.size, width // ranks.size
        self.expected: list[Any] = []
        self.x = some(tokens // ranks.size, width)
        self.dy = some(tokens // ranks.size, width).detach()
        shapes = {"w1": (own, width), "w2": (width, own)}
        if what == "block":
            shapes = {"qkv": (3 * narrow, width), "mix": (width, narrow)} | shapes
        self.weights = {name: some(*shape, shape[1] ** -0.5) for name, shape in shapes.items()}

    def layer(self, widen: Callable[..., Any], narrow: Callable[..., Any]) -> Callable[..., Any]:
        """The layer as a function of x and the weights, by these two products."""
        functional = self.torch.nn.functional

        def mlp(x: Any, w1: Any, w2: Any) -> Any:
            return narrow(functional.gelu(widen(x, w1), approximate="tanh"), w2)

        def normed(x: Any) -> Any:
            return functional.rms_norm(x, x.shape[-1:])

        def attention(qkv: Any) -> Any:
            """Attention of this rank's heads, from tokens x (heads, q k v, features)."""
            q, k, v = qkv.unflatten(1, (-1, 3, FEATURES)).permute(2, 1, 0, 3).unsqueeze(1)
            made = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return made[0].transpose(0, 1).flatten(1)

        def block(x: Any, qkv: Any, mix: Any, w1: Any, w2: Any) -> Any:
            h = x + narrow(attention(widen(normed(x), qkv)), mix)
            return h + mlp(normed(h), w1, w2)

        return mlp if self.what == "mlp" else block

    def step(self, layer: Callable[..., Any], weights: Any = None) -> Step:
        """What returns the result, and the gradients of x and of the weights.

        Every step differentiates by leaves of its own, unless the layer has `weights` of its own.
        Autograd computes a leaf's gradient on the stream where a graph first used the leaf, as long
        as anything keeps that graph: inductor's "reduce-overhead" keeps that of its last result.
        Leaves that all systems shared would tie a captured backward pass to the default stream.
        """
        given = [self.x, *self.weights.values()]

        def stepped() -> list[Any]:
            operands = (
                [self.x, *weights] if weights else [x.detach().requires_grad_() for x in given]
            )
            y = layer(*operands)
            return [y, *self.torch.autograd.grad(y, operands, self.dy)]

        return stepped

    # -- systems: steps, by a compiler of layers -------------------------------------------------

    def ours(self, compiler: Callable[..., Any]) -> Step:
        """Bound distributions tell the compiler all shapes."""
        tokens, size = self.tokens, self.ranks.size

        def widen(x: Any, w: Any) -> Any:
            by_tokens = Slab(0).bind((tokens, w.shape[1]))
            return nn.linear(x, w, distributions=[by_tokens, Slab(0), Slab(1)])

        def narrow(h: Any, w: Any) -> Any:
            by_features = Slab(1).bind((tokens, w.shape[1] * size))
            by_tokens = Slab(0).bind((tokens, w.shape[0]))
            return nn.linear(h, w, distributions=[by_features, Slab(1), by_tokens])

        return self.step(compiler(self.layer(widen, narrow)))

    def local(self, compiler: Callable[..., Any]) -> Step:
        """No rank waits for another, and nothing moves."""
        rooms: dict[int, Any] = {}
        own, total = len(self.x), self.tokens

        def gather(x: Any, m: Any) -> Any:
            if x.shape[1] not in rooms:
                rooms[x.shape[1]] = x.detach().repeat(total // own, 1)
            return rooms[x.shape[1]], rooms[x.shape[1]] @ m

        def scatter(h: Any, m: Any) -> Any:
            return (h @ m)[:own].clone()

        return self.step(compiler(self.layer(*recorded(self.torch, gather, scatter))))

    def nccl(self, compiler: Callable[..., Any]) -> Step:
        """What was gathered is kept for the backward pass."""
        torch, dist, size = self.torch, self.ranks.dist, self.ranks.size

        def gather(x: Any, m: Any) -> Any:
            whole = x.new_empty((len(x) * size, x.shape[1]))
            dist.all_gather_into_tensor(whole, x.contiguous())
            return whole, whole @ m

        def scatter(h: Any, m: Any) -> Any:
            sums = h @ m
            made = sums.new_empty((len(sums) // size, sums.shape[1]))
            dist.reduce_scatter_tensor(made, sums)
            return made

        return self.step(compiler(self.layer(*recorded(torch, gather, scatter))))

    def functional(self, compiler: Callable[..., Any]) -> Step:
        """The products of `nccl`, by the collectives that torch's compiler knows."""
        import torch.distributed._functional_collectives as known

        linear, group = self.torch.nn.functional.linear, self.ranks.dist.group.WORLD

        def widen(x: Any, w: Any) -> Any:
            return linear(known.all_gather_tensor_autograd(x, 0, group), w)

        def narrow(h: Any, w: Any) -> Any:
            return known.reduce_scatter_tensor_autograd(linear(h, w), "sum", 0, group)

        return self.step(compiler(self.layer(widen, narrow)))

    def fused(self, compiler: Callable[..., Any]) -> Step:
        """They have no gradients; these are made of the same two."""
        enable_symmetric_memory(self.ranks)
        group, operators = self.ranks.group, self.torch.ops.symm_mem

        def gather(x: Any, m: Any) -> Any:
            whole, (made,) = operators.fused_all_gather_matmul(x.contiguous(), [m], 0, group)
            return whole, made

        def scatter(h: Any, m: Any) -> Any:
            return operators.fused_matmul_reduce_scatter(h, m, "sum", 0, group)

        return self.step(compiler(self.layer(*recorded(self.torch, gather, scatter))))

    def dtensor(self, compiler: Callable[..., Any]) -> Step:
        """Modules of torch with these weights."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, parallel

        torch, size = self.torch, self.ranks.size
        enable_symmetric_memory(self.ranks)
        modules, plan = torch.nn.ModuleDict(), {}
        for name, w in self.weights.items():
            rows, columns = w.shape
            if name in ("w1", "qkv"):
                rows *= size
                plan[name] = parallel.ColwiseParallel(input_layouts=Shard(0))
            else:
                columns *= size
                plan[name] = parallel.RowwiseParallel(output_layouts=Shard(0))
            there = {"device": w.device, "dtype": w.dtype}
            modules[name] = torch.nn.Linear(columns, rows, bias=False, **there)
        mesh = init_device_mesh("cuda", (size,))
        modules = parallel.parallelize_module(modules, mesh, plan)
        with torch.no_grad():
            for name, w in self.weights.items():
                modules[name].weight.to_local().copy_(w)

        layer = self.layer(lambda x, name: modules[name](x), lambda h, name: modules[name](h))
        weights = [modules[name].weight for name in self.weights]
        compiled = compiler(lambda x: layer(x, *self.weights))
        return self.step(lambda x, *weights: compiled(x), weights)


def recorded(
    torch: Any, gather_multiply: Callable[..., Any], multiply_scatter: Callable[..., Any]
) -> Products:
    """Products that torch differentiates, made of `gather_multiply(x, m)`, which returns the whole
    x, and that times m, and of `multiply_scatter(h, m)`.
    """

    class Widen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, w: Any) -> Any:
            whole, made = gather_multiply(x, w.T)
            ctx.save_for_backward(whole, w)
            return made

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            whole, w = ctx.saved_tensors
            return multiply_scatter(grad, w), grad.T @ whole

    class Narrow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Any, w: Any) -> Any:
            ctx.save_for_backward(h, w)
            return multiply_scatter(h, w.T)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            h, w = ctx.saved_tensors
            whole, made = gather_multiply(grad, w)
            return made, whole.T @ h

    return Widen.apply, Narrow.apply


def enable_symmetric_memory(ranks: Ranks) -> None:
    """For torch's own operators."""
    from torch.distributed import _symmetric_memory as symmetric

    symmetric.enable_symm_mem_for_group(ranks.group)


def compilers(torch: Any) -> dict[str, Callable[..., Any]]:
    """How a layer is compiled, by the ending of a system's name."""

    def reduced(layer: Callable[..., Any]) -> Callable[..., Any]:
        compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")

        def called(*operands: Any) -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            return compiled(*operands)

        return called

    return {
        "": lambda layer: layer,
        "compiled": partial(torch.compile, fullgraph=True),
        "in chunks": partial(torch.compile, fullgraph=True),
        "reduced": reduced,
    }


# Name, whose step, which compiler, and whether it runs in one CUDA graph.
SYSTEMS = [
    ("nccl", "nccl", "", False),  # with whose results the others' are compared
    ("local", "local", "", True),
    ("fused", "fused", "", False),
    ("dtensor", "dtensor", "", False),
    ("ours", "ours", "", False),
    ("nccl_graph", "nccl", "", True),
    ("ours_graph", "ours", "", True),
    ("nccl_compiled", "functional", "compiled", False),
    ("dtensor_compiled", "dtensor", "in chunks", False),
    ("ours_compiled", "ours", "compiled", False),
    ("ours_reduced", "ours", "reduced", False),
    ("ours_compiled_graph", "ours", "compiled", True),
]


def wrong_by(ranks: Ranks, found: list[Any], expected: list[Any]) -> float:
    """The greatest difference, of the greatest number of its array, on any rank."""
    worst = 0.0
    for x, y in zip(found, expected, strict=True):
        own = (x.to_local() if hasattr(x, "to_local") else x).detach()
        worst = max(worst, float((own - y).abs().max() / y.abs().max()))
    return ranks.largest(worst)


def measure_case(ranks: Ranks, eager: bool, what: str, *sizes: int) -> dict[str, Any]:
    """One row: microseconds of a step by every system."""
    ranks.torch.cuda.empty_cache()
    ranks.torch._dynamo.reset()
    case = Case(ranks, what, *sizes)
    row: dict[str, Any] = {"what": what, **dict(zip(SIZES, sizes, strict=True))}

    def attempt(name: str, call: Callable[[], Any]) -> Any:
        """What it returns; None where it raises, as it does on all ranks, which the row says."""
        try:
            return call()
        except Exception as reason:
            row[f"{name}_failed"] = f"{type(reason).__name__}: {reason}".partition("\n")[0][:200]
            if ranks.rank == 0:
                print(f"{what} {sizes} {name}: {row[f'{name}_failed']}", file=sys.stderr)
        return None

    calls = 10 if sizes[0] * sizes[1] < 1 << 24 else 4
    made: dict[tuple[str, str], Step | None] = {}
    runs: dict[str, Callable[[], object]] = {}
    for name, whose, how, in_a_graph in SYSTEMS:
        if eager and how:
            continue
        if (whose, how) not in made:
            made[whose, how] = attempt(name, partial(checked, case, whose, how))
        step = made[whose, how]
        if step:
            run = attempt(name, partial(ranks.prepared, step, calls, graph=in_a_graph))
            runs |= {name: run} if run else {}
    row |= {f"{name}_us": round(us, 1) for name, us in ranks.run_times(runs, calls).items()}
    return row


def checked(case: Case, whose: str, how: str) -> Step:
    """A system's step, once its results are known to be right."""
    torch, ranks = case.torch, case.ranks
    with torch._inductor.config.patch(_micro_pipeline_tp=how == "in chunks"):
        step: Step = getattr(case, whose)(compilers(torch)[how])
        found = [step() for _ in range(3)][-1]
    if whose != "local":
        case.expected = case.expected or [x.detach().clone() for x in found]
        error = wrong_by(ranks, found, case.expected)
        assert error < LIMIT, f"wrong by {error:.3f} of the greatest number"
    return step


def measure(ranks: Ranks, cases: list, eager: bool) -> Iterator[dict]:
    warnings.simplefilter("ignore", FutureWarning)  # deprecated names of torch.distributed
    for case in cases:
        yield measure_case(ranks, eager, *case)


if __name__ == "__main__":
    parser = command(__doc__)
    parser.add_argument("--only", default="", help="mlp or block")
    parser.add_argument("--most", type=int, default=1 << 30, help="the most tokens")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    options = parser.parse_args()
    cases = [c for c in CASES if c[0].startswith(options.only) and c[1] <= options.most]
    for row in run("gpu_models", measure, options, cases, options.eager):
        print(f"{row['what']} {row['tokens']} x {row['width']} x {row['hidden']}")
        ours = min(us for name, us in row.items() if name.startswith("ours") and name[-3:] == "_us")
        for name, us in row.items():
            if name.endswith("_us"):
                print(f"  {name.removesuffix('_us'):20} {us:9.1f} us  {us / ours:5.2f} of our best")
