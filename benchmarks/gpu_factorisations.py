"""Factorisations on GPUs beside torch.linalg on one of them, in one run.

    python benchmarks/gpu_factorisations.py 2
    python benchmarks/gpu_factorisations.py 1 --sizes 8192 --blocks 256 1024
    python benchmarks/gpu_factorisations.py 2 --operations lu_factor cholesky
    python benchmarks/gpu_factorisations.py 2 --operations lu_factor --routines libraries own

float64. A rate counts n^3/3 operations for Cholesky, 2/3 n^3 for LU and 2/3 n^3 + 2 n^2 m for m
right-hand sides, whatever type the factors have. torch has the whole matrix on rank 0's GPU, while
the others wait. Ours is split by rows, and by columns in blocks of the width that the computation
uses (`gpu_factorisations_peers.py` has cuSOLVERMp on the same cases). Seconds run from a call until
its result is there, for the slowest rank: the median of several calls. Each row also has the error
of its result: for factors the residual on random vectors, in n eps; for solutions the largest
backward error of a column. Factors of float32 and bfloat16 are refined. Matrices are random;
"dominant" ones have 3 sqrt(n) added to each diagonal element, which makes factors of bfloat16
useful. Cholesky's are the lower triangle.

With `--routines libraries` cuSOLVER factorises all panels of LU, in place of our kernel.

If there are fewer GPUs than ranks, these take turns, and the rate is at most that of a whole GPU:
then the figures show only what panels, synchronisations and redistributions add.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from on_gpus import Ranks, command, run

from shardmath.collectives import all_reduce
from shardmath.distribution import BlockCyclic, Distribution, ProcessGrid, Slab
from shardmath.linalg import cholesky, lu_factor, solve
from shardmath.local.gpu import lapack

UNTIMED, REPEATS = 3, 5  # the first call plans, and loads kernels; the next two capture them
ENOUGH = 1.0  # seconds of calls, after which there are no more
RIGHT_SIDES = 64
WIDTH = 512
TORCH, ROWS = "torch.linalg", "rows"
OWN, LIBRARIES = "own", "libraries"
CASES = "lu_factor", "cholesky", "solve", "solve, dominant"
Cases = Sequence[str]
REFINED = ("float32", "bfloat16")
EPS = 2.0**-52


def operations(n: int, operation: str) -> float:
    """Operations of a factorisation or solution."""
    if operation == "cholesky":
        return n**3 / 3
    return 2 / 3 * n**3 + ("solve" in operation) * 2 * n * n * RIGHT_SIDES


class Part(NamedTuple):
    """What a rank has of a matrix, and of which rows and columns."""

    local: Any
    rows: Any
    columns: Any


class Matrix:
    """An n x n matrix and right-hand sides, whole or in parts, made when they are asked for."""

    def __init__(self, ranks: Ranks, n: int, *, dominant: bool) -> None:
        self.ranks, self.n, self.dominant = ranks, n, dominant

    def whole(self) -> Any:
        """The matrix, by columns."""
        made = self._random(self.n).T
        if self.dominant:
            made.diagonal().add_(3 * self.n**0.5)
        return made

    def right(self) -> Any:
        """The right-hand sides."""
        return self._random(RIGHT_SIDES)

    def _random(self, columns: int) -> Any:
        torch, device = self.ranks.torch, self.ranks.device
        generator = torch.Generator(device).manual_seed(columns)
        words = {"dtype": torch.float64, "device": device, "generator": generator}
        return torch.randn(self.n, columns, **words)

    def part(self, whole: Any, how: Distribution | None) -> Part:
        """This rank's part, in the order it is computed with; all of it if it is not split."""
        torch, rank, size = self.ranks.torch, self.ranks.rank, self.ranks.size
        every = [torch.arange(extent, device=whole.device) for extent in whole.shape]
        if how is None:
            return Part(whole, *every)
        ranges = how.index_ranges(rank, tuple(whole.shape), size=size)
        rows, columns = (
            torch.cat([x[:0], *(x[lo:hi] for lo, hi in axis)])
            for x, axis in zip(every, ranges, strict=True)
        )
        if how is Slab.X:
            return Part(whole[rows].contiguous(), rows, columns)
        held = whole if len(rows) == len(whole) else whole[rows]
        return Part(held.T[columns].T, rows, columns)


class System(NamedTuple):
    """One way to do an operation: the call, what it is of, and how its result is split."""

    name: str
    call: Callable[[], Any]
    a: Part
    how: Distribution | None


