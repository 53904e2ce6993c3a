"""Eigenvalues and eigenvectors of a Hermitian matrix by work that the ranks share.

The eigenvalues are divided at a shift s: the sign function of A - s I has the eigenvectors of A,
those above s with the eigenvalue 1 and those below with -1. From it follow bases of both spaces,
and A becomes two blocks, which are divided again until every rank can decompose a block alone.

    A ── sign(A - s I) ──► projector ── QR ──► V = [V1 V2]      V^H A V = | A1  0 |
                                                                          | 0  A2 |

All large steps are products, QR and Cholesky factorisations of matrices in slabs of rows.

Source: Nakatsukasa and Higham, "Stable and efficient spectral divide and conquer algorithms for the
symmetric eigenvalue decomposition and the SVD", SIAM J. Sci. Comput. 35 (2013); the iteration for
the sign function, QDWH, is that of Nakatsukasa, Bai and Gygi, SIAM J. Matrix Anal. Appl. 31 (2010).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from shardmath.base import current
from shardmath.collectives import all_gather, all_reduce
from shardmath.distributed import dense, parts
from shardmath.distributed.movement import part_in
from shardmath.distributed.parts import squares
from shardmath.distributed.products import matmul
from shardmath.distributed.qr import alike, factorised, factors_of
from shardmath.distributed.state import Distributed
from shardmath.factorisations import api
from shardmath.geometry import Layout, Slab
from shardmath.machine import Machine, Rates

LEAF = 2_048  # orders up to which every rank decomposes a block

_ROWS = Slab(0)
_BY_QR = 100  # weights above which a step is a QR factorisation: Cholesky would lose digits
_STEPS = 12  # of the iteration at most: 6 or 7 are enough in double precision
_LEVELS = 4  # more than halving a matrix would need
_DIVISION = 50  # operations of a division, in units of n^3


class Predicted(NamedTuple):
    """Seconds for the eigenvectors of a matrix: if every rank computes `alone`, and if all `shared`
    the work; and whether a matrix `fits` into the memory of a rank that computes alone.
    """

    alone: float
    shared: float
    fits: bool

    @property
    def shares(self) -> bool:
        """Whether the ranks share the work: if that takes half as long, or there is no memory."""
        return self.shared < self.alone / 2 or not self.fits

    def __str__(self) -> str:
        how = "the ranks share the work" if self.shares else "every rank decomposes all of it alone"
        said = "" if self.fits else ", for which it has no memory"
        return f"{how}: predicted {self.shared:.2g} s, and {self.alone:.2g} s alone{said}"


def predicted(order: int, size: int, dtype: str, itemsize: int, rates: Rates) -> Predicted:
    """The times for a matrix of that order on `size` ranks. Pure.

    Alone: for each column that becomes tridiagonal the library reads what is left of the matrix,
    n^3/3 elements in all, which takes most of the time, and starts anew; products have 4 n^3
    operations. On an H200 that is 0.09, 0.49 and 3.4 s for n = 4096, 8192 and 16384, where cuSOLVER
    takes 0.11, 0.56 and 3.2 s. It needs the memory of five such matrices.

    Shared: a division has some 50 n^3 operations. Two steps of the sign function by QR have 10 n^3
    each, three or four by Cholesky 4.3 n^3, bases and blocks 13 n^3. Not all of these reach the
    rate of large products, so sharing has to promise twice the speed: two ranks on cores took 8.6 s
    where 7.4 are predicted (n = 2048, blocks of 512).
    """
    rate = rates.product(dtype)

    def alone(n: int) -> float:
        return itemsize * n**3 / 3 / rates.memory + 4 * n**3 / rate + n * rates.latency

    shared, n, count = 0.0, order, 1
    while n > LEAF:
        shared += count * (_DIVISION * n**3 / (size * rate) + n * rates.latency)
        n, count = -(-n // 2), 2 * count
    fits = 5 * itemsize * order**2 <= rates.room
    may_share = size > 1 and order > LEAF
    return Predicted(alone(order), shared + count * alone(n), fits or not may_share)


def prediction(a: Any) -> Predicted:
    """The times for a matrix on the processors that have it. Local."""
    kind = "cpu" if dense.is_on_cores(dense.workable(a.local)) else "cuda"
    rates, dtype = Machine(kind, a.context.hosts).rates, a.element_type
    return predicted(a.shape[0], a.context.size, dtype.name, dtype.itemsize, rates)


def eigh(a: Any, triangle: str, *, vectors: bool) -> tuple[Any, ...]:
    """The eigenvalues, ascending and on every rank, and with `vectors` the eigenvectors, split as
    the matrix. Collective.

    The matrix has finite elements of a type that LAPACK has; only this triangle is read. Blocks up
    to the order LEAF, and those that cannot be divided, are decomposed on every rank.
    """
    own = part_in(a, Layout.slab(a.shape, a.context.size, axis=0))
    rows = _from_triangle(_in_rows(a, dense.workable(own)), triangle)
    scale = _scale(rows)
    rows = rows * (1 / scale)
    levels = (rows.shape[0] // LEAF).bit_length() + _LEVELS
    values, made = _Division(_size(rows), vectors=vectors).divided(rows, levels)
    order = parts.order(values, 0)
    values = parts.taken_along(values, order, 0) * scale
    values = a.everywhere(parts.converted(values, a.local))
    if made is None:
        return (values,)
    local = parts.taken(made.local, parts.on_host(order), 1)
    made = made.with_part(parts.converted(local, a.local))
    return values, a.with_part(part_in(made, a.layout))


class _Division:
    """Divides blocks of a matrix of this Frobenius norm."""

    def __init__(self, size: float, *, vectors: bool) -> None:
        self.size = size
        self.vectors = vectors

    def divided(self, a: Any, levels: int) -> tuple[Any, Any]:
        """The eigenvalues of a block, in no order, and its eigenvectors. Collective."""
        order = a.shape[0]
        if order <= LEAF or not levels:
            return self._alone(a)
        diagonal = _diagonal(a)
        middle = math.fsum(diagonal) / order  # exact, and so equal on all ranks
        rest = _with_diagonal(a, -middle)
        spread = _size(rest) / order**0.5  # of the eigenvalues about their mean
        if spread * order**0.5 <= 4 * _eps(a) * self.size:
            return self._equal(a, diagonal)
        for shift in (float(np.median(diagonal)) + spread / 37, middle, middle + spread / 41):
            halves = self._halves(a, shift)
            if halves is not None:
                break
        else:
            return self._alone(a)
        bases, blocks = zip(*halves, strict=True)
        values, vectors = zip(*(self.divided(one, levels - 1) for one in blocks), strict=True)
        joined = parts.module_of(a.local).concatenate
        if not self.vectors:
            return joined(values), None
        columns = [_in_rows(a, matmul(*pair)).local for pair in zip(bases, vectors, strict=True)]
        return joined(values), a.with_part(joined(columns, 1))

    def _halves(self, a: Any, shift: float) -> list[tuple[Any, Any]] | None:
        """Bases of the eigenvectors on the two sides of a shift, and the blocks of `a` for them;
        None where one side has no eigenvalue, or an eigenvalue is too near to separate the sides.
        """
        order = a.shape[0]
        sign = _sign(_with_diagonal(a, -shift))
        above = round((order + math.fsum(_diagonal(sign))) / 2)
        if not 0 < above < order:
            return None
        side = 1 if 2 * above <= order else -1
        projector = _with_diagonal(sign * (side / 2), 0.5)
        count = min(above, order - above)
        numbers = _random(a)
        start = _basis(matmul(projector, numbers[:, :count]))
        # Whatever columns follow those of one space, the others of a square Q are of the other one.
        near = _in_rows(a, matmul(projector, start)).local
        joined = parts.module_of(near).concatenate([near, numbers.local[:, count:]], 1)
        basis = _basis(a.with_part(joined))
        block = _hermitian(_in_rows(a, matmul(basis.conj().T, _in_rows(a, matmul(a, basis)))))
        left = _size(block[count:, :count])
        if left > 10 * _eps(a) * order**0.5 * self.size:
            return None
        first, second = slice(0, count), slice(count, None)
        return [(basis[:, own], _in_rows(a, block[own, own])) for own in (first, second)]

    def _alone(self, a: Any) -> tuple[Any, Any]:
        """The eigenvalues and eigenvectors of a block that every rank decomposes."""
        whole = dense.workable(part_in(a, Layout.replicated(a.shape, a.context.size)))
        made = alike("eigh", a, lambda: dense.eigh(whole, "L", vectors=self.vectors))
        return made[0], a.everywhere(made[1]) if self.vectors else None

    def _equal(self, a: Any, diagonal: Any) -> tuple[Any, Any]:
        """The eigenvalues and eigenvectors of a multiple of the identity matrix, up to rounding."""
        values = parts.converted(diagonal, abs(a.local[:0, 0]))
        return values, _identity(a) if self.vectors else None


# -- the sign function -----------------------------------------------------------------------------


def _sign(a: Any) -> Any:
    """The sign function of a Hermitian matrix that is not 0. Eigenvalues that are smaller than the
    largest by the type's epsilon may come out between -1 and 1. Collective.
    """
    eps = _eps(a)
    x = a * (1 / _size(a))
    low = eps  # no eigenvalue that is to become 1 or -1 is smaller in absolute value
    for _ in range(_STEPS):
        u, v, w = _weights(low)
        step = _by_qr if w > _BY_QR or _lacks_cholesky(a) else _by_cholesky
        after = _hermitian(x * (v / w) + step(x, w) * (u - v / w))
        change, x = _size(after - x), after
        low = min(1.0, low * (u + v * low**2) / (1 + w * low**2))
        if 1 - low <= 5 * eps and change <= (5 * eps) ** (1 / 3):
            break
    return x


def _weights(low: float) -> tuple[float, float, float]:
    """The weights a, b, c of a step x (a + b x^2) / (1 + c x^2), which takes numbers from `low` to
    1 as near to 1 as such a step can.
    """
    d = (4 * (1 - low**2) / low**4) ** (1 / 3)
    root = (1 + d) ** 0.5
    a = root + (8 - 4 * d + 8 * (2 - low**2) / (low**2 * root)) ** 0.5 / 2
    b = (a - 1) ** 2 / 4
    return a, b, a + b - 1


def _by_qr(x: Any, weight: float) -> Any:
    """X (1 + weight x^2)^-1, from the orthonormal columns of [sqrt(weight) x; I]. Collective.

    Each rank stacks its rows of both: the order of rows does not matter.
    """
    own = len(x.local)
    pair = [x.local * weight**0.5, _identity(x).local]
    heights = [2 * part[0].length for part in x.layout.parts]
    q = factors_of(x.context, heights, parts.module_of(x.local).concatenate(pair)).q()
    upper, lower = x.with_part(q[:own]), x.with_part(q[own:])
    return _in_rows(x, matmul(upper, lower.conj().T)) * weight**-0.5


def _by_cholesky(x: Any, weight: float) -> Any:
    """Solve (1 + weight x^2) y = x. Collective."""
    square = _with_diagonal(_in_rows(x, matmul(x, x)) * weight, 1.0)
    words: Any = {"distributions": [_ROWS] * 3, "assume_a": "pos", "check_finite": False}
    with current.within(x.context):
        return x.with_part(api.solve(square.local, x.local, **words))


def _lacks_cholesky(x: Any) -> bool:
    """Whether there is no Cholesky factorisation between these ranks."""
    return x.context.team is not None and x.context.multi_host


# -- matrices in slabs of rows ---------------------------------------------------------------------


def _in_rows(a: Any, x: Any, columns: int | None = None) -> Any:
    """`x` in slabs of rows: an array, or this rank's rows of one with the rows of `a`."""
    shape = x.shape if isinstance(x, Distributed) else (a.shape[0], columns or a.shape[1])
    layout = Layout.slab(shape, a.context.size, axis=0)
    return a.like(part_in(x, layout) if isinstance(x, Distributed) else x, _ROWS, layout)


