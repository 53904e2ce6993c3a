"""Singular values of a matrix that is nearly of low rank, by products with a random matrix.

    Y = A Omega ── QR ──► Q      Q Q^H A is near A: its columns span what A does most
    Z = A^H Q   ── QR ──► Q      and back, so many iterations: small singular values fade
    A^H Q ── svd ──► V, S, U'    U = Q U'

Source: Halko, Martinsson, Tropp, "Finding structure with randomness", SIAM Review 53 (2011),
algorithms 4.4 and 5.1.
"""

from __future__ import annotations

from typing import Any

from shardmath.base.collective_call import collective_call
from shardmath.base.integers import integer
from shardmath.distributed import dense
from shardmath.distributed.decompositions import SVDResult, described, orthonormal, svd
from shardmath.distributed.products import matmul
from shardmath.distributed.random_numbers import require_seed
from shardmath.factorisations.operands import require_matrix
from shardmath.geometry import Layout, Slab


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
    count = min(rank + oversampling, *a.shape)
    q = orthonormal(matmul(a, _random_columns(a, count, seed)))
    for _ in range(iterations):
        q = orthonormal(matmul(a, orthonormal(_adjoint_times(a, q))))
    right, s, left = svd(_adjoint_times(a, q))
    u = matmul(q, left.conj().T[:, :rank])
    return SVDResult(u, s[:rank], right[:, :rank].conj().T)


def _random_columns(a: Any, count: int, seed: int) -> Any:
    """A matrix of random columns to multiply A with, in slabs of rows and in the type of A.

    Its numbers are uniform and not normal, which makes them cheap: it is enough that they are
    independent, of mean 0 and bounded for the columns of A Omega to span as good a space.
    """
    layout = Layout.slab((a.shape[1], count), a.context.size, axis=0)
    own = layout.parts[a.context.rank][0]
    rows = range(own.start, own.start + own.length)
    return a.like(dense.scattered(rows, count, seed, a.local), Slab(0), layout)


def _adjoint_times(a: Any, q: Any) -> Any:
    """A^H Q; the few columns are conjugated rather than A."""
    conjugate: Any = matmul(a.T, q.conj())
    return conjugate.conj()
