"""QR, singular values and eigenvalues on GPUs beside torch.linalg on one of them, in one run.

    python benchmarks/gpu_decompositions.py 2
    python benchmarks/gpu_decompositions.py 2 --cases qr eigh --scale 0.25

Random matrices of float64, split by rows; torch has the whole matrix on rank 0's GPU, while the
others wait. Eigenvalues are computed twice: by every rank alone, and by work that the ranks share.
Seconds run from a call until its result is there, for the slowest rank: the median of several
calls. `residual` is ||A v - product of the factors v|| / (||A v|| n eps) for random vectors v.
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
RANK = 64  # of svd_lowrank


def factors(name: str, linalg: Any, a: Any) -> tuple[Any, ...]:
    """The factors whose product is `a`: Q, R; U, S, V^H; or the eigenvalues and eigenvectors."""
    if name == "qr":
        return tuple(linalg.qr(a))
    if name == "svd":
        return tuple(linalg.svd(a, full_matrices=False))
    return tuple(linalg.eigh(a))


def times(name: str, made: tuple[Any, ...], v: Any) -> Any:
    """The product of factors with vectors."""
    if name == "qr":
        q, r = made
        return q @ (r @ v)
    if name == "eigh":
        values, vectors = made
        return vectors @ (values[:, None] * (vectors.T @ v))
    u, s, vh = made
    return u @ (s[:, None] * (vh @ v))


def systems(
    ranks: Ranks, name: str, shape: tuple[int, int]
) -> Iterator[tuple[str, Callable[[], tuple[Any, ...]], Callable[[Any], float]]]:
    """Each system's name, its call, and how far its result is off."""
    torch, (m, n) = ranks.torch, shape
    generator = torch.Generator(ranks.device).manual_seed(m)
    words = {"dtype": torch.float64, "device": ranks.device, "generator": generator}
    whole = torch.randn(m, n, **words)
    if name == "eigh":
        whole += whole.T.clone()
    v = torch.randn(n, 2, **words)
    expected = whole @ v

    def off(product: Any) -> float:
        return float((product - expected).norm() / expected.norm()) / (n * EPS)

    if name == "svd_lowrank":
        peer = lambda: torch.svd_lowrank(whole, RANK)  # noqa: E731
    else:
        peer = lambda: factors(name, torch.linalg, whole)  # noqa: E731
    own = peer if ranks.rank == 0 else lambda: None
    yield TORCH, own, lambda made: off(times(name, made, v)) if name != "svd_lowrank" else 0.0
    low, high = Slab.X.slices(ranks.rank, shape, size=ranks.size)[0].indices(m)[:2]
    a = shardmath.array(whole[low:high].clone(), Slab.X)
    vectors = shardmath.array(v, Replicated())

    def ours() -> tuple[Any, ...]:
        if name == "svd_lowrank":
            return tuple(shardmath.linalg.svd_lowrank(a, RANK))
        return factors(name, shardmath.linalg, a)

    def off_ours(made: Any) -> float:
        if name == "svd_lowrank":
            return 0.0
        return off(times(name, made, vectors).to(Replicated()).local)

    yield ALONE, ours, off_ours
    if name == "eigh" and ranks.size > 1:

        def shared() -> tuple[Any, ...]:
            with patch.object(spectral, "ALONE", spectral.LEAF):
                return ours()

        yield SHARED, shared, off_ours


def measure(ranks: Ranks, cases: list[str], scale: float) -> Iterator[dict[str, Any]]:
    """A row for each case and system."""
    torch = ranks.torch
    for name in cases:
        for shape in SHAPES[name]:
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


def main() -> None:
    """Measure, print a table, keep it in results."""
    parser = command(__doc__)
    parser.add_argument("--cases", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--scale", type=float, default=1.0, help="of all extents")
    options = parser.parse_args()
    run("gpu_decompositions", measure, options, options.cases, options.scale)


if __name__ == "__main__":
    main()
