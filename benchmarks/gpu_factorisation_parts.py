"""What a factorisation on GPUs spends its time with: routines alone, and each step of a call.

    python benchmarks/gpu_factorisation_parts.py 2
    python benchmarks/gpu_factorisation_parts.py 2 --sizes 32768 --only steps
    python benchmarks/gpu_factorisation_parts.py 1 --only alone --dtypes float64

"alone" are routines on a stream whose kernels come first, with nothing beside them, or "beside" a
product on another. "steps" are those of one call, by their stream: how often, milliseconds in all,
and those of the first, of the middle and of the last one; "refinement" has what solutions by
factors of a lower type consist of, each waited for. All are rank 0's, which has the first panel.
LU of a panel and solutions of few right-hand sides are ours, and in other rows the libraries'.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

from gpu_factorisations import OURS, by_columns, getrf, on_all, room_of_getrf
from gpu_factorisations import Matrix as Given
from on_gpus import Ranks, command, run

from shardmath.arrays.dtypes import of
from shardmath.cuda.driver import call
from shardmath.cuda.stream import new_stream
from shardmath.distributed import refinement
from shardmath.distribution import Slab
from shardmath.factorisations import gpus
from shardmath.factorisations.gpus import FactorisationProgram, FactorisationsOnGPUs
from shardmath.linalg import cholesky, lu_factor, solve
from shardmath.local.gpu import Matrix, lapack
from shardmath.local.gpu.blaslt import WORKSPACE
from shardmath.local.gpu.gemm import multiply
from shardmath.program.steps import Await, Record

TURNS = 3
WIDTH = 512
LIBRARIES = "libraries'"
WHOSE = OURS, LIBRARIES
HEIGHTS = 32768, 16384, 4096, 512
ROUNDED, TF32 = 75, 77  # cuBLASLt's COMPUTE_32F_FAST_16BF and _FAST_TF32


# -- routines alone --------------------------------------------------------------------------------


class Alone:
    """Routines of one GPU, with memory that they are done in."""

    def __init__(self, ranks: Ranks) -> None:
        self.torch = torch = ranks.torch
        self.device = ranks.context.team.device
        self.stream = int(new_stream(self, self.device, first=True))
        self.others = int(new_stream(self, self.device))
        words = {"dtype": torch.uint8, "device": ranks.device}
        self.held = [torch.zeros(2 * WORKSPACE, **words) for _ in range(2)]
        self.device_name = ranks.device

    def matrix(self, rows: int, columns: int, dtype: str) -> tuple[Any, Matrix]:
        """A random matrix in column-major order, whose diagonal dominates, and where it lies."""
        torch = self.torch
        x = torch.rand(columns, rows, dtype=getattr(torch, dtype), device=self.device_name)
        x.diagonal().add_(rows)
        return x, Matrix(x.data_ptr(), rows, columns, 1, rows, dtype)

    def ms(self, launch: Callable[[int], object], reset: Callable[[], object], place: str) -> float:
        """Milliseconds of a routine "alone", or "beside" a product."""
        if place == "beside":
            held = [self.matrix(12288, 12288, "float64") for _ in range(3)]
        taken = []
        for turn in range(TURNS + 1):
            reset()
            self.torch.cuda.synchronize()
            if place == "beside":
                beside = {"workspace": self.held[1].data_ptr(), "stream": self.others}
                multiply(self.device, *(x for _, x in held), **beside)
            begin, end = (call("cuEventCreate", 0) for _ in range(2))
            call("cuEventRecord", begin, self.stream)
            launch(self.stream)
            call("cuEventRecord", end, self.stream)
            self.torch.cuda.synchronize()
            if turn:
                taken.append(float(call("cuEventElapsedTime", begin, end)))
        return round(statistics.median(taken), 3)

    def bytes_of(self, count: int) -> Any:
        """Memory for a routine."""
        return self.torch.zeros(count, dtype=self.torch.uint8, device=self.device_name)

    def words(self) -> dict[str, Any]:
        """Where what is wrong is noted."""
        return {"status": self.held[0].data_ptr(), "first": 0}

    def lu(self, height: int, width: int, dtype: str, place: str, *, ours: bool) -> float:
        """LU of a panel."""
        x, a = self.matrix(height, width, dtype)
        x.normal_()  # pivots from anywhere
        room, factorise = (lapack.room_of_lu, lapack.lu) if ours else (room_of_getrf, getrf)
        kept, held = x.clone(), self.bytes_of(room(self.device, a))
        words = self.words() | {"workspace": held.data_ptr(), "blas": self.held[0].data_ptr()}
        words |= {"pivots": self.held[0].data_ptr() + WORKSPACE, "beside": True}
        words["status"] = words["pivots"] + 4096
        return self.ms(
            lambda stream: factorise(self.device, stream, a, **words), lambda: x.copy_(kept), place
        )

    def cholesky(self, width: int, dtype: str, place: str) -> float:
        """Cholesky's factor of a diagonal block."""
        x, a = self.matrix(width, width, dtype)
        kept, held = x.clone(), self.bytes_of(lapack.room_of_cholesky(self.device, a))
        words = self.words() | {"workspace": held.data_ptr()}
        return self.ms(
            lambda stream: lapack.cholesky(self.device, stream, a, **words),
            lambda: x.copy_(kept),
            place,
        )

    def divide(self, rows: int, columns: int, right: bool, dtype: str, place: str) -> float:
        """A triangular solution."""
        (_, a), (x, b) = (
            self.matrix(*shape, dtype)
            for shape in ((columns if right else rows,) * 2, (rows, columns))
        )
        kept, blas = x.clone(), self.held[0].data_ptr()
        words = {"lower": True, "op": "C" if right else "N", "right": right, "beside": True}
        return self.ms(
            lambda stream: lapack.solve_triangular(self.device, stream, a, b, blas=blas, **words),
            lambda: x.copy_(kept),
            place,
        )

    def product(self, m: int, n: int, k: int, dtype: str, compute: int | None, place: str) -> float:
        """A product that is subtracted; factors of 16 bits have a result of float32."""
        kept = [
            self.matrix(m, k, dtype),
            self.matrix(k, n, dtype),
            self.matrix(m, n, "float32" if of(dtype).itemsize == 2 else dtype),
        ]
        words = {"alpha": -1.0, "beta": 1.0, "compute": compute}
        words["workspace"] = self.held[0].data_ptr()
        return self.ms(
            lambda stream: multiply(self.device, *(x for _, x in kept), stream=stream, **words),
            lambda: None,
            place,
        )


