"""What a call costs: host time until it returns, and latency until its result is there, on GPUs.

    python benchmarks/gpu_calls.py 2

Small operands, calls that come again as they were, nothing captured. `host` is the median time of a
call in a row of them, for whose kernels nobody waits, of the slowest rank; `latency` that of a call
which the host then waits for. "1" is a context of each GPU alone, in the same run, and so are NCCL
and cuBLAS through torch.
"""

from __future__ import annotations

import statistics
import time
from importlib.util import find_spec

from on_gpus import command, run

from shardmath.arrays import library_named
from shardmath.collectives import all_gather, all_reduce
from shardmath.distribution import Redistribute, Slab, redistribute
from shardmath.fft import FFT, FFTOptions
from shardmath.handles.allocation import empty_on_heap
from shardmath.handles.rendezvous import rendezvous
from shardmath.linalg.advanced import Matmul, matmul

CALLS, WARM, LATENCIES = 200, 20, 60
SMALL = 256  # elements of 4 bytes: 1 KiB
N = 256  # rows of matrices, columns, and of transforms
GOALS = {
    "Redistribute.execute(out)": 60,
    "Matmul.execute": 60,
    "FFT.execute(out)": 60,
    "redistribute(out)": 150,
    "redistribute": 150,
    "matmul": 150,
    "all_reduce 1 KiB (out)": 40,
    "all_reduce 1 KiB": 40,
    "all_gather 1 KiB (out)": 40,
    "all_gather 1 KiB": 40,
}  # microseconds of host time, of operands on the heap


def memory(context, library, place):
    """A function that makes float32 or complex64 arrays of a library, with values, somewhere."""
    known = library_named(library)

    def made(shape, dtype="float32"):
        if place == "heap":
            x = empty_on_heap(context, known, shape, dtype)
        else:
            x = known.empty(shape, dtype, "C", context.team.device.name)
        x[...] = 1
        return x

    return made


def calls(context, library, place):
    """The calls by name, each ready to be made often; and what is to be freed after them."""
    make, size, rank = memory(context, library, place), context.size, context.rank
    small, into, many = make((SMALL,)), make((SMALL,)), make((size * SMALL,))
    part, turned = (Slab.X.shape(rank, (N, N)), Slab.Y.shape(rank, (N, N)))
    x, y = make(part), make(turned)
    a, b, other = make(part), make(part), make(part)
    waves, spectrum = make(part, "complex64"), make(turned, "complex64")
    splits = [Slab.X, Slab.X, Slab.X]
    moved = Redistribute(x, Slab.X, Slab.Y)
    moved.plan()
    product = Matmul(a, b, distributions=splits)
    product.plan()
    transform = FFT(waves, distribution=Slab.X, options=FFTOptions(redistribute=False))
    transform.plan()

    def reset():
        product.reset_operands(a=other, b=b)
        return product.execute()

    found = {
        "all_reduce 1 KiB": lambda: all_reduce(small),
        "all_reduce 1 KiB (out)": lambda: all_reduce(small, out=into),
        "all_gather 1 KiB": lambda: all_gather(small),
        "all_gather 1 KiB (out)": lambda: all_gather(small, out=many),
        "redistribute": lambda: redistribute(x, Slab.X, Slab.Y),
        "redistribute(out)": lambda: redistribute(x, Slab.X, Slab.Y, out=y),
        "Redistribute.execute": moved.execute,
        "Redistribute.execute(out)": lambda: moved.execute(out=y),
        "matmul": lambda: matmul(a, b, distributions=splits),
        "Matmul.execute": product.execute,
        "Matmul.reset_operands, execute": reset,
        "FFT.execute": transform.execute,
        "FFT.execute(out)": lambda: transform.execute(out=spectrum),
    }
    if place == "heap":
        handle = rendezvous(small)
        after, before = (rank + 1) % size, (rank - 1) % size

        def signal():
            handle.put_signal(after)
            handle.wait_signal(before)

        found["handle.barrier"] = handle.barrier
        found["put_signal, wait_signal"] = signal
    return found, [moved, product, transform]


def peers(ranks):
    """The same by NCCL and one GPU's cuBLAS, through torch."""
    torch, dist = ranks.torch, ranks.dist
    small = torch.ones(SMALL, device=ranks.device)
    many = torch.empty(ranks.size * SMALL, device=ranks.device)
    a, b, c = (torch.ones((N, N), device=ranks.device) for _ in range(3))
    return {
        "NCCL all_reduce 1 KiB": lambda: dist.all_reduce(small),
        "NCCL all_gather 1 KiB": lambda: dist.all_gather_into_tensor(many, small),
        "torch.matmul": lambda: torch.matmul(a, b),
        "torch.matmul(out)": lambda: torch.matmul(a, b, out=c),
        "torch.add(out)": lambda: torch.add(a, b, out=c),
    }


def timed(ranks, call):
    """Microseconds: of the call until it returns, and of a call and the wait for it."""
    finish = ranks.torch.cuda.synchronize
    warm(ranks, call)
    hosts, latencies = [], []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        hosts.append(time.perf_counter() - start)
    for _ in range(LATENCIES):
        finish()
        ranks.context.barrier()
        start = time.perf_counter()
        call()
        finish()
        latencies.append(time.perf_counter() - start)
    return {
        name: 1e6 * ranks.largest(statistics.median(times))
        for name, times in (("host_us", hosts), ("latency_us", latencies))
    }


def warm(ranks, call):
    for _ in range(WARM):
        call()
    ranks.torch.cuda.synchronize()
    ranks.context.barrier()


def measure(ranks):
    rows = []

    def note(what, call, **where):
        rows.append({"what": what, **where, **timed(ranks, call)})

    alone = ranks.context.split(ranks.rank)
    for context in (alone, ranks.context):
        for library in filter(find_spec, ("torch", "cupy")):
            for place in ("heap", "ordinary"):
                with context:
                    found, made = calls(context, library, place)
                    for what, call in found.items():
                        note(what, call, gpus=context.size, library=library, memory=place)
                    for each in made:
                        each.free()
    for what, call in peers(ranks).items():
        note(what, call, gpus=ranks.size, library="torch", memory="ordinary")
    for row in rows:
        row["goal_host_us"] = GOALS.get(row["what"]) if row["memory"] == "heap" else None
    return rows


def show(rows):
    """A line for each call: host time and latency by library and memory."""
    columns = list(dict.fromkeys((r["library"], r["memory"]) for r in rows))
    for gpus in dict.fromkeys(row["gpus"] for row in rows):
        title = f"us until return (until done), {gpus} GPUs"
        print(f"{title:36}" + "".join(f"{' '.join(c):>18}" for c in columns))
        for what in dict.fromkeys(row["what"] for row in rows if row["gpus"] == gpus):
            cells = {
                (r["library"], r["memory"]): f"{r['host_us']:.0f} ({r['latency_us']:.0f})"
                for r in rows
                if r["what"] == what and r["gpus"] == gpus
            }
            line = "".join(f"{cells.get(c, ''):>18}" for c in columns)
            print(f"{what:36}{line}" + f"   goal {GOALS.get(what)}" * (what in GOALS))


def main() -> None:
    options = command(__doc__).parse_args()
    show(run("gpu_calls", measure, options))


if __name__ == "__main__":
    main()