def by_columns(size: int, width: int = WIDTH) -> Distribution:
    """Blocks of columns, dealt to the ranks."""
    return BlockCyclic(ProcessGrid(shape=(1, size)), (1 << 30, width))


def systems(
    ranks: Ranks, matrix: Matrix, operation: str, blocks: list[int]
) -> Iterator[Callable[[], System]]:
    """What makes each way's system, torch's first."""
    torch, size = ranks.torch, ranks.size

    def torchs() -> System:
        whole, right = (matrix.whole(), matrix.right()) if ranks.rank == 0 else (None, None)
        if whole is None:
            return System(TORCH, lambda: None, Part(None, None, None), None)
        calls = {
            "cholesky": lambda: torch.linalg.cholesky(whole),
            "lu_factor": lambda: torch.linalg.lu_factor(whole),
            "solve": lambda: torch.linalg.solve(whole, right),
        }
        return System(TORCH, calls[operation.partition(",")[0]], matrix.part(whole, None), None)

    def ours(name: str, how: Distribution, **words: Any) -> System:
        a = matrix.part(matrix.whole(), how)
        b = matrix.part(matrix.right(), Slab.X).local
        one, two = words | {"distributions": how}, words | {"distributions": [how, Slab.X]}
        calls = {
            "cholesky": lambda: cholesky(a.local, **one),
            "lu_factor": lambda: lu_factor(a.local, **one),
            "solve": lambda: solve(a.local, b, **two),
        }
        solves = "solve" in operation
        return System(name, calls[operation.partition(",")[0]], a, Slab.X if solves else how)

    yield torchs
    yield lambda: ours(ROWS, Slab.X)
    if "solve" in operation:
        for dtype in REFINED if matrix.dominant else REFINED[:1]:
            yield lambda dtype=dtype: ours(f"rows, {dtype}", Slab.X, factor_dtype=dtype)
    else:
        yield lambda: ours("columns", by_columns(size))
        for block in blocks:
            options = {"block_size": block}
            how = by_columns(size, block)
            yield lambda b=block, h=how, o=options: ours(f"columns, {b}", h, options=o)


class Exactness:
    """How exact a result is. Collective, but for torch's, which rank 0 has whole."""

    def __init__(self, ranks: Ranks, matrix: Matrix, system: System) -> None:
        self.torch, self.n, self.matrix = ranks.torch, matrix.n, matrix
        self.a, self.how, self.alone = system.a, system.how, system.name == TORCH
        self.vectors = matrix.right()[:, :2].contiguous()

    def of(self, operation: str, made: Any) -> float:
        """The residual of factors in n eps, or the largest backward error of a solution."""
        if "solve" in operation:
            return self._backward_error(made.x if hasattr(made, "backward_error") else made)
        factor = made[0] if operation == "lu_factor" else made
        part, v = self.a._replace(local=factor), self.vectors
        if operation == "cholesky":
            want = self._times(self._tril(self.a), v)
            want += self._times(self._tril(self.a, -1), v, adjoint=True)
            lower = self._tril(part)
            got = self._times(lower, self._times(lower, v, adjoint=True))
        else:
            want = self._times(self.a, v).cpu().numpy()
            pivots = made[1].cpu().numpy() - self.alone  # torch counts from 1
            for row, other in enumerate(pivots.tolist()):
                want[[row, other]] = want[[other, row]]
            want = self.torch.from_numpy(want).to(v.device)
            above = part._replace(local=part.local - self._tril(part, -1).local)
            got = self._times(above, v)
            got = got + self._times(self._tril(part, -1), got)
        return float((got - want).norm() / want.norm()) / (self.n * EPS)

    def _backward_error(self, x: Any) -> float:
        matrix, torch = self.matrix, self.torch
        b = matrix.right()
        if not self.alone:
            rows = matrix.part(b, self.how).rows
            whole = torch.zeros_like(b)
            whole[rows] = x
            x = self._sum(whole)
        norm = self._sum((self.a.local**2).sum().reshape(1)) ** 0.5
        left = (b - self._times(self.a, x)).norm(dim=0)
        return float((left / (norm * x.norm(dim=0) + b.norm(dim=0))).max())

    def _tril(self, part: Part, diagonal: int = 0) -> Part:
        below = part.rows[:, None] + diagonal >= part.columns
        return part._replace(local=self.torch.where(below, part.local, 0.0))

    def _times(self, part: Part, v: Any, *, adjoint: bool = False) -> Any:
        """The product of the matrix, or of its transpose, and vectors that every rank has."""
        local, rows, columns = part if not adjoint else (part.local.T, part.columns, part.rows)
        made = self.torch.zeros(self.n, v.shape[1], dtype=v.dtype, device=v.device)
        made[rows] = local @ v[columns]
        return self._sum(made)

    def _sum(self, x: Any) -> Any:
        return x if self.alone else all_reduce(x)