def _from_triangle(x: Any, triangle: str) -> Any:
    """The Hermitian matrix with this triangle."""
    own, all_ = _own_diagonal(x)[1][:, None], parts.converted(np.arange(x.shape[0]), x.local)
    is_given = own > all_ if triangle == "L" else own < all_
    strict = x.with_part(parts.chosen(is_given, x.local, x.local * 0))
    made = strict + _in_rows(x, strict.conj().T)
    made.local[_own_diagonal(x)] += x.local[_own_diagonal(x)].real
    return made


def _hermitian(x: Any) -> Any:
    """The Hermitian part of a matrix."""
    return (x + _in_rows(x, x.conj().T)) * 0.5


def _own_diagonal(x: Any) -> tuple[Any, Any]:
    """The indices of the elements on the diagonal in this rank's rows."""
    first = x.layout.parts[x.context.rank][0].start if len(x.local) else 0
    rows = np.arange(len(x.local))
    return parts.converted(rows, x.local), parts.converted(rows + first, x.local)


def _diagonal(x: Any) -> Any:
    """The diagonal of a Hermitian matrix, real, as NumPy's array on every rank. Collective."""
    own = x.local[_own_diagonal(x)]
    return parts.on_host(all_gather(own.real + 0, context=x.context))


def _with_diagonal(x: Any, more: float) -> Any:
    """The matrix with a number added to its diagonal."""
    local = parts.copied(x.local)
    local[_own_diagonal(x)] += more
    return x.with_part(local)


