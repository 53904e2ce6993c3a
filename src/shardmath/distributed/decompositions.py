"""QR, singular values, eigenvalues and least squares of matrices that are split over the ranks.

QR is computed where the rows are (`qr`). The triangle R is small, every rank gets it, and its
singular values are those of the matrix, so every rank decomposes it alone (`dense`). For
eigenvalues every rank gathers the matrix. Of a stack each rank decomposes whole matrices.

    svd     A (m, n) Slab.X ── QR ──► Q Slab.X, R everywhere ── svd ──► U = Q U', S, V^H
    lstsq   A, b ── QR ──► R, Q^H b ── svd of R ──► x
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from shardmath.arrays import array_of, dtypes, library_of
from shardmath.base.collective_call import collective_call
from shardmath.collectives import all_reduce
from shardmath.context.agreement import require_equal
from shardmath.distributed import dense, parts, spectral
from shardmath.distributed.elementwise import all_distributed
from shardmath.distributed.layouts import distribution_of
from shardmath.distributed.manipulation import of_one_type
from shardmath.distributed.movement import end_explanation, part_in, rearranged
from shardmath.distributed.parts import squares as squares_of
from shardmath.distributed.products import stack_columns
from shardmath.distributed.qr import alike, factorised
from shardmath.factorisations.operands import (
    not_finite,
    require_equations,
    require_matrices,
    require_square,
    require_type,
)
from shardmath.geometry import Layout, Slab, unbound
from shardmath.local import lapack


class QRResult(NamedTuple):
    """The factors of a matrix: Q with orthonormal columns, R an upper triangle."""

    Q: Any
    R: Any


class SVDResult(NamedTuple):
    """The factors of a matrix: U and Vh with singular vectors, S with singular values."""

    U: Any
    S: Any
    Vh: Any


class EighResult(NamedTuple):
    """The eigenvalues of a Hermitian matrix, ascending, and its eigenvectors, the columns."""

    eigenvalues: Any
    eigenvectors: Any


class LstsqResult(NamedTuple):
    """A solution of least squares, as numpy.linalg.lstsq has it. The residuals are sums of squares,
    and empty unless the rank is full and there are more equations than unknowns.
    """

    x: Any
    residuals: Any
    rank: int
    singular_values: Any


# -- QR --------------------------------------------------------------------------------------------

_MODES = {
    "economic": "economic", "reduced": "economic", "complete": "complete", "full": "complete",
    "r": "r",
}  # fmt: skip


@collective_call
def qr(a: Any, mode: str = "economic") -> Any:
    """The factors Q and R of a matrix, A = Q R. Collective.

    `mode` is "economic" (or "reduced"): Q is m x k and R k x n, k = min(m, n); "complete": Q is
    m x m and R m x n; "r": R alone. The diagonal of R is real and not negative: where A has full
    rank, Q and R do not depend on the number of ranks, except for rounding. Q is split by rows as
    A is, or as Slab.X; R is on every rank.

    Raises on all ranks ValueError for elements that are not finite and for another mode,
    LinAlgError for less than two axes.
    """
    (a,) = described("qr", [a], words=(mode,), modes=_MODES)
    if a.ndim > 2:
        numpy_mode = {"economic": "reduced"}.get(_MODES[mode], _MODES[mode])
        made = of_stacks("qr", [a], lambda x: dense.qr(x, numpy_mode))
        return made[0] if len(made) == 1 else QRResult(*made)
    chosen = _MODES[mode]
    complete = chosen == "complete"
    rows, factors = factorised(a, complete=complete)
    (m, n), rank, r = a.shape, factors.rank, factors.r()
    if complete and m > rank:
        r = parts.module_of(r).concatenate([r, parts.full((m - rank, n), 0, r)])
    upper = replicated(a, r)
    if chosen == "r":
        return upper
    return QRResult(_of_rows(a, factors.q(), rows, m if complete else rank), upper)


def orthonormal(a: Any) -> Any:
    """Q of a matrix that has been checked before. Collective."""
    rows, factors = factorised(a)
    return _of_rows(a, factors.q(), rows, factors.rank)


def _of_rows(a: Any, local: Any, rows: Layout, columns: int) -> Any:
    """The array with `columns` columns, split as `a` is; `local` has this rank's `rows`."""
    column = rows.column(0)
    layout = Layout.product((rows.global_shape[0], columns), [column], size=a.context.size)
    return _of_part(a, local, layout)