def measure(
    ranks: Ranks,
    cases: Cases,
    sizes: list[int],
    blocks: list[int],
    seconds: float,
    routines: str,
) -> Iterator[dict[str, Any]]:
    """A row for each size, operation and system; those not begun after `seconds` say so."""
    none = patch.object(lapack, "blocks_of_lu", lambda *_: 0)
    with none if routines == LIBRARIES else nullcontext():
        yield from rows_of(ranks, cases, sizes, blocks, seconds)


def rows_of(
    ranks: Ranks, cases: Cases, sizes: list[int], blocks: list[int], seconds: float
) -> Iterator[dict[str, Any]]:
    """See `measure`."""
    begun = time.monotonic()
    for n in sizes:
        for operation in cases:
            dominant = operation in ("cholesky", "solve, dominant")
            matrix = Matrix(ranks, n, dominant=dominant)
            times: dict[str, float] = {}
            for make in systems(ranks, matrix, operation, blocks):
                row: dict[str, Any] = {"n": n, "operation": operation}
                if ranks.largest(time.monotonic() - begun) > seconds:
                    row["left out"] = f"{seconds} s have passed"
                    yield row
                    break
                try:
                    row |= measured(ranks, matrix, operation, make, times)
                except Exception as error:  # all ranks': of a library that is not there, or memory
                    row["left out"] = f"{type(error).__name__}: {error}"[:300]
                yield row
                ranks.torch.cuda.empty_cache()


def measured(
    ranks: Ranks,
    matrix: Matrix,
    operation: str,
    make: Callable[[], System],
    times: dict[str, float],
) -> dict[str, Any]:
    """What a system takes, beside torch and ours of float64, whose `times` are kept."""
    torch, n = ranks.torch, matrix.n
    system, _ = on_all(ranks, make)
    taken = []
    for turn in range(UNTIMED + REPEATS):
        made = None
        torch.cuda.synchronize()
        ranks.context.barrier()
        made, spent = on_all(ranks, system.call)
        if turn >= UNTIMED:
            taken.append(spent)
        if sum(taken) > ENOUGH:
            break
    best = times[system.name] = statistics.median(taken)
    row: dict[str, Any] = {"system": system.name, "ms": round(best * 1e3, 2)}
    row["TFLOP/s"] = round(operations(n, operation) / best / 1e12, 2)
    row["of torch"] = round(times[TORCH] / best, 3)
    if ROWS in times:
        row["of rows"] = round(times[ROWS] / best, 3)
    if hasattr(made, "iterations"):
        row |= {"corrections": made.iterations, "factors": made.factor_dtype}
    is_whole = system.name == TORCH
    error = 0.0
    if made is not None and (not is_whole or ranks.rank == 0):
        error = Exactness(ranks, matrix, system).of(operation, made)
    row["backward error" if "solve" in operation else "residual"] = float(
        np.format_float_scientific(ranks.largest(error), precision=3)
    )
    return row


def on_all(ranks: Ranks, call: Callable[[], Any]) -> tuple[Any, float]:
    """What the call returns, and the seconds of the slowest rank. Raises on all where one does."""
    made = failed = None
    start = time.perf_counter()
    try:
        made = call()
        ranks.torch.cuda.synchronize()
    except Exception as error:
        failed = error
    spent = ranks.largest(float("inf") if failed else time.perf_counter() - start)
    if spent == float("inf"):
        raise failed or RuntimeError("another rank failed")
    return made, spent


if __name__ == "__main__":
    parser = command(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16384, 32768])
    parser.add_argument("--blocks", type=int, nargs="*", default=[])
    parser.add_argument("--operations", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--routines", nargs="+", default=[OWN], choices=[OWN, LIBRARIES])
    parser.add_argument("--seconds", type=float, default=600.0, help="begin nothing after these")
    options = parser.parse_args()
    given = options.operations, options.sizes, options.blocks, options.seconds
    for routines in options.routines:
        name = "gpu_factorisations" + ("_libraries" if routines == LIBRARIES else "")
        run(name, measure, options, *given, routines)
