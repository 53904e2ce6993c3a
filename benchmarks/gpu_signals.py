"""Signals between GPUs: put and signal one way within a kernel, barriers in kernels and in graphs.

    python benchmarks/gpu_signals.py 8

One way is half of a round trip between the kernels of two ranks; the data is checked. Each figure
is the median of several launches, for the slowest rank.
"""

from __future__ import annotations

import statistics
import warnings
from pathlib import Path

from on_gpus import REPEATS, command, run

from shardmath import symmetric_memory

SOURCE = Path(__file__).with_name("signals.cu").read_text()
KIB = 1 << 10
TURNS = 200
THREADS = [32, 256, 1024]
WAYS = {"put_value": 0, "put_signal alone": 1, "put_signal": 2, "put_packets": 3}
SIZES = {
    "put_value": [8],
    "put_signal alone": [0],
    "put_signal": [8, 256, 4 * KIB, 16 * KIB, 64 * KIB],
    "put_packets": [8, 256, 4 * KIB, 16 * KIB, 64 * KIB],
}
# Goals on 8 H200, in microseconds.
ONE_WAY, BARRIER = "<= 1.5 us", "<= 2.5 us"


def handle_of(ranks, count):
    """A handle of the first `count` ranks, with room for every size; None on the others."""
    if ranks.rank >= count:
        return None
    torch = ranks.torch
    part = ranks.context.subset(range(count))
    with part:
        memory = symmetric_memory.empty(8 * 64 * KIB, dtype=torch.uint8, device="cuda")
        memory.zero_()
        torch.cuda.synchronize()
        return symmetric_memory.rendezvous(memory, part)


def timed(ranks, launch, out):
    """Microseconds of one of TURNS in a kernel: the median, of all ranks the slowest."""
    found = []
    for _ in range(REPEATS):
        ranks.torch.cuda.synchronize()
        ranks.context.barrier()
        launch()
        ranks.torch.cuda.synchronize()
        assert launch is nothing or int(out[1]) == 1, "a signal did not come"
        found.append(int(out[0]) / TURNS / 1e3)
    return ranks.largest(statistics.median(found))


def words(ranks):
    """What a kernel writes."""
    return ranks.torch.zeros(3, dtype=ranks.torch.int64, device=ranks.device)


def nothing():
    pass


def one_way(ranks):
    handle, out = handle_of(ranks, 2), words(ranks)
    kernel = None if handle is None else handle.kernel(SOURCE, "ping_pong")
    rows = []
    for what, way in WAYS.items():
        for nbytes in SIZES[what]:
            best = {}
            for threads in THREADS if nbytes > 256 else THREADS[:1]:
                launch = nothing
                if handle is not None:
                    fill(ranks, handle, nbytes)

                    def launch(threads=threads, way=way, nbytes=nbytes):
                        kernel(1, threads, handle, way, TURNS, nbytes, out)

                best[threads] = timed(ranks, launch, out) / 2
                if handle is not None and way >= 2:
                    check(ranks, handle, nbytes, what)
            threads = min(best, key=best.get)
            small = nbytes <= 256 and way != WAYS["put_signal alone"]
            rows.append(
                {
                    "what": f"{what}, one way in a kernel",
                    "bytes": nbytes,
                    "ours_us": best[threads],
                    "threads": threads,
                    "GBps": nbytes / best[threads] / 1e3,
                    "target": ONE_WAY if small else "",
                }
            )
    if handle is not None:
        handle.check()
    return rows


def pattern(ranks, rank, nbytes):
    return (ranks.torch.arange(nbytes, device=ranks.device) * 3 + 17 * rank).to(ranks.torch.uint8)


def fill(ranks, handle, nbytes):
    own = handle.get_buffer(ranks.rank, (8 * 64 * KIB,), "uint8")
    own.zero_()
    own[:nbytes] = pattern(ranks, ranks.rank, nbytes)


def check(ranks, handle, nbytes, what):
    room = -(-2 * nbytes // 16) * 16
    landed = handle.get_buffer(ranks.rank, (nbytes,), "uint8", room)
    assert ranks.torch.equal(landed, pattern(ranks, 1 - ranks.rank, nbytes)), what


def barriers(ranks, count):
    """Barriers of the first `count` ranks, within a kernel and as kernels in a graph."""
    handle, out = handle_of(ranks, count), words(ranks)
    inside, graph = nothing, nothing
    if handle is not None:
        kernel = handle.kernel(SOURCE, "barriers")

        def inside():
            kernel(1, 32, handle, TURNS, out)

        def graph():
            handle.barrier()

    row = {"what": "barrier in a kernel", "gpus": count, "ours_us": timed(ranks, inside, out)}
    rows = [row, {"what": "barrier in a graph", "gpus": count, "ours_us": ranks.time(graph, 200)}]
    if count == ranks.size:
        rows[1] |= {"torch_us": ranks.torch_barrier_us(), "target": BARRIER}
    if handle is not None:
        handle.synchronize()
    return rows


def on_streams(ranks):
    """A signal to the right and one from the left, two kernels, in a graph."""
    size, rank = ranks.size, ranks.rank
    handle = handle_of(ranks, size)

    def call():
        handle.put_signal((rank + 1) % size)
        handle.wait_signal((rank - 1) % size)

    us = ranks.time(call, 200)
    return {"what": "put_signal + wait_signal, two kernels in a graph", "gpus": size, "ours_us": us}


def measure(ranks):
    warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # from ranks that do not take part
    rows = one_way(ranks) if ranks.size > 1 else []
    for count in range(2, ranks.size + 1):
        rows += barriers(ranks, count)
    return [*rows, on_streams(ranks)]


if __name__ == "__main__":
    run("gpu_signals", measure, command(__doc__).parse_args())