# -- singular values -------------------------------------------------------------------------------


@collective_call
def svd(
    a: Any, full_matrices: bool = False, compute_uv: bool = True, hermitian: bool = False
) -> Any:
    """The singular value decomposition A = U diag(S) V^H, S descending. Collective.

    U is m x k, S has k elements and Vh is k x n, k = min(m, n); with `full_matrices` U is m x m and
    Vh n x n. Without `compute_uv` the result is S alone. The longer of U and Vh is split as A is,
    or in slabs of rows or columns. The other one and S are on every rank: each decomposes the k x k
    triangle by LAPACK's gesdd, so k must be moderate. With `hermitian` the lower triangle of A is
    decomposed as by `eigh`, and U and Vh are split as A is. Raises as `qr`, and LinAlgError where
    it does not converge.
    """
    words = bool(full_matrices), bool(compute_uv), bool(hermitian)
    fit, how = (_require_square, _by_every_rank) if hermitian else (None, None)
    (a,) = described("svd", [a], words=words, fit=fit, how=how)
    if hermitian or a.ndim > 2:
        made = _by_whole_matrices("svd", a, lambda x: dense.svd(x, *words))
        return SVDResult(*made) if compute_uv else made[0]
    if a.shape[0] < a.shape[1]:
        made = svd(a.T.conj(), full_matrices, compute_uv)
        return SVDResult(made.Vh.conj().T, made.S, made.U.conj().T) if compute_uv else made
    rows, factors = factorised(a, complete=full_matrices)
    r = factors.r()
    of_r = alike("svd", a, lambda: dense.svd(r, False, compute_uv))
    if not compute_uv:
        return replicated(a, of_r[0])
    u, s, vh = of_r
    if full_matrices:
        local = factors.q()
        local[:, : len(s)] = local[:, : len(s)] @ u
    else:
        local = factors.times(u)
    left = _of_rows(a, local, rows, local.shape[1])
    return SVDResult(left, replicated(a, s), replicated(a, vh))


def svdvals(a: Any) -> Any:
    """The singular values of a matrix, descending, on every rank. Otherwise as `svd`."""
    return svd(a, compute_uv=False)


# -- least squares ---------------------------------------------------------------------------------


@collective_call
def lstsq(a: Any, b: Any, rcond: float | None = None) -> LstsqResult:
    """The x of least norm among those that minimise ||b - A x||, for each column of b. Collective.

    By QR and the singular values of R; those up to `rcond` times the largest count as 0. The
    default of `rcond` is max(m, n) times the type's epsilon. x is on every rank if m >= n, and
    otherwise split by rows as the columns of A are. One of A and b may be an array that is the same
    on all ranks. Raises as `svd`, and LinAlgError where the shapes do not fit.
    """

    def fit(*shapes: tuple[int, ...]) -> None:
        require_equations(*shapes)
        if not (rcond is None or isinstance(rcond, Real)):
            raise TypeError(f"rcond is a number or None, not {rcond!r}")

    a, b = described("lstsq", all_distributed((a, b)), words=(rcond,), fit=fit)
    kind = native_type(a)
    vector = b.ndim == 1
    if vector:
        b = b[:, None]
    (m, n), count = a.shape, b.shape[1]
    least = np.finfo(kind).eps * max(m, n) if rcond is None else rcond
    wide = m < n
    rows, factors = factorised(a.T.conj() if wide else a)
    r = factors.r()
    u, s, vh = alike("lstsq", a, lambda: dense.svd(r.conj().T if wide else r, False, True))
    kept = s > least * (s[0] if len(s) else 0)
    inverse = kept / (s + ~kept)
    squares = s[:0]
    if wide:
        right = _gathered(b)
        unknowns = vh.conj().T @ (inverse[:, None] * (u.conj().T @ right))
        x = _of_rows(a, factors.times(unknowns), rows, count)
    else:
        held = Layout.product(b.shape, [rows.column(0)], size=a.context.size)
        top, below = factors.adjoint_times(dense.copied(part_in(b, held)))
        x = replicated(a, vh.conj().T @ (inverse[:, None] * (u.conj().T @ top)))
        if kept.all() and m > n:
            squares = all_reduce(squares_of(below).sum(axis=0), context=a.context)
    x = x[:, 0] if vector else x
    return LstsqResult(x, replicated(a, squares), int(kept.sum()), replicated(a, s))


