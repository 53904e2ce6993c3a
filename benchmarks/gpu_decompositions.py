"""QR, singular values and eigenvalues on GPUs beside torch.linalg on one of them, in one run.

    python benchmarks/gpu_decompositions.py 2
    python benchmarks/gpu_decompositions.py 2 --cases qr eigh --shapes 8192x8192 --scale 0.25

Random matrices of float64, split by rows; torch has the whole matrix on rank 0's GPU, while the
others wait. Eigenvalues are computed twice: by every rank alone, and by work that the ranks share.
`svd_lowrank` multiplies with as many random columns as torch's, whose argument counts those beyond
the rank. Seconds run from a call until its result is there, for the slowest rank: the median of
several calls. `residual` is ||A v - product of the factors v|| / (||A v|| n eps) for random vectors
v, and of `svd_lowrank` ||U^T A v - S V^T v|| / (||S V^T v|| n eps).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from on_gpus import Ranks, command, run

import shardmath
from shardmath.distributed import spectral
from shardmath.distribution import Replicated, Slab

UNTIMED, REPEATS = 1, 3
ENOUGH = 10.0  # seconds of calls, after which there are no more
TORCH, ALONE, SHARED = "torch.linalg", "shardmath", "shardmath, shared"
EPS = 2.0**-52
SHAPES = {
    "qr": [(1 << 20, 64), (1 << 18, 1024), (8192, 8192), (16384, 16384)],
    "svd": [(1 << 20, 64), (1 << 18, 1024)],
    "svd_lowrank": [(1 << 17, 8192)],
    "eigh": [(4096, 4096), (8192, 8192), (16384, 16384)],
}
RANK, OVERSAMPLING = 64, 10  # of svd_lowrank


def factors(name: str, linalg: Any, a: Any) -> tuple[Any, ...]:
    """The factors whose product is `a`: Q, R; U, S, V^T; or the eigenvalues and eigenvectors."""
    if name == "qr":
        return tuple(linalg.qr(a))
    if name == "svd":
        return tuple(linalg.svd(a, full_matrices=False))
    return tuple(linalg.eigh(a))


def torchs(name: str, torch: Any, a: Any) -> tuple[Any, ...]:
    """The same, by torch."""
    if name != "svd_lowrank":
        return factors(name, torch.linalg, a)
    u, s, v = torch.svd_lowrank(a, RANK + OVERSAMPLING)
    return u[:, :RANK], s[:RANK], v[:, :RANK].T


def ours(name: str, a: Any) -> tuple[Any, ...]:
    """The same, by this package."""
    if name != "svd_lowrank":
        return factors(name, shardmath.linalg, a)
    return tuple(shardmath.linalg.svd_lowrank(a, RANK, OVERSAMPLING))


def sides(name: str, a: Any, made: tuple[Any, ...], v: Any) -> tuple[Any, Any]:
    """Two products with vectors that are equal but for rounding."""
    if name == "qr":
        q, r = made
        return a @ v, q @ (r @ v)
    if name == "eigh":
        values, vectors = made
        return a @ v, vectors @ (values[:, None] * (vectors.T @ v))
    u, s, vh = made
    if name == "svd_lowrank":
        return u.T @ (a @ v), s[:, None] * (vh @ v)
    return a @ v, u @ (s[:, None] * (vh @ v))


def residual(product: Any, expected: Any, n: int) -> float:
    """How far a product is off, in units of n roundings."""
    return float((product - expected).norm() / expected.norm()) / (n * EPS)


def systems(
    ranks: Ranks, name: str, shape: tuple[int, int]
) -> Iterator[tuple[str, Callable[[], tuple[Any, ...] | None], Callable[[Any], float]]]:
    """Each system's name, its call, and how far its result is off."""
    torch, (m, n) = ranks.torch, shape
    generator = torch.Generator(ranks.device).manual_seed(m)
    words = {"dtype": torch.float64, "device": ranks.device, "generator": generator}
    whole = torch.randn(m, n, **words)
    if name == "eigh":
        whole += whole.T.clone()
    v = torch.randn(n, 2, **words)
    yield (
        TORCH,
        lambda: torchs(name, torch, whole) if ranks.rank == 0 else None,
        lambda made: residual(*sides(name, whole, made, v), n),
    )
    low, high = Slab.X.slices(ranks.rank, shape, size=ranks.size)[0].indices(m)[:2]
    a = shardmath.array(whole[low:high].clone(), Slab.X)
    vectors = shardmath.array(v, Replicated())

    def off(made: Any) -> float:
        both = (side.to(Replicated()).local for side in sides(name, a, made, vectors))
        return residual(*both, n)

    yield ALONE, lambda: ours(name, a), off
    if name == "eigh" and ranks.size > 1:
        no_memory = spectral.Predicted(alone=0.0, shared=0.0, fits=False)

        def shared() -> tuple[Any, ...]:
            with patch.object(spectral, "prediction", lambda _: no_memory):
                return ours(name, a)

        yield SHARED, shared, off


def measure(
    ranks: Ranks, cases: list[str], shapes: list[tuple[int, int]], scale: float
) -> Iterator[dict[str, Any]]:
    """A row for each case and system; of the shapes of a case those that are among `shapes`."""
    torch = ranks.torch
    for name in cases:
        for shape in (shape for shape in SHAPES[name] if shape in shapes):
            m, n = (max(RANK, int(extent * scale)) for extent in shape)
            best: dict[str, float] = {}
            for system, call, off in systems(ranks, name, (m, n)):
                taken: list[float] = []
                for turn in range(UNTIMED + REPEATS):
                    made = None
                    torch.cuda.synchronize()
                    ranks.context.barrier()
                    start = time.perf_counter()
                    made = call()
                    torch.cuda.synchronize()
                    spent = ranks.largest(time.perf_counter() - start)
                    if turn >= UNTIMED or spent > ENOUGH:
                        taken.append(spent)
                    if sum(taken) > ENOUGH:
                        break
                best[system] = statistics.median(taken)
                error = ranks.largest(0.0 if made is None else off(made))
                yield {
                    "operation": name,
                    "shape": [m, n],
                    "system": system,
                    "ms": round(best[system] * 1e3, 2),
                    "of torch": round(best[TORCH] / best[system], 3),
                    "residual": float(f"{error:.3g}"),
                }
                made = None
                torch.cuda.empty_cache()


def shape_of(text: str) -> tuple[int, int]:
    """The shape that is written as 8192x4096."""
    m, n = text.split("x")
    return int(m), int(n)


if __name__ == "__main__":
    parser = command(__doc__)
    parser.add_argument("--cases", nargs="+", default=list(SHAPES), choices=SHAPES)
    every = sorted({shape for shapes in SHAPES.values() for shape in shapes})
    parser.add_argument("--shapes", nargs="+", default=every, type=shape_of, help="as 8192x8192")
    parser.add_argument("--scale", type=float, default=1.0, help="of all extents")
    options = parser.parse_args()
    run("gpu_decompositions", measure, options, options.cases, options.shapes, options.scale)
