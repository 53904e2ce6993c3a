"""Repeated collectives on GPUs: host time, GPU time, and the cost of late hosts.

    python benchmarks/gpu_ahead.py 2

`host` is the median time of a call in a row of 50 whose kernels are not waited for, of the slowest
rank; the systems take turns, row by row. `done` is the time of one of 40 calls, until all are done;
`graph` that of one of many in a CUDA graph. `step` is a local product of some 0.4 ms, followed by
an all_reduce of 8 MiB or an AllGather + GEMM of 2048 rows. With `late hosts`, each rank's host in
turn sleeps 1 ms before every fourth step.
"""

from __future__ import annotations

import itertools
import time

from on_gpus import command, run

from shardmath.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from shardmath.distribution import Slab
from shardmath.linalg.advanced import Matmul

ROWS, ROW, WARM, GRAPH = 8, 50, 30, 50  # a row is fewer calls than fill the queue of launches
LEAD, STEPS, RUNS = 12, 96, 9  # steps before those that are timed, those, and runs of them
SIZES = {"2 KiB": 1 << 10, "16 KiB": 8 << 10, "256 KiB": 128 << 10, "1 MiB": 512 << 10}  # elements
MOVES = {"16 KiB": 8 << 10, "4 MiB": 2 << 20, "64 MiB": 32 << 20}  # of all ranks
K = 5632  # of the local product
GATHERED = (2048, 7168, 8192)  # of the product whose rows all ranks have a part of


def hosts(ranks, systems):
    """Microseconds until a call of each system returns. The systems take turns, row by row."""
    found = {name: [] for name in systems}
    for call in systems.values():
        ranks.host_times(call, WARM)
    for _ in range(ROWS):
        for name, call in systems.items():
            found[name] += ranks.host_times(call, ROW)
    return {name: ranks.slowest_us(times) for name, times in found.items()}


def reductions(ranks, count):
    torch, dist = ranks.torch, ranks.dist
    x, out = (torch.ones(count, device=ranks.device, dtype=torch.bfloat16) for _ in range(2))
    theirs, _ = ranks.torch_memory(count, torch.bfloat16)
    one_shot = torch.ops.symm_mem.one_shot_all_reduce
    return {
        "all_reduce(out)": lambda: all_reduce(x, out=out),
        "all_reduce": lambda: all_reduce(x),
        "torch one_shot_all_reduce": lambda: one_shot(theirs, "sum", ranks.group),
        "NCCL all_reduce": lambda: dist.all_reduce(x),
    }


