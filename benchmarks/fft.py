"""Distributed 3-D transforms on cores, beside mpi4py-fft, plain MPI and one process, in turn.

`python benchmarks/fft.py [n ...]`. Every rank holds a slab X of an n x n x n array, or of the half
spectrum of a real result. Peers:

mpi4py-fft  FFTW, planned with FFTW_MEASURE, and MPI_Alltoallw; only if it is installed (it is built
            against FFTW's headers, Debian's libfftw3-dev). Forward transforms to a slab, in
            arrays of its own: copies into and out of these are not counted. Complex transforms end
            in slab Y; real ones, for which it halves the last axis in the first pass, in slab Z.
Alltoallw   scipy.fft along the whole axes, MPI_Alltoallw between slabs, scipy.fft along the last.
one process scipy.fft of the whole array on rank 0, with as many workers as there are cores, up to
            the number of ranks. The other ranks sleep meanwhile. Also by ducc0, if ours uses it.

Times are of the slowest rank, barrier to barrier; `cpu` is the processor time of a rank.
Transforms end in slab Y, or in slab X again. complex64 -> float32 and complex128 -> float64 are
inverse transforms, the others forward. The ranks are started with mpiexec. The file names the
engine of our transforms: ducc0 if it is installed, else scipy.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import record
from on_cores import in_turn, together

from shardmath.local.fft import engine_for

REPEATS = 5
REAL_RESULTS = {"complex128 -> float64": "complex128", "complex64 -> float32": "complex64"}
CASES = [
    (ranks, dtype, back)
    for ranks in (2, 4)
    for dtype in ("complex128", "complex64", "float64", "float32", *REAL_RESULTS)
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
    inverse = dtype in REAL_RESULTS
    x = rng.standard_normal(Slab.X.shape(context.rank, shape_of(n, dtype)))
    x = x.astype(REAL_RESULTS.get(dtype, dtype))
    options: dict[str, Any] = {"redistribute": back}
    if inverse:
        options |= {"fft_type": "C2R", "last_axis_parity": "odd" if n % 2 else "even"}
    transform = sm.fft.FFT(x, distribution=Slab.X, options=options)
    transform.plan()
    direction = "inverse" if inverse else "forward"
    out = transform.execute(direction=direction)
    plain = Plain(MPI.COMM_WORLD, x, n, inverse, back)
    want = plain()
    error = float(np.abs(out - want).max() / np.abs(want).max())
    del want
    calls: dict[str, Callable[[], object]] = {
        "shardmath": lambda: transform.execute(direction=direction, out=out),
        "Alltoallw": plain,
    }
    if not back and not inverse:
        other = mpi4py_fft(MPI.COMM_WORLD, x, n, plain())
        if other is not None:
            calls["mpi4py-fft"] = other
    calls["one process"] = one_process(context, n, dtype)
    if engine_for("numpy", "C2C") == "ducc0":
        calls["one process, ducc0"] = one_process(context, n, dtype, ducc0=True)
    times = in_turn(calls, REPEATS, lambda name: together(context, calls[name]))
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

    def __init__(self, comm: Any, x: Any, n: int, inverse: bool, back: bool) -> None:
        from mpi4py import MPI

        self.comm, self.x, self.n, self.inverse, self.back = comm, x, n, inverse, back
        self.real = x.dtype.kind == "f"
        size, rank = comm.size, comm.rank
        wide = np.result_type(x.dtype, np.complex64)
        last = n // 2 + 1 if self.real else x.shape[2]
        cuts = [rank * (n // size) + min(rank, n % size) for rank in range(size + 1)]
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
        """The result; that of an inverse is not scaled."""
        import scipy.fft

        if self.inverse:
            planes = scipy.fft.ifft(self.x, axis=1, norm="forward")
        else:
            planes = (scipy.fft.rfftn if self.real else scipy.fft.fftn)(self.x, axes=(1, 2))
        self.exchange(planes, self.slab, self.turned, self.other)
        if not self.inverse:
            made = scipy.fft.fft(self.turned, axis=0, overwrite_x=True)
        elif self.back:
            made = scipy.fft.ifft(self.turned, axis=0, norm="forward", overwrite_x=True)
        else:
            made = scipy.fft.irfftn(self.turned, (self.n, self.n), (0, 2), norm="forward")
        if self.back:
            self.exchange(made, self.other, self.result, self.slab)
            made = self.result
            if self.inverse:
                made = scipy.fft.irfft(made, self.n, norm="forward")
        self.comm.Barrier()  # MPI may need all ranks inside it to make progress
        return made

    def exchange(self, src: Any, src_types: list[Any], dst: Any, dst_types: list[Any]) -> None:
        """Move `src`, in one slab, to `dst`, in the other."""
        ones, zeros = [1] * self.comm.size, [0] * self.comm.size
        self.comm.Alltoallw((src, ones, zeros, src_types), (dst, ones, zeros, dst_types))


def mpi4py_fft(comm: Any, x: Any, n: int, want: Any) -> Callable[[], object] | None:
    """A call of mpi4py-fft from slab X, or None where it is not installed. `want` is the result in
    slab Y.
    """
    try:
        from mpi4py_fft import PFFT
    except ImportError:
        return None
    # Transformed groups of axes end up whole, the last one first; the exchange splits the last axis
    # of its group, which has to be the one that is halved if `x` is real.
    last = (1, 2) if x.dtype.kind == "f" else (2, 1)
    plan = PFFT(comm, (n, n, n), axes=((0,), last), dtype=x.dtype.str[1:], slab=0)
    made = plan.forward(x, normalize=False)
    _, rows, columns = plan.local_slice(True)
    lo = comm.scan(want.shape[1]) - want.shape[1] - rows.start
    both, also = made[:, lo : lo + want.shape[1]], want[:, :, columns]
    assert np.abs(both - also).max() <= 1e-5 * np.abs(also).max()
    return lambda: (plan.forward(normalize=False), comm.Barrier())


def one_process(context: Any, n: int, dtype: str, ducc0: bool = False) -> Callable[[], object]:
    """scipy.fft or ducc0 on rank 0, where the whole array fits; the others do nothing."""
    import scipy.fft

    if context.rank:
        return lambda: None
    whole = np.random.default_rng(9).standard_normal(shape_of(n, dtype))
    whole = whole.astype(REAL_RESULTS.get(dtype, dtype))
    workers = min(context.size, len(os.sched_getaffinity(0)))
    if ducc0:
        fft = importlib.import_module("ducc0.fft")
        importlib.import_module("ducc0.misc").resize_thread_pool(workers)  # shardmath's are its own
        if dtype in REAL_RESULTS:
            how = {"axes": (0, 1, 2), "lastsize": n, "forward": False, "nthreads": workers}
            return lambda: fft.c2r(whole, **how)
        return lambda: (fft.r2c if whole.dtype.kind == "f" else fft.c2c)(whole, nthreads=workers)
    if dtype in REAL_RESULTS:
        return lambda: scipy.fft.irfftn(whole, (n, n, n), norm="forward", workers=workers)
    forward = scipy.fft.rfftn if whole.dtype.kind == "f" else scipy.fft.fftn
    return lambda: forward(whole, workers=workers)


def shape_of(n: int, dtype: str) -> tuple[int, int, int]:
    """The shape of the operand."""
    return (n, n, n // 2 + 1 if dtype in REAL_RESULTS else n)


def main() -> None:
    """Start the ranks, print a table, write results/fft.json."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["--rank"]:
        measure_ranks(int(arguments[1]))
        return
    sizes = [int(each) for each in arguments] or [160, 192, 256]
    # scipy.fft takes no more workers than this says, from scipy 1.18 on.
    environment = {**os.environ, "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    starter = record.beside_python("mpiexec") or "mpiexec"
    rows: list[dict[str, Any]] = []
    for n, ranks in itertools.product(sizes, sorted({case[0] for case in CASES})):
        command = [starter, "-n", str(ranks), sys.executable, __file__, "--rank", str(n)]
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, env=environment
        )
        rows += json.loads(done.stdout.splitlines()[-1])
    engine = engine_for("numpy", "C2C")
    engine += f" {importlib.metadata.version(engine)}"
    record.write("fft", rows, sizes=sizes, repeats=REPEATS, engine=engine)


if __name__ == "__main__":
    main()
