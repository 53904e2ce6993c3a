"""What tracing adds to a call on GPUs: `python benchmarks/gpu_tracing.py 2`.

A traced rank has its GPU's kernels collected by torch's profiler. It makes the same calls, each of
which then takes the host longer. Untraced, traced, and untraced again; `host` is the median time
until a call in a row of calls returns, `done` that of one of many until all are done, in
microseconds, of the slowest rank. Ratios are of the traced figure and the mean of the other two.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from on_gpus import WARM, Ranks, command, run

from shardmath.collectives import all_reduce
from shardmath.distribution import Slab, redistribute
from shardmath.linalg.advanced import matmul
from shardmath.tools.kernels import Collector, Work

HOST_CALLS, TURNS = 40, 15
SMALL, N = 256, 4096  # elements of 4 bytes, and of bfloat16 along each axis


def calls(ranks: Ranks) -> dict[str, Any]:
    torch, context = ranks.torch, ranks.context
    small, into = (torch.ones(SMALL, device=ranks.device) for _ in range(2))
    part, turned = (slab.shape(context.rank, (N, N)) for slab in (Slab.X, Slab.Y))
    a, b = (torch.ones(part, dtype=torch.bfloat16, device=ranks.device) for _ in range(2))
    moved = torch.empty(turned, dtype=torch.bfloat16, device=ranks.device)
    return {
        "all_reduce 1 KiB": lambda: all_reduce(small, out=into),
        f"matmul {N}^3 bfloat16": lambda: matmul(a, b, distributions=[Slab.X] * 3),
        f"redistribute {N}^2 bfloat16": lambda: redistribute(a, Slab.X, Slab.Y, out=moved),
    }


def measure(ranks: Ranks) -> Iterator[dict[str, Any]]:
    told: list[Work | str] = []
    collector, systems = Collector(told.append), calls(ranks)
    times: dict[str, list[tuple[float, float]]] = {what: [] for what in systems}
    for traced in (False, True, False):
        if traced:
            collector.start()
        for what, call in systems.items():
            for _ in range(WARM):
                call()
            host = [t for _ in range(TURNS) for t in ranks.host_times(call, HOST_CALLS)]
            done = [ranks.seconds_until_done(call, HOST_CALLS) for _ in range(TURNS)]
            times[what].append((ranks.slowest_us(host), ranks.slowest_us(done)))
        if traced:
            collector.stop()
    kernels = [work for work in told if isinstance(work, Work) and work.kind == "kernel"]
    reasons = [work for work in told if isinstance(work, str)]
    assert kernels and not reasons, reasons
    for what, (before, during, after) in times.items():
        row: dict[str, Any] = {"what": what}
        for name, values in zip(
            ("host", "done"), zip(before, during, after, strict=True), strict=True
        ):
            untraced = (values[0] + values[2]) / 2
            row |= {
                f"{name} untraced, us": untraced,
                f"{name} traced, us": values[1],
                f"{name}, ratio": values[1] / untraced,
            }
        yield row


if __name__ == "__main__":
    run("gpu_tracing", measure, command(__doc__).parse_args())