# -- eigenvalues -----------------------------------------------------------------------------------


@collective_call
def eigh(a: Any, UPLO: str = "L") -> EighResult:
    """The eigenvalues of a Hermitian matrix, ascending, and its eigenvectors. Collective.

    Only the triangle `UPLO`, "L" or "U", is read. Every rank gathers the matrix and decomposes it
    by LAPACK's heevd; the ranks share the work where that is predicted to be faster, or where one
    rank has no memory for it (`spectral`; `explain` says which). Eigenvalues are on every rank,
    eigenvectors are split as A is. Raises as `qr`, and LinAlgError where A is not square, or it
    does not converge.
    """
    values, vectors = _eigen("eigh", a, UPLO)
    return EighResult(values, vectors)


@collective_call
def eigvalsh(a: Any, UPLO: str = "L") -> Any:
    """The eigenvalues of a Hermitian matrix, ascending, on every rank. Otherwise as `eigh`."""
    return _eigen("eigvalsh", a, UPLO)[0]


def _eigen(name: str, a: Any, triangle: str) -> Sequence[Any]:
    (a,) = described(
        name, [a], words=(triangle,), modes=("L", "U"), fit=_require_square, how=_of_eigenvalues
    )
    vectors = name == "eigh"
    if a.ndim == 2 and spectral.prediction(a).shares:
        return spectral.eigh(a, triangle, vectors=vectors)
    return _by_whole_matrices(name, a, lambda x: dense.eigh(x, triangle, vectors=vectors))


def _by_every_rank(a: Any) -> str:
    """How a matrix that every rank gathers is decomposed."""
    return "all of it to every rank, which decomposes it alone"


def _of_eigenvalues(a: Any) -> str:
    """How the eigenvalues of a matrix are computed."""
    return str(spectral.prediction(a))


def _by_whole_matrices(
    name: str, a: Any, compute: Callable[[Any], tuple[Any, ...]]
) -> Sequence[Any]:
    """What every rank computes from a square matrix that it gathers: matrices are split as `a` is,
    vectors are on every rank. Of stacks each rank computes its own.
    """
    if a.ndim > 2:
        return of_stacks(name, [a], compute)
    whole = _gathered(a)
    made = [replicated(a, x) for x in alike(name, a, lambda: compute(whole))]
    return [a.with_part(part_in(x, a.layout)) if x.ndim > 1 else x for x in made]


# -- what all have in common -----------------------------------------------------------------------


def native_type(a: Any) -> np.dtype[Any]:
    """The NumPy type of an array's elements."""
    return dtypes.to_numpy(a.element_type)