def alone(ranks: Ranks, dtypes: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each routine, of rank 0; the others wait."""
    if ranks.rank:
        return
    of_gpu = Alone(ranks)
    for dtype in dtypes:
        for place in ("alone", "beside"):
            for height in HEIGHTS:
                for whose in WHOSE:
                    ms = of_gpu.lu(height, WIDTH, dtype, place, ours=whose == OURS)
                    name = f"LU, {whose}, {height} x {WIDTH} {dtype}"
                    yield {"routine": name, "how": place, "ms": ms}
            for width in (1024, WIDTH, 256):
                ms = of_gpu.cholesky(width, dtype, place)
                yield {"routine": f"Cholesky {width} {dtype}", "how": place, "ms": ms}
            for rows, columns, right, whose in (
                (HEIGHTS[0], WIDTH, True, LIBRARIES),
                (HEIGHTS[2], WIDTH, True, LIBRARIES),
                (WIDTH, HEIGHTS[1], False, LIBRARIES),
                *((WIDTH, columns, False, whose) for columns in (1024, 512, 32) for whose in WHOSE),
            ):
                with patch.object(lapack, "_FEW", columns if whose == OURS else 0):
                    ms = of_gpu.divide(rows, columns, right, dtype, place)
                name = f"triangle of {WIDTH}, {whose}, {rows} x {columns} {dtype}"
                yield {"routine": name, "how": place, "ms": ms}
    for m, n, k in ((32768, 512, 512), (8192, 512, 512), (16384, 16384, 512), (8192, 8192, 512),
                    (16384, 16384, 1024), (16384, 16384, 1536)):  # fmt: skip
        for dtype, compute in (("float64", None), ("float32", None), ("float32", ROUNDED),
                               ("float32", TF32), ("bfloat16", None)):  # fmt: skip
            ms = of_gpu.product(m, n, k, dtype, compute, "alone")
            rate = round(2 * m * n * k / ms / 1e9, 1)
            name = f"product {m} x {n} x {k} {dtype}" + (f" by {compute}" if compute else "")
            yield {"routine": name, "how": "alone", "ms": ms, "TFLOP/s": rate}


# -- steps of a call -------------------------------------------------------------------------------


class Timed(NamedTuple):
    """A step that has been put on a stream, between two events."""

    stream: int
    step: str
    begin: Any
    end: Any


@contextmanager
def timed_steps(log: list[Timed]) -> Iterator[None]:
    """Within, every step of a factorisation is put between events; none is part of a graph."""
    bound = FactorisationProgram.bound

    def between(program: Any, step: Any, memories: Any) -> Any:
        launch = bound(program, step, memories)
        if launch is None or isinstance(step, Record | Await):
            return launch

        def launched(stream: int) -> None:
            begin, end = (call("cuEventCreate", 0) for _ in range(2))
            call("cuEventRecord", begin, stream)
            launch(stream)
            call("cuEventRecord", end, stream)
            log.append(Timed(stream, type(step).__name__, begin, end))

        return launched

    with (
        patch.object(FactorisationProgram, "bound", between),
        patch.object(FactorisationsOnGPUs, "replays", False),
    ):
        yield


def steps(ranks: Ranks, n: int, operation: str) -> list[dict[str, Any]]:
    """Rows of one call's steps, by stream and kind."""
    torch = ranks.torch
    given = Given(ranks, n, dominant="cholesky" in operation)
    how = Slab.X if "rows" in operation else by_columns(ranks.size)
    a = given.part(given.whole(), how).local
    words: dict[str, Any] = {"distributions": how}
    if "rounded" in operation:
        a, words["rounded"] = a.T.float().T, True
    factorise = cholesky if "cholesky" in operation else lu_factor
    log: list[Timed] = []
    with timed_steps(log):
        for _ in range(2):  # the first loads kernels
            log.clear()
            torch.cuda.synchronize()
            ranks.context.barrier()
            begin = call("cuEventCreate", 0)
            call("cuEventRecord", begin, 0)
            _, seconds = on_all(ranks, lambda: factorise(a, **words))
    named = {0: "user's"}
    lane = gpus.Lane.numbered(ranks.context, gpus.LANES - 1)
    named[int(lane.stream(gpus.AHEAD))] = gpus.AHEAD
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    last = 0.0
    for one in log:
        taken = float(call("cuEventElapsedTime", one.begin, one.end))
        last = max(last, float(call("cuEventElapsedTime", begin, one.end)))
        found[named.get(one.stream, "another"), one.step].append(taken)
    case = {"n": n, "operation": operation}
    rows = [case | {"ms": round(last, 2), "with the host": round(seconds * 1e3, 2)}]
    for (stream, step), taken in sorted(found.items()):
        shown = {"first": taken[0], "middle": taken[len(taken) // 2], "last": taken[-1]}
        row = case | {"stream": stream, "step": step, "count": len(taken)}
        row |= {"ms": round(sum(taken), 2)} | {k: round(v, 3) for k, v in shown.items()}
        rows.append(row)
    return rows


def refined(ranks: Ranks, n: int, dtype: str) -> list[dict[str, Any]]:
    """Rows of what a refined solution consists of."""
    given = Given(ranks, n, dominant=True)
    a, b = (given.part(x, Slab.X).local for x in (given.whole(), given.right()))
    found: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **words: Any) -> Any:
            ranks.torch.cuda.synchronize()
            start = time.perf_counter()
            made = function(*args, **words)
            ranks.torch.cuda.synchronize()
            found[name].append((time.perf_counter() - start) * 1e3)
            return made

        return called

    with ExitStack() as stack:
        for owner, name in (
            (refinement.api, "lu_factor"),
            (refinement.api, "lu_solve"),
            (refinement, "_in_columns"),
            (refinement, "_minus_product"),
            (refinement, "_norms"),
        ):
            timing = timed(name.strip("_"), getattr(owner, name))
            stack.enter_context(patch.object(owner, name, timing))
        words: dict[str, Any] = {"factor_dtype": dtype, "distributions": [Slab.X, Slab.X]}
        for _ in range(3):
            found.clear()
            made, seconds = on_all(ranks, lambda: solve(a, b, **words))
    case = {"n": n, "operation": f"solve, {dtype}"}
    rows = [case | {"ms": round(seconds * 1e3, 2), "corrections": made.iterations}]
    for name, taken in found.items():
        row = case | {"step": name, "count": len(taken), "ms": round(sum(taken), 2)}
        rows.append(row | {"last": round(taken[-1], 3)})
    return rows


def measure(ranks: Ranks, sizes: list[int], only: list[str], dtypes: list[str]) -> list[dict]:
    """All rows, printed as they come."""
    rows: list[dict] = []

    def keep(row: dict) -> None:
        rows.append(row)
        if ranks.rank == 0:
            print(*(f"{name} {value}" for name, value in row.items()), sep="  ", flush=True)

    if "alone" in only:
        for row in alone(ranks, dtypes):
            keep(row)
        ranks.context.barrier()
    tasks: list[Callable[[], list[dict]]] = []
    for n in sizes:
        if "steps" in only:
            operations = "cholesky", "lu_factor", "cholesky, rows", "lu_factor, rounded"
            tasks += [partial(steps, ranks, n, operation) for operation in operations]
        if "refinement" in only:
            tasks += [partial(refined, ranks, n, dtype) for dtype in ("float32", "bfloat16")]
    for task in tasks:
        try:
            for row in task():
                keep(row)
        except Exception as error:  # all ranks'
            keep({"left out": f"{type(error).__name__}: {error}"[:300]})
        ranks.torch.cuda.empty_cache()
    return rows


def main() -> None:
    """Measure, print, keep in results."""
    kinds = "alone", "steps", "refinement"
    parser = command(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16384, 32768])
    parser.add_argument("--only", nargs="+", default=list(kinds), choices=kinds)
    parser.add_argument("--dtypes", nargs="+", default=["float64", "float32"])
    options = parser.parse_args()
    given = options.sizes, options.only, options.dtypes
    run("gpu_factorisation_parts", measure, options, *given)


if __name__ == "__main__":
    main()
