"""QR of a matrix whose rows are split over GPUs: orthonormal columns by products and Cholesky.

A panel W of columns is made orthogonal to the columns of Q that are there, then orthonormal:

    S = Q^H W    W = W - Q S         sums over the ranks, products of each rank's rows
    W^H W = R^H R    W = W R^-1      R on rank 0, which sends it to all

Rounding leaves W less orthonormal the more its columns depend on each other, so this is repeated
until W was nearly orthonormal and nearly orthogonal to Q before the last pass. Usually two passes
are enough, 4 m n^2 operations in all; reflectors take 8/3 n^3 of a square matrix, but GPUs make
them column by column. Where W^H W is not positive definite in its type, a multiple of its diagonal
is added, and a further pass makes up for it.

Nothing is taken on trust: what W R differs from the former W is summed up, and a matrix for which
any of this fails is left to reflectors (`qr`).

Source: Barlow and Smoktunowicz, "Reorthogonalized block classical Gram-Schmidt", Numer. Math. 123
(2013); Fukaya, Kannan, Nakatsukasa, Yamamoto, Yanagisawa, "Shifted Cholesky QR for computing the QR
factorization of ill-conditioned matrices", SIAM J. Sci. Comput. 42 (2020), whose shift is here
relative to the diagonal, so that small columns are not lost.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.linalg import LinAlgError

from shardmath.arrays import dtypes, library_of
from shardmath.base.integers import slices
from shardmath.collectives import all_reduce, broadcast
from shardmath.context.context import DistributedContext
from shardmath.distributed import dense, parts
from shardmath.distributed.parts import squares
from shardmath.machine import Machine

_PASSES = 6  # four make columns orthonormal that depend on each other up to rounding
_NEAR = 0.5  # norms of S and of W^H W - I from which one pass leaves nothing but rounding
_SHIFTS = (0, 8, 800, 80_000)  # of the diagonal, times the panel's width and the type's epsilon
_LOST = 4  # what a pass may lose of W, times the same
_REFUSED, _GOES_ON, _LAST = 0.0, 1.0, 2.0  # what rank 0 finds of a pass


class CholeskyQR:
    """The factors of a matrix: this rank's rows of Q, and R, on every rank.

    The functions are those of `qr.QR`, except that there are no complete factors.
    """

    def __init__(self, context: DistributedContext, q: Any, r: Any) -> None:
        self.context = context
        self.rank = q.shape[1]
        self._q, self._r = q, r

    def r(self) -> Any:
        """R, on every rank. Collective."""
        return broadcast(self._r, context=self.context)

    def q(self) -> Any:
        """This rank's rows of Q."""
        return self._q

    def times(self, top: Any) -> Any:
        """This rank's rows of Q @ top, where every rank has `top`."""
        return self._q @ top

    def adjoint_times(self, c: Any) -> tuple[Any, Any]:
        """Q^H c on every rank, and this rank's rows of c - Q Q^H c, in place of c. Collective."""
        top = all_reduce(dense.adjoint_product(self._q, c), context=self.context)
        c -= self._q @ top
        return top, c


def orthonormalised(context: DistributedContext, a: Any, order: int) -> CholeskyQR | None:
    """The factors of a matrix of `order` rows, of which `a` is this rank's; None, on all ranks,
    where its columns depend on each other too nearly, or there are none. Collective.
    """
    count = min(order, a.shape[1])
    if not count:
        return None
    q, r = dense.copied(a[:, :count]), parts.full((count, a.shape[1]), 0, a)
    for panel in slices(count, Machine("cuda", context.hosts).rates.panel):
        found = _orthonormal(context, q, panel.start, panel.stop)
        if found is None:
            return None
        r[: panel.start, panel], r[panel, panel] = found
    if count < a.shape[1]:
        r[:, count:] = all_reduce(dense.adjoint_product(q, a[:, count:]), context=context)
    return CholeskyQR(context, q, r)


def _orthonormal(context: DistributedContext, q: Any, first: int, end: int) -> Any:
    """Make the columns of Q from `first` to `end` orthonormal, and orthogonal to those before.

    Returns R of these columns, the rows above their triangle and the triangle; None where that
    cannot be done. Collective.
    """
    before, w = q[:, :first], q[:, first:end]
    above, triangle = parts.full((first, end - first), 0, q), dense.identity(end - first, q)
    lost: Any = 0.0  # of the squares of this rank's rows, in the last pass
    size = 0.0  # the sum of all squares before that, on rank 0
    for _ in range(_PASSES):
        sums = parts.full((end + 1, end - first), 0, q)
        sums[:end] = dense.adjoint_product(q[:, :end], w)
        sums[end, 0] = lost
        sums = all_reduce(sums, context=context)
        coefficients, gram, lost = sums[:first], sums[first:end], sums[end, 0]
        is_near = _is_near(coefficients, gram) if context.rank == 0 else False
        if first:
            w -= before @ coefficients
            gram = all_reduce(dense.adjoint_product(w, w), context=context)
        sent = parts.full((end - first + 1, end - first), 0, q)
        if context.rank == 0 and _number(lost) <= (_LOST * _rounding(gram)) ** 2 * size:
            size = _number(gram.diagonal().sum())
            r = _triangle(gram)
            if r is not None:
                sent[:-1], sent[-1, 0] = r, _LAST if is_near else _GOES_ON
        sent = broadcast(sent, context=context)
        r, found = sent[:-1], _number(sent[-1, 0])
        if found == _REFUSED:
            return None
        after = dense.divided_by_triangle(w, r)
        lost = squares(w - after @ r).sum() if found == _GOES_ON else 0.0
        w[...] = after
        above += coefficients @ triangle
        triangle = r @ triangle
        if found == _LAST:
            return above, dense.upper_triangle(triangle)
    return None


def _is_near(coefficients: Any, gram: Any) -> bool:
    """Whether columns are so nearly orthonormal, and orthogonal to the others, that one pass leaves
    nothing but rounding.
    """
    off = gram - dense.identity(len(gram), gram)
    return _number(squares(coefficients).sum() + squares(off).sum()) <= _NEAR**2


def _triangle(gram: Any) -> Any:
    """R of W^H W = R^H R, or of that with a larger diagonal; None where there is none."""
    diagonal = gram.diagonal()
    on_host = parts.on_host(diagonal).real
    if not (np.isfinite(on_host).all() and on_host.min() > 0):
        return None
    more = parts.module_of(gram).diag(diagonal) * _rounding(gram)
    for shift in _SHIFTS:
        try:
            return dense.cholesky(gram + more * shift, upper=False).conj().T
        except LinAlgError:
            continue
    return None


def _rounding(gram: Any) -> float:
    """The epsilon of the type, times the width of the panel."""
    eps = np.finfo(dtypes.to_numpy(library_of(gram).spec(gram).dtype)).eps
    return len(gram) * float(eps)


def _number(x: Any) -> float:
    """The real part of an element."""
    return float(x.real)