def described(
    name: str,
    given: Sequence[Any],
    *,
    words: tuple[Any, ...] = (),
    modes: Any = None,
    fit: Callable[..., None] | None = None,
    how: Callable[[Any], str] | None = None,
) -> list[Any]:
    """The arrays of a call in one type that LAPACK has, after all ranks have agreed on the call.
    Collective.

    Raises on all ranks what one rank finds wrong with its arrays: see `qr`. `fit` raises what is
    wrong with the shapes. `how` explains what is done with the first array, if it is no stack.
    """
    first = given[0]
    arrays = of_one_type(given, inexact=True)
    end_explanation(lambda: f"{name} of {first.layout}: {_explained(arrays[0], how)}")

    def describe() -> Any:
        if modes is not None and words[0] not in modes:
            raise ValueError(f"{name} takes one of {', '.join(modes)}, not {words[0]!r}")
        require_matrices("a", first.shape)
        if fit is not None:
            fit(*(x.shape for x in given))
        for letter, x in zip("ab", arrays, strict=False):
            require_type(name, letter, x.element_type.name)
            part = dense.workable(x.local)
            if dense.is_on_cores(part):
                lapack.require()
            if not dense.is_finite(part):
                raise not_finite(letter)
        types, shapes = [x.element_type.name for x in given], [x.shape for x in given]
        return words, types, shapes, [x.library.spec(x.local).space for x in given]

    def check(specs: list[Any]) -> None:
        for what, values in zip(
            ("arguments", "dtype", "shape", "memory"), zip(*specs, strict=True), strict=True
        ):
            require_equal(f"the {what} of {name}", values)

    first.context.agree(name, describe, check)
    return arrays


def _explained(a: Any, how: Callable[[Any], str] | None) -> str:
    """What is done with a matrix, or a stack."""
    if a.ndim > 2:
        return "whole matrices to each rank, whose library decomposes them"
    if how is not None:
        return how(a)
    is_on_cores = dense.is_on_cores(dense.workable(a.local))
    by = "reflectors, in a tree over the ranks" if is_on_cores else "products and Cholesky"
    return f"rows to their ranks; QR by {by}"


def _require_square(*shapes: tuple[int, ...]) -> None:
    require_square("a", shapes[0])


def of_square_stacks(
    name: str, arrays: Sequence[Any], function: Callable[..., Any] | None = None
) -> Any:
    """The result of a function of stacks of square matrices, or a list of its results. Without
    `function` it is numpy.linalg's of that name. Collective.

    Raises LinAlgError on all ranks where one of them does, or where the matrices are not square.
    """
    function = function or partial(dense.called, name)

    def compute(*stacks: Any) -> tuple[Any, ...]:
        made = function(*stacks)
        return made if isinstance(made, tuple) else (made,)

    results = of_stacks(name, described(name, arrays, fit=_require_square), compute)
    return results if len(results) > 1 else results[0]


def of_stacks(
    name: str,
    arrays: Sequence[Any],
    compute: Callable[..., tuple[Any, ...]],
) -> list[Any]:
    """The results of a function of stacks of matrices, of `dense`. Collective.

    The arrays have the same stack. Each rank gets whole matrices: as the first array is split, if
    that splits no matrix, else along the longest axis of the stack.
    """
    first, size = arrays[0], arrays[0].context.size
    count = first.ndim - 2
    stack = first.shape[:count]
    columns = stack_columns((first,), stack)
    stacks = []
    for x in arrays:
        layout = Layout.product(x.shape, columns, size=size)
        stacks.append(dense.workable(part_in(x, layout)))
    results = []
    for made in first.context.on_all_ranks(name, lambda: compute(*stacks)):
        shape = (*stack, *made.shape[count:])
        results.append(_of_part(first, made, Layout.product(shape, columns, size=size)))
    return results


def _of_part(a: Any, made: Any, layout: Layout) -> Any:
    """The array whose part is `made` on this rank; in slabs of rows where no distribution fits."""
    made = array_of(made)
    local = parts.converted(library_of(made).contiguous(made), a.local)
    like = unbound(a.distribution) if a.ndim == layout.ndim else None
    distribution = distribution_of(layout, a.context.rank, like)
    if distribution is not None:
        return a.like(local, distribution, layout)
    slab = Layout.slab(layout.global_shape, layout.size, axis=0)
    return a.like(rearranged(a.like(local, Slab(0), layout), slab), Slab(0), slab)


def _gathered(x: Any) -> Any:
    """All elements on every rank, as an array to decompose."""
    return dense.workable(part_in(x, Layout.replicated(x.shape, x.context.size)))


def replicated(a: Any, whole: Any) -> Any:
    """The array that every rank has in `whole`, an array or a number."""
    return a.everywhere(parts.converted(array_of(whole), a.local))
