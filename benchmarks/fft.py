"""Distributed 3-D transforms on cores, beside mpi4py-fft, plain MPI and one process, in turn.

`python benchmarks/fft.py [n]`. Every rank holds a slab X of an n x n x n array. Peers:

mpi4py-fft  FFTW and MPI_Alltoallw; only where it is installed (it needs FFTW's headers to build).
Alltoallw   scipy.fft along the whole axes, MPI_Alltoallw between slabs, scipy.fft along the last.
one process scipy.fft.fftn of the whole array on rank 0, with as many workers as there are cores, up
            to the number of ranks. The other ranks sleep meanwhile.

Times are of the slowest rank, barrier to barrier; `cpu` is what a rank's processor has worked.
Forward transforms to slab Y; "and back" ends in slab X again. The ranks are started with mpiexec.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import record

REPEATS = 5
CASES = [
    (ranks, dtype, back)
    for ranks in (2, 4)
    for dtype in ("complex128", "complex64", "float32")
    for back in (False, True)
]


def measure_ranks(n: int) -> None:
    """Print what this rank has measured, as JSON, from rank 0."""
    from mpi4py import MPI

    import shardmath as sm

    context = sm.initialize("cpu", MPI.COMM_WORLD)
    rows = []
    for ranks, dtype, back in CASES:
        if ranks == context.size:
            rows.append(row(context, n, dtype, back))
    if context.rank == 0:
        print(json.dumps(rows))
    sm.finalize()


def row(context: Any, n: int, dtype: str, back: bool) -> dict[str, Any]:
    """The times of one case."""
    from mpi4py import MPI

    import shardmath as sm
    from shardmath.distribution import Slab

    rng = np.random.default_rng(context.rank)
    x = rng.standard_normal(Slab.X.shape(context.rank, (n, n, n))).astype(dtype)
    transform = sm.fft.FFT(x, distribution=Slab.X, options={"redistribute": back})
    transform.plan()
    out = transform.execute()
    plain = Plain(MPI.COMM_WORLD, x, n, back)
    want = plain()
    error = float(np.abs(out - want).max() / np.abs(want).max())
    del want
    calls: dict[str, Callable[[], object]] = {
        "shardmath": lambda: transform.execute(out=out),
        "Alltoallw": plain,
    }
    if not back:
        other = mpi4py_fft(MPI.COMM_WORLD, x, n)
        if other is not None:
            calls["mpi4py-fft"] = other
    calls["one process"] = one_process(context, n, dtype)
    times = measure(context, calls)
    best = {name: min(taken for taken, _ in pairs) for name, pairs in times.items()}
    peers = {name: taken / best["shardmath"] for name, taken in best.items() if name != "shardmath"}
    return {
        "case": f"{n}^3 {dtype}, {context.size} ranks, slab X -> {'X' if back else 'Y'}",
        "ms": {
            name: {
                "median": round(1e3 * statistics.median(taken for taken, _ in pairs), 1),
                "best": round(1e3 * best[name], 1),
                "cpu": round(1e3 * min(cpu for _, cpu in pairs), 1),
            }
            for name, pairs in times.items()
        },
        "times as fast as": {name: round(ratio, 2) for name, ratio in peers.items()},
        "relative difference": error,
    }


class Plain:
    """The transform with MPI_Alltoallw and scipy.fft, as one would write it."""

    def __init__(self, comm: Any, x: Any, n: int, back: bool) -> None:
        from mpi4py import MPI

        self.comm, self.x, self.back = comm, x, back
        self.real = x.dtype.kind == "f"
        size, rank = comm.size, comm.rank
        wide = np.result_type(x.dtype, np.complex64)
        last = n // 2 + 1 if self.real else n
        cuts = [n * i // size for i in range(size + 1)]
        mine = cuts[rank + 1] - cuts[rank]
        self.turned = np.empty((n, mine, last), wide)
        self.result = np.empty((mine, n, last), wide)
        kind = MPI.C_FLOAT_COMPLEX if wide == np.complex64 else MPI.C_DOUBLE_COMPLEX

        def types(shape: tuple[int, ...], axis: int) -> list[Any]:
            made = []
            for lo, hi in itertools.pairwise(cuts):
                part, start = list(shape), [0, 0, 0]
                part[axis], start[axis] = hi - lo, lo
                made.append(kind.Create_subarray(shape, part, start).Commit())
            return made

        self.slab = types((mine, n, last), 1)
        self.other = types((n, mine, last), 0)

    def __call__(self) -> Any:
        """The result."""
        import scipy.fft

        forward = scipy.fft.rfftn if self.real else scipy.fft.fftn
        planes = forward(self.x, axes=(1, 2))
        ones, zeros = [1] * self.comm.size, [0] * self.comm.size
        slab = (planes, ones, zeros, self.slab)
        turned = (self.turned, ones, zeros, self.other)
        self.comm.Alltoallw(slab, turned)
        made = scipy.fft.fft(self.turned, axis=0, overwrite_x=True)
        if not self.back:
            self.comm.Barrier()  # MPI may need all ranks inside it to make progress
            return made
        self.comm.Alltoallw((made, ones, zeros, self.other), (self.result, ones, zeros, self.slab))
        self.comm.Barrier()
        return self.result


def mpi4py_fft(comm: Any, x: Any, n: int) -> Callable[[], object] | None:
    """A call of mpi4py-fft from slab X, or None where it is not installed."""
    try:
        from mpi4py_fft import PFFT, newDistArray
    except ImportError:
        return None
    # Transformed axes end up whole in turn; the input is split along the first.
    plan = PFFT(comm, (n, n, n), axes=((0,), (1, 2)), dtype=x.dtype.str[1:], slab=True)
    given, made = newDistArray(plan, False), newDistArray(plan, True)
    assert given.shape == x.shape, (given.shape, x.shape)
    given[...] = x
    comm.Barrier()
    return lambda: (plan.forward(given, made, normalize=False), comm.Barrier())


def one_process(context: Any, n: int, dtype: str) -> Callable[[], object]:
    """scipy.fft on rank 0, where the whole array fits; the others do nothing."""
    import scipy.fft

    if context.rank:
        return lambda: None
    whole = np.random.default_rng(9).standard_normal((n, n, n)).astype(dtype)
    workers = min(context.size, len(os.sched_getaffinity(0)))
    forward = scipy.fft.rfftn if whole.dtype.kind == "f" else scipy.fft.fftn
    return lambda: forward(whole, workers=workers)


def measure(
    context: Any, calls: dict[str, Callable[[], object]]
) -> dict[str, list[tuple[float, float]]]:
    """(seconds until all ranks are done, seconds of this processor), the calls in turn."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for turn in range(REPEATS + 1):
        for name, call in calls.items():
            context.barrier()
            start, worked = time.perf_counter(), time.process_time()
            call()
            worked = time.process_time() - worked
            context.barrier()
            if turn:  # the first touches pages
                times[name].append((time.perf_counter() - start, worked))
    return times


def main() -> None:
    """Start the ranks, print a table, write results/fft.json."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["--rank"]:
        measure_ranks(int(arguments[1]))
        return
    n = int(arguments[0]) if arguments else 256
    starter = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or "mpiexec"
    rows: list[dict[str, Any]] = []
    for ranks in sorted({case[0] for case in CASES}):
        command = [starter, "-n", str(ranks), sys.executable, __file__, "--rank", str(n)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows += json.loads(done.stdout.splitlines()[-1])
    for entry in rows:
        print(entry["case"], f"(difference {entry['relative difference']:.1e})")
        for name, spent in entry["ms"].items():
            ratio = entry["times as fast as"].get(name, "")
            print(f"  {name:12}" + "".join(f"{k} {v:8} ms  " for k, v in spent.items()), ratio)
    path = record.write("fft", rows, n=n, repeats=REPEATS)
    print(f"written: {path.relative_to(path.parent.parent.parent)}")


if __name__ == "__main__":
    main()
