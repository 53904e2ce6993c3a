"""The cost of having no address for other GPUs' memory: operators on pretended hosts.

    python benchmarks/gpu_hosts.py 2 --transport nvshmem

The same calls run in a context of one host and in one whose ranks are split between two, over the
same links: no network is measured. `ms` is the time of a call in a CUDA graph, `host_us` the time
until a call returns, among others whose kernels are not waited for; both for the slowest rank.
`GB/s` is what a rank receives in that time on two hosts.
"""

from __future__ import annotations

from on_gpus import command, run

from shardmath.base import config
from shardmath.context import startup
from shardmath.distribution import Redistribute, Slab
from shardmath.fft import FFT, FFTOptions
from shardmath.linalg.advanced import Matmul

CALLS, GRAPHED = 40, 4
N, M = 512, 8192  # a side of the arrays; of the matrices


def calls(ranks, context):
    """(what, call, bytes that a rank receives) in a context; what each needs is kept by it."""
    torch, size, rank = ranks.torch, context.size, context.rank
    part, turned = (slab.shape(rank, (N, N, N)) for slab in (Slab.X, Slab.Y))
    x = torch.rand(part, device=ranks.device).to(torch.complex64)
    y = torch.empty(turned, device=ranks.device, dtype=torch.complex64)
    moved = Redistribute(x, Slab.X, Slab.Y)
    moved.plan()
    last = torch.empty(Slab.Z.shape(rank, (N, N, N)), device=ranks.device, dtype=torch.complex64)
    thin = Redistribute(x, Slab.X, Slab.Z)
    thin.plan()
    transform = FFT(x, distribution=Slab.X, options=FFTOptions(redistribute=False))
    transform.plan()
    a, b = (torch.rand((M // size, M), device=ranks.device).to(torch.bfloat16) for _ in "ab")
    product = Matmul(a, b, distributions=[Slab.X] * 3)
    product.plan()
    other = x.numel() * x.element_size() * (size - 1) // size
    return [
        (f"redistribution X to Y, {N}^3 complex64", lambda: moved.execute(out=y), other),
        (f"redistribution X to Z, {N}^3 complex64", lambda: thin.execute(out=last), other),
        (f"transform X to Y, {N}^3 complex64", lambda: transform.execute(out=y), other),
        (f"product of slabs, {M}^3 bfloat16", product.execute, 2 * M * M * (size - 1) // size),
    ]


def measure(ranks, transport):
    near = ranks.context
    config.export({"SHARDMATH_FAKE_HOSTS": "2", "SHARDMATH_TRANSPORT": transport})
    far = startup.new_context(ranks.rank, near.process_group)
    with near:
        on_one = calls(ranks, near)
    with far:
        on_two = calls(ranks, far)
    for (what, one, nbytes), (_, two, _) in zip(on_one, on_two, strict=True):
        found = ranks.times({"one": one, "two": two}, GRAPHED)
        yield {
            "what": what,
            "transport": far.heap.transport.name,
            "one_host_ms": found["one"] / 1e3,
            "two_hosts_ms": found["two"] / 1e3,
            "gb_per_s": nbytes / found["two"] / 1e3,
            "one_host_us": ranks.slowest_us(ranks.host_times(one, CALLS)),
            "two_hosts_us": ranks.slowest_us(ranks.host_times(two, CALLS)),
        }


if __name__ == "__main__":
    parser = command(__doc__)
    parser.add_argument("--transport", choices=["cuda", "nvshmem"], default="cuda")
    options = parser.parse_args()
    run(f"gpu_hosts_{options.transport}", measure, options, options.transport)
