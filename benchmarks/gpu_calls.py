"""What a call costs on GPUs: host time until it returns, and latency until its result is there.

    python benchmarks/gpu_calls.py 2

Small operands, repeated calls, nothing captured. `host` is the median time of a call in a row of
calls whose kernels are not waited for, of the slowest rank; `latency` that of a call which the host
then waits for. "1" is a context of each GPU alone, in the same run, and so are NCCL and cuBLAS
through torch. `--alone 0` leaves these and CuPy out.

Then come calls on the heap that take the GPU longer: in place, with new results that are dropped,
and with new results that are kept. `done` is the time of one of many until all are done.
"""

from __future__ import annotations

import time
from collections import deque
from importlib.util import find_spec

from on_gpus import command, run

from shardmath.arrays import library_named
from shardmath.collectives import all_gather, all_reduce
from shardmath.distribution import Redistribute, Slab, redistribute
from shardmath.fft import FFT, FFTOptions, fft
from shardmath.handles.allocation import empty_on_heap
from shardmath.handles.rendezvous import rendezvous
from shardmath.linalg.advanced import Matmul, MatmulOptions, matmul

CALLS, WARM, LATENCIES = 200, 20, 60
ROW, KEPT = 40, 24  # calls between two waits for the GPU, and results that are kept at once
FIRST, ROWS = 6, 15  # rows while results still come to lie in places without a graph; then measured
SMALL = 256  # elements of 4 bytes: 1 KiB
N = 256  # rows of matrices, columns, and of transforms
GOALS = {
    "Redistribute.execute(out)": 20,
    "Matmul.execute": 20,
    "FFT.execute(out)": 20,
    "redistribute(out)": 25,
    "fft": 25,
    "matmul": 25,
    "all_reduce 1 KiB (out)": 15,
    "all_gather 1 KiB (out)": 15,
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
    """The calls by name, each ready for repetition; and the objects to free after them."""
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
    kept_slabs = FFTOptions(redistribute=False)
    transform = FFT(waves, distribution=Slab.X, options=kept_slabs)
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
        "fft": lambda: fft(waves, distribution=Slab.X, options=kept_slabs),
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
    """The peers' calls by name: NCCL, and cuBLAS and cuFFT on one GPU, through torch."""
    torch, dist = ranks.torch, ranks.dist
    small = torch.ones(SMALL, device=ranks.device)
    many = torch.empty(ranks.size * SMALL, device=ranks.device)
    a, b, c = (torch.ones((N, N), device=ranks.device) for _ in range(3))
    waves = a.to(torch.complex64)
    return {
        "NCCL all_reduce 1 KiB": lambda: dist.all_reduce(small),
        "NCCL all_gather 1 KiB": lambda: dist.all_gather_into_tensor(many, small),
        "torch.matmul": lambda: torch.matmul(a, b),
        "torch.matmul(out)": lambda: torch.matmul(a, b, out=c),
        "torch.add(out)": lambda: torch.add(a, b, out=c),
        "torch.fft.fft2": lambda: torch.fft.fft2(waves),
    }


def timed(ranks, call):
    """Microseconds: of the call until it returns, and of a call and the wait for it."""
    hosts = ranks.host_times(call, WARM + CALLS)[WARM:]
    latencies = [ranks.seconds_until_done(call, 1) for _ in range(LATENCIES)]
    return {"host_us": ranks.slowest_us(hosts), "latency_us": ranks.slowest_us(latencies)}


def large(ranks):
    """By name: calls on the heap in place, and with a new result; the latter's calls are objects'
    and functions'. And what is to be freed after them.
    """
    context, torch = ranks.context, ranks.torch
    make, size, rank = memory(context, "torch", "heap"), context.size, context.rank
    found, made = {}, []
    gathers = [Slab.X, Slab.Y, Slab.Y]
    for m, n, k in ((256, 7168, 8192), (1024, 7168, 8192)):
        a, d = (make(shape, "bfloat16") for shape in ((m // size, k), (m, n // size)))
        b = make((n // size, k), "bfloat16").T
        product = Matmul(a, b, distributions=gathers)
        inplace = Matmul(
            a, b, d, beta=0.0, distributions=gathers, options=MatmulOptions(inplace=True)
        )
        for each in (product, inplace):
            each.plan()
        made += [product, inplace]
        local, out = torch.ones((m, k), device=ranks.device).bfloat16(), torch.empty_like(d)
        name = f"AllGather + GEMM {m} x {n} x {k}"
        found[name] = {
            "in place": inplace.execute,
            "new": product.execute,
            "function": lambda a=a, b=b: matmul(a, b, distributions=gathers),
            "torch.mm, local": lambda local=local, b=b, out=out: torch.mm(local, b, out=out),
        }
    waves = make((256 // size, 256, 256), "complex64")
    kept_slabs = FFTOptions(redistribute=False)
    transform = FFT(waves, distribution=Slab.X, options=kept_slabs)
    transform.plan()
    spectrum = make((256, 256 // size, 256), "complex64")
    found["FFT 256^3 complex64"] = {
        "in place": lambda: transform.execute(out=spectrum),
        "new": transform.execute,
        "function": lambda: fft(waves, distribution=Slab.X, options=kept_slabs),
        "torch.fft, a rank's part": lambda: torch.fft.fftn(waves),
    }
    x, y = (make(each.shape(rank, (4096, 4096))) for each in (Slab.X, Slab.Y))
    moved = Redistribute(x, Slab.X, Slab.Y)
    moved.plan()
    found["redistribute 4096 x 4096 float32"] = {
        "in place": lambda: moved.execute(out=y),
        "new": moved.execute,
        "function": lambda: redistribute(x, Slab.X, Slab.Y),
        "torch copy_": lambda: y.view(-1).copy_(x.view(-1)),
    }
    return found, [*made, transform, moved]


def in_a_row(ranks, call, keep):
    """Microseconds until the call returns, and until all of a row are done, of the slowest rank."""
    hosts, kept = [], deque(maxlen=KEPT)

    def timed_call():
        begun = time.perf_counter()
        made = call()
        hosts.append(time.perf_counter() - begun)
        if keep:
            kept.append(made)

    rows = [ranks.seconds_until_done(timed_call, ROW) for _ in range(FIRST + ROWS)]
    return {
        "host_us": ranks.slowest_us(hosts[FIRST * ROW :]),
        "done_us": ranks.slowest_us(rows[FIRST:]),
    }


def measure_large(ranks):
    with ranks.context:
        found, made = large(ranks)
        for what, ways in found.items():
            for way, call in ways.items():
                for keep in (False, True) if way == "new" else (False,):
                    result = f"{way}, {'kept' if keep else 'dropped'}" if way == "new" else way
                    yield {"what": what, "result": result, **in_a_row(ranks, call, keep)}
        for each in made:
            each.free()


def measure(ranks, with_alone):
    yield from measure_large(ranks)

    def row(what, call, **where):
        goal = GOALS.get(what, "") if where["memory"] == "heap" else ""
        return {"what": what, **where, **timed(ranks, call), "goal_host_us": goal}

    contexts = [ranks.context.split(ranks.rank)] if with_alone else []
    for context in (*contexts, ranks.context):
        for library in filter(find_spec, ("torch", "cupy") if with_alone else ("torch",)):
            for place in ("heap", "ordinary"):
                with context:
                    found, made = calls(context, library, place)
                    for what, call in found.items():
                        yield row(what, call, gpus=context.size, library=library, memory=place)
                    for each in made:
                        each.free()
    for what, call in peers(ranks).items():
        yield row(what, call, gpus=ranks.size, library="torch", memory="ordinary")


if __name__ == "__main__":
    parser = command(__doc__)
    parser.add_argument("--alone", type=int, default=1, help="contexts of one GPU, and CuPy")
    options = parser.parse_args()
    run("gpu_calls", measure, options, options.alone)