def moves(ranks, count):
    torch, dist, size = ranks.torch, ranks.dist, ranks.size
    x, out = (torch.ones(count, device=ranks.device, dtype=torch.bfloat16) for _ in range(2))
    part = x[: count // size].clone()
    return {
        "all_gather(out)": lambda: all_gather(part, out=out),
        "reduce_scatter(out)": lambda: reduce_scatter(x, out=part),
        "all_to_all(out)": lambda: all_to_all(x, out=out),
        "broadcast(out)": lambda: broadcast(x, out=out),
        "NCCL all_gather": lambda: dist.all_gather_into_tensor(out, part),
        "NCCL reduce_scatter": lambda: dist.reduce_scatter_tensor(part, x),
        "all_gather": lambda: all_gather(part),
        "reduce_scatter": lambda: reduce_scatter(x),
        "all_to_all": lambda: all_to_all(x),
        "broadcast": lambda: broadcast(x),
        "NCCL all_to_all": lambda: dist.all_to_all_single(out, x),
        "NCCL broadcast": lambda: dist.broadcast(x, 0),
    }


def uneven(ranks):
    """An all_to_all of 16 MiB with other counts each call; NCCL is told both counts."""
    torch, dist, size, rank = ranks.torch, ranks.dist, ranks.size, ranks.rank
    rows, width = 2048, (16 << 20) // 2048 // 2
    x, out = (torch.ones((2 * rows, width), device=ranks.device).bfloat16() for _ in range(2))
    turns = [
        [[rows // size + (turn * 7 + src + dst) % 60 for dst in range(size)] for src in range(size)]
        for turn in range(ROWS * ROW)
    ]
    sent = itertools.cycle([table[rank] for table in turns])
    received = itertools.cycle([[row[rank] for row in table] for table in turns])

    def ours():
        mine, theirs = next(sent), next(received)
        all_to_all(x[: sum(mine)], send_counts=mine, out=out[: sum(theirs)])

    def nccl():
        mine, theirs = next(sent), next(received)
        dist.all_to_all_single(out[: sum(theirs)], x[: sum(mine)], theirs, mine)

    return {"uneven all_to_all(out)": ours, "NCCL all_to_all_single": nccl}


def elapsed(ranks, call):
    """Microseconds of one of many calls, until all are done."""
    return ranks.slowest_us(ranks.seconds_until_done(call, 40) for _ in range(RUNS))


def steps(ranks):
    """Microseconds of the GPU for a step, by what follows the local product, and whether hosts are
    late.
    """
    torch, dist = ranks.torch, ranks.dist

    def made(*shape):
        return torch.randn(shape, device=ranks.device, dtype=torch.bfloat16)

    a, b, c = (made(K, K) for _ in range(3))
    x, out = (torch.ones(4 << 20, device=ranks.device, dtype=torch.bfloat16) for _ in range(2))
    m, n, k = GATHERED
    rows, columns, gathered = made(m // ranks.size, k), made(n // ranks.size, k).T, made(m, k)
    product = Matmul(rows, columns, distributions=[Slab.X, Slab.Y, Slab.Y])
    product.plan()
    result = made(m, n // ranks.size)

    def nccl_and_cublas():
        dist.all_gather_into_tensor(gathered, rows)
        torch.mm(gathered, columns, out=result)

    ways = {
        "product": lambda: None,
        "all_reduce(out)": lambda: all_reduce(x, out=out),
        "NCCL all_reduce": lambda: dist.all_reduce(out),
        "AllGather + GEMM": product.execute,
        "NCCL and cuBLAS": nccl_and_cublas,
    }
    times = {(late, what): [] for what in ways for late in (False, True)}
    for _ in range(RUNS + 1):  # hosts that are late and in time take turns
        for (late, what), found in times.items():
            torch.cuda.synchronize()
            ranks.context.barrier()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for number in range(LEAD + STEPS):
                if number == LEAD:  # by then hosts are as far ahead as they get
                    start.record()
                if late and number % 4 == 3 and number // 4 % ranks.size == ranks.rank:
                    time.sleep(1e-3)
                torch.matmul(a, b, out=c)
                ways[what]()
            end.record()
            torch.cuda.synchronize()
            found.append(start.elapsed_time(end) * 1e-3 / STEPS)
    product.free()
    return [
        {
            "what": f"step: {what}",
            "late_hosts": late,
            "step_us": ranks.slowest_us(found[1:]),
        }
        for (late, what), found in times.items()
    ]


def measure(ranks):
    with ranks.context:
        for name, count in SIZES.items():
            systems = reductions(ranks, count)
            graphs, host = ranks.times(systems, GRAPH), hosts(ranks, systems)
            for what in systems:
                us = {"host_us": host[what], "graph_us": graphs[what]}
                yield {"what": what, "size": name, **us}
        for name, count in MOVES.items():
            systems = moves(ranks, count)
            given = {k: v for k, v in systems.items() if "(out)" in k or k.startswith("NCCL")}
            graphs = ranks.times(given, GRAPH if count < 1 << 20 else 8)
            host = hosts(ranks, systems)
            for what, call in systems.items():
                us = {"host_us": host[what], "done_us": elapsed(ranks, call)}
                us |= {"graph_us": graphs[what]} if what in graphs else {}
                yield {"what": what, "size": name, **us}
        systems = uneven(ranks)
        host = hosts(ranks, systems)
        for what, call in systems.items():
            us = {"host_us": host[what], "done_us": elapsed(ranks, call)}
            yield {"what": what, "size": "16 MiB", **us}
        yield from steps(ranks)


if __name__ == "__main__":
    run("gpu_ahead", measure, command(__doc__).parse_args())
