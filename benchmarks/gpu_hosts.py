"""What it costs that GPUs have no address for each other's memory: operators on pretended hosts.

    python benchmarks/gpu_hosts.py 2 --transport nvshmem

The same calls in a context of one host and in one whose ranks are split between two, over the same
links: no network is measured. `ms` is the time of a call in a CUDA graph, `host_us` that of one
until it returns, among others for whose kernels nobody waits; of the slowest rank. `GB/s` is what a
rank receives in the time on two hosts.
"""

from __future__ import annotations

import statistics
import time

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


def host_time(ranks, call):
    """Microseconds until a call returns: the median, of the slowest rank."""
    found = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    ranks.torch.cuda.synchronize()
    return 1e6 * ranks.largest(statistics.median(found))


def measure(ranks, transport):
    near = ranks.context
    config.export({"SHARDMATH_FAKE_HOSTS": "2", "SHARDMATH_TRANSPORT": transport})
    far = startup.new_context(ranks.rank, near.process_group)
    rows = []
    with near:
        on_one = calls(ranks, near)
    with far:
        on_two = calls(ranks, far)
    for (what, one, nbytes), (_, two, _) in zip(on_one, on_two, strict=True):
        found = ranks.times({"one": one, "two": two}, GRAPHED)
        rows.append(
            {
                "what": what,
                "transport": far.heap.transport.name,
                "one_host_ms": found["one"] / 1e3,
                "two_hosts_ms": found["two"] / 1e3,
                "gb_per_s": nbytes / found["two"] / 1e3,
                "one_host_us": host_time(ranks, one),
                "two_hosts_us": host_time(ranks, two),
            }
        )
    return rows


def show(rows):
    """A line for each call."""
    print(f"{'through ' + rows[0]['transport']:40}{'one host':>16}{'two hosts':>16}{'GB/s':>8}")
    for row in rows:
        times = (
            f"{row[f'{hosts}_ms']:.3f} ms {row[f'{hosts}_us']:5.0f} us"
            for hosts in ("one_host", "two_hosts")
        )
        print(f"{row['what']:40}" + "".join(f"{each:>20}" for each in times), end="")
        print(f"{row['gb_per_s']:8.0f}")


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--transport", choices=["cuda", "nvshmem"], default="cuda")
    options = parser.parse_args()
    show(run(f"gpu_hosts_{options.transport}", measure, options, options.transport))


if __name__ == "__main__":
    main()
