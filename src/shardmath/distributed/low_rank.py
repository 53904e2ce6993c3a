"""Singular values of a matrix that is nearly of low rank, by products with a random matrix.

    Y = A Omega ── QR ──► Q      Q Q^H A is near A: its columns span what A does most
    Z = A^H Q   ── QR ──► Q      and back, so many iterations: small singular values fade
    A^H Q ── svd ──► V, S, U'    U = Q U'

Source: Halko, Martinsson, Tropp, "Finding structure with randomness", SIAM Review 53 (2011),
algorithms 4.4 and 5.1.
"""

from __future__ import annotations

from typing import Any

from shardmath.arrays import dtypes
from shardmath.base.collective_call import collective_call
from shardmath.distributed import parts
from shardmath.distributed.decompositions import SVDResult, described, native_type, orthonormal, svd
from shardmath.distributed.movement import within
from shardmath.distributed.products import matmul
from shardmath.distributed.random_numbers import require_seed, standard_normal
from shardmath.factorisations.operands import require_matrix
from shardmath.geometry import Slab
from shardmath.geometry.integers import integer


@collective_call
def svd_lowrank(
    a: Any, rank: int, oversampling: int = 10, iterations: int = 2, seed: int = 0
) -> SVDResult:
    """The largest `rank` singular values of a matrix and their vectors, approximately. Collective.

        u, s, vh = svd_lowrank(images, 20)

    A is multiplied 2 + 2 `iterations` times by rank + `oversampling` columns; more of either
    improve the result where the singular values decay slowly. U is split by rows as A is, or as
    Slab.X, Vh by columns as Slab.Y; S is on every rank. The random numbers depend on `seed` and the
    shape alone, so that up to rounding the result is the same on any number of ranks.

    Raises on all ranks ValueError for a rank above either extent, or for negative numbers;
    otherwise as `svd`.
    """

    def require_numbers(shape: tuple[int, ...]) -> None:
        require_matrix("a", shape)
        integer(rank, "rank", least=0)
        integer(oversampling, "oversampling", least=0)
        integer(iterations, "iterations", least=0)
        require_seed(seed)
        if rank > min(shape):
            raise ValueError(f"rank is {rank}, and the matrix is {shape[0]} x {shape[1]}")

    words = (rank, oversampling, iterations, seed)
    (a,) = described("svd_lowrank", [a], words=words, fit=require_numbers)
    (m, n), kind = a.shape, native_type(a)
    count = min(rank + oversampling, m, n)
    real = "float32" if kind.itemsize // (1 + (kind.kind == "c")) == 4 else "float64"
    omega = within(
        a.context,
        lambda: standard_normal(
            (n, count), seed=seed, distribution=Slab.X, dtype=real, package=parts.module_of(a.local)
        ),
    )
    if dtypes.of(kind).kind == "c":
        omega = omega.astype(kind)
    q = orthonormal(matmul(a, omega))
    for _ in range(iterations):
        q = orthonormal(matmul(a, orthonormal(_adjoint_times(a, q))))
    right, s, left = svd(_adjoint_times(a, q))
    u = matmul(q, left.conj().T[:, :rank])
    return SVDResult(u, s[:rank], right[:, :rank].conj().T)


def _adjoint_times(a: Any, q: Any) -> Any:
    """A^H Q; the few columns are conjugated rather than A."""
    conjugate: Any = matmul(a.T, q.conj())
    return conjugate.conj()
