"""Norms, and small functions of matrices: the array API standard's `linalg` without factorisations.

Sums over elements are reductions of each rank's part; norms by singular values use `svd`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
from numpy.linalg import LinAlgError

from shardmath.base.collective_call import collective_call
from shardmath.distributed import decompositions, dense, elementwise, parts, reductions
from shardmath.distributed.decompositions import native_type
from shardmath.distributed.manipulation import (
    broadcast_to,
    expand_dims,
    in_matrices,
    matrix_transpose,
    moveaxis,
    of_one_type,
    one_axis,
)
from shardmath.distributed.movement import whole_everywhere
from shardmath.distributed.products import matmul
from shardmath.distributed.searching import whole_along
from shardmath.distributed.state import Distributed
from shardmath.distributed.systems import inv
from shardmath.factorisations.operands import require_matrices, require_square

Axis = int | Sequence[int] | None

# -- norms -----------------------------------------------------------------------------------------


@collective_call
def norm(x: Any, ord: Any = None, axis: Axis = None, keepdims: bool = False) -> Any:
    """A norm of vectors or matrices, as numpy.linalg.norm. Collective where the axes are split.

    Without `ord` it is the 2-norm of all elements along `axis`, by default of the whole array.
    Along one axis `ord` is any number, inf or -inf; along two it is "fro", "nuc", 1, -1, 2, -2, inf
    or -inf, of which "nuc", 2 and -2 use singular values. Raises ValueError for another `ord`, or
    for an `ord` with more axes.
    """
    if axis is None:
        if ord is None or (ord in ("f", "fro") and x.ndim == 2) or (ord == 2 and x.ndim == 1):
            return vector_norm(x, axis=None, keepdims=keepdims)
        if x.ndim not in (1, 2):
            raise ValueError(
                f"ord {ord!r} is of vectors and matrices, and x has {x.ndim} axes: pass axis="
            )
        axis = tuple(range(x.ndim))
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    if len(axes) == 1:
        return vector_norm(x, axis=axes, keepdims=keepdims, ord=2 if ord is None else ord)
    if len(axes) != 2:
        raise ValueError(f"norm is along one axis or two, not {len(axes)}")
    rows, columns = (one_axis(one, x.ndim) for one in axes)
    if rows == columns:
        raise ValueError(f"axes {axis!r} name an axis twice")
    if ord is None or ord in ("f", "fro"):
        return vector_norm(x, axis=(rows, columns), keepdims=keepdims)
    made = matrix_norm(moveaxis(x, (rows, columns), (-2, -1)), ord=ord)
    return expand_dims(made, sorted((rows, columns))) if keepdims else made


@collective_call
def vector_norm(
    x: Any,
    *,
    axis: Axis = None,
    keepdims: bool = False,
    ord: float = 2,
) -> Any:
    """The norm of the elements along axes, by default all, as numpy.linalg.vector_norm.

    `ord` is any number, inf or -inf. Collective where the axes are split. Raises ValueError for
    another `ord`.
    """
    if not isinstance(ord, Real):
        raise ValueError(f"the ord of a vector norm is a number, not {ord!r}")
    (x,) = of_one_type([x], inexact=True)
    if ord == 2:
        return np.sqrt(reductions.sum_of_squares(x, axis, keepdims))
    size = abs(x)
    if ord == np.inf:
        return _greatest(size, axis, keepdims)
    if ord == -np.inf:
        return reductions.min(size, axis, keepdims)
    if ord == 0:
        return reductions.sum((x != 0).astype(size.element_type), axis, None, keepdims)
    if ord == 1:
        return reductions.sum(size, axis, None, keepdims)
    return reductions.sum(size**ord, axis, None, keepdims) ** (1 / ord)


@collective_call
def matrix_norm(x: Any, *, keepdims: bool = False, ord: Any = "fro") -> Any:
    """The norm of the matrices of the last two axes, as numpy.linalg.matrix_norm; see `norm`."""
    require_matrices("x", x.shape)
    if ord in ("fro", "f", None):
        return vector_norm(x, axis=(-2, -1), keepdims=keepdims)
    if ord not in ("nuc", 1, -1, 2, -2, np.inf, -np.inf):
        raise ValueError(
            f"the ord of a matrix norm is 'fro', 'nuc', 1, -1, 2, -2, inf or -inf, not {ord!r}"
        )
    rows, columns = x.shape[-2:]
    if {-1: columns, -2: min(rows, columns), -np.inf: rows}.get(ord) == 0:  # before ranks exchange
        raise ValueError(
            f"the norm of ord {ord} is the least of no elements: x is {rows} x {columns}"
        )
    if ord in (2, -2, "nuc"):
        values = decompositions.svdvals(x)
        norms: dict[Any, Any] = {2: _greatest, -2: reductions.min, "nuc": reductions.sum}
        made = norms[ord](values, axis=-1)
        return expand_dims(made, (-2, -1)) if keepdims else made
    axis = -2 if ord in (1, -1) else -1  # sums of columns, of rows
    (x,) = of_one_type([x], inexact=True)
    sums = reductions.sum(abs(x), axis, None, True)
    reduce = _greatest if ord > 0 else reductions.min
    return reduce(sums, (-2, -1), keepdims)


def _greatest(sizes: Any, axis: Axis, keepdims: bool = False) -> Any:
    """The greatest of numbers that are not negative along axes; 0 where there are none, as in
    numpy.linalg.
    """
    return (reductions.max if sizes.size else reductions.sum)(sizes, axis, keepdims=keepdims)


@collective_call
def cond(x: Any, p: Any = None) -> Any:
    """The condition number of matrices, as numpy.linalg.cond: for p None, 2 or -2 the ratio of
    singular values, else norm(x, p) * norm(inv(x), p); inf for a singular matrix. Collective.

    Raises LinAlgError for empty matrices, and for those that are not square where norms are used.
    """
    require_matrices("x", x.shape)
    if 0 in x.shape[-2:]:
        raise LinAlgError(f"cond is not defined for empty matrices: x has shape {x.shape}")
    if p not in (None, 2, -2):
        require_square("x", x.shape)
        if x.ndim > 2:
            by_norm = partial(dense.called, "cond", p=p)
            return decompositions.of_square_stacks("cond", [x], by_norm)
        size = norm(x, p)
        try:
            return size * norm(inv(x), p)
        except LinAlgError:  # on all ranks
            return size * 0 + np.inf
    values = decompositions.svdvals(x)
    first, last = values[..., 0], values[..., -1]
    top, bottom = (last, first) if p == -2 else (first, last)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = top / bottom
    return elementwise.where(np.isnan(ratio), np.inf, ratio)


@collective_call
def matrix_rank(x: Any, *, rtol: Any = None) -> Any:
    """The number of singular values above `rtol` times the largest, as numpy.linalg.matrix_rank.

    The default of `rtol` is max(m, n) times the type's epsilon; an array has one for each matrix of
    a stack. Collective; otherwise as `svdvals`.
    """
    relative = _relative(x, rtol)
    values = decompositions.svdvals(x)
    if not values.shape[-1]:
        return reductions.sum(values != 0, -1)
    limit = reductions.max(values, -1, True) * relative
    return reductions.sum(values > limit, -1)


@collective_call
def pinv(x: Any, *, rtol: Any = None) -> Any:
    """The pseudo-inverse, as numpy.linalg.pinv. Singular values not above `rtol` times the largest
    count as 0; `rtol` is as for `matrix_rank`. Collective; otherwise as `svd`.
    """
    relative = _relative(x, rtol)
    u, s, vh = decompositions.svd(x)
    if s.shape[-1]:
        limit = reductions.max(s, -1, True) * relative
        kept = s > limit
        inverse = elementwise.where(kept, 1 / elementwise.where(kept, s, 1), 0 * s)
        vh = vh * expand_dims(inverse.astype(vh.element_type), -1)
    made: Any = matmul(matrix_transpose(vh.conj()), matrix_transpose(u.conj()))
    return made


def _relative(x: Any, rtol: Any) -> Any:
    """The factor of the largest singular value below which others count as 0, with an axis for the
    values of each matrix where it is an array.

    Raises LinAlgError where `x` is no matrix or stack, TypeError where `rtol` is no real number or
    array, ValueError where that does not broadcast to the stack.
    """
    require_matrices("x", x.shape)
    if rtol is None:
        (inexact,) = of_one_type([x], inexact=True)
        return float(np.finfo(native_type(inexact)).eps * max(x.shape[-2:]))
    factor = rtol if isinstance(rtol, Distributed) else np.asarray(rtol)
    kind = factor.element_type.kind if isinstance(factor, Distributed) else factor.dtype.kind
    if kind not in "biuf":
        raise TypeError(f"rtol is a number, or an array of one for each matrix, not {rtol!r}")
    if not elementwise.broadcasts(factor.shape, x.shape[:-2]):
        raise ValueError(f"rtol has shape {factor.shape}, the stack of matrices {x.shape[:-2]}")
    if not factor.ndim:
        return rtol
    return expand_dims(factor, -1) if isinstance(factor, Distributed) else factor[..., None]


# -- diagonals -------------------------------------------------------------------------------------


@collective_call
def diagonal(x: Any, /, *, offset: int = 0) -> Any:
    """The diagonals of the matrices of the last two axes, as numpy.linalg.diagonal. Collective
    where columns are split; the diagonals are then on every rank.
    """
    require_matrices("x", x.shape)
    k = operator.index(offset)
    rows, columns = x.shape[-2:]
    first = max(0, -k)
    count = max(0, min(rows - first, columns - max(0, k)))
    along_rows = _along_diagonal(x, k, -1)
    return along_rows[..., first : first + count]


@collective_call
def trace(x: Any, /, *, offset: int = 0, dtype: Any = None) -> Any:
    """The sums of diagonals, as numpy.linalg.trace. Collective where the matrices are split."""
    require_matrices("x", x.shape)
    return _along_diagonal(x, operator.index(offset), (-2, -1), dtype, narrow=False)


def _along_diagonal(
    x: Any, offset: int, axis: Axis, dtype: Any = None, *, narrow: bool = True
) -> Any:
    """The sum along axes of the elements on a diagonal, with `narrow` in their own type."""
    only = parts.chosen(
        in_matrices(x, lambda i, j: j - i == offset), x.local, parts.full((), 0, x.local)
    )
    made = reductions.sum(x.with_part(only), axis, dtype)
    return made.astype(x.element_type) if narrow and x.element_type.kind in "biu" else made


# -- products --------------------------------------------------------------------------------------


@collective_call
def outer(x1: Any, x2: Any, /) -> Any:
    """The products of all pairs of elements of two vectors, as numpy.linalg.outer, split by rows as
    x1 is. Collective. Raises ValueError for arrays that are no vectors.
    """
    x1, x2 = elementwise.all_distributed((x1, x2))
    if x1.ndim != 1 or x2.ndim != 1:
        raise ValueError(f"outer takes vectors, not arrays of {x1.ndim} and {x2.ndim} axes")
    column = expand_dims(x1, 1)
    return broadcast_to(column, (x1.shape[0], x2.shape[0])) * expand_dims(x2, 0)


@collective_call
def cross(x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
    """The cross products of vectors of three elements along an axis, as numpy.linalg.cross.

    Collective where the axis is split: both arrays are brought to parts that have it whole. Raises
    ValueError where its extent is not 3, and where the arrays do not broadcast; TypeError for bool.
    """
    pair = elementwise.all_distributed((x1, x2))
    for x in pair:
        if not x.ndim or x.shape[one_axis(axis, x.ndim)] != 3:
            raise ValueError(
                f"cross takes arrays of 3 elements along axis {axis}, not of shape {x.shape}"
            )
        if x.element_type.kind == "b":
            raise TypeError("cross of bool, which has no differences: take it of x.astype(int)")
    ndim = max(x.ndim for x in pair)
    if pair[0].ndim != pair[1].ndim:  # give the axis one number in both
        ends = [moveaxis(x, axis, -1) for x in pair]
        made = cross(*(x[(None,) * (ndim - x.ndim) + (...,)] for x in ends))
        return moveaxis(made, -1, axis)
    elementwise.broadcast_shape(pair)  # raises before anything moves
    number = one_axis(axis, ndim)
    together = of_one_type([_in_whole(x, number) for x in pair])
    return elementwise.applied(lambda x, y: parts.crossed(x, y, number), together)


def _in_whole(x: Any, axis: int) -> Any:
    """The array with an axis whole on every rank."""
    if x.ndim > 1 or not x.layout.partitioned_axes:
        return whole_along(x, axis)
    return whole_everywhere(x, "a vector")


@collective_call
def matrix_power(x: Any, n: int, /) -> Any:
    """The matrix, or each of a stack, to the power `n`, as numpy.linalg.matrix_power.

    By repeated squaring, of the inverse if `n` is negative. Collective. Raises LinAlgError where
    the matrix is not square, or singular.
    """
    count = operator.index(n)
    require_matrices("x", x.shape)
    require_square("x", x.shape)
    if count < 0:
        x, count = inv(x), -count
    if not count:
        made = elementwise.zeros_like(x)
        made.local[...] = in_matrices(x, lambda i, j: i == j)
        return made
    power, square = None, x
    while True:
        if count & 1:
            power = square if power is None else matmul(power, square)
        count >>= 1
        if not count:
            return power.copy() if power is x else power
        square = matmul(square, square)