def _identity(x: Any) -> Any:
    """The identity matrix, split as `x` and in its type."""
    return _with_diagonal(x.with_part(parts.full(x.local.shape, 0, x.local)), 1.0)


def _scale(x: Any) -> float:
    """A power of 2 near the largest element: squares of numbers divided by it are in range."""
    own = float(abs(x.local).max()) if len(x.local) else 0.0
    largest: float = all_reduce(own, op="max", context=x.context)
    return 2.0 ** (math.frexp(largest)[1] - 1) if largest else 1.0


def _size(x: Any) -> float:
    """The Frobenius norm. Collective."""
    total: float = all_reduce(float(squares(x.local).sum()), context=x.context)
    return math.sqrt(total)


def _basis(x: Any) -> Any:
    """Orthonormal columns that span those of `x`."""
    _, factors = factorised(_in_rows(x, x))
    return _in_rows(x, factors.q(), factors.rank)


def _random(a: Any) -> Any:
    """A matrix of random numbers, split as `a`: the same in every run."""
    first = a.layout.parts[a.context.rank][0].start
    rows = range(first, first + len(a.local))
    return a.with_part(dense.scattered(rows, a.shape[1], a.shape[0], a.local))


def _eps(a: Any) -> float:
    """The epsilon of the type."""
    eps: float = np.finfo(a.element_type.name).eps
    return float(eps)
