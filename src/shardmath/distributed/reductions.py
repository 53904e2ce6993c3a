"""Reductions: each rank reduces its part, and all_reduce combines these where reduced axes are
split.

A reduction along axes that every rank has whole exchanges nothing, and keeps the distribution of
the other axes. Otherwise the result is on every rank (`Replicated`).

    x (n, m) Slab.X    sum(axis=1)   (n,) Slab.X, no exchange
                       sum(axis=0)   (m,) Replicated, all_reduce of m elements
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from shardmath.arrays import DType, array_of, dtypes
from shardmath.base import current
from shardmath.call.agreement import raise_on_all_ranks
from shardmath.collectives import all_reduce
from shardmath.distributed import parts
from shardmath.distributed.elementwise import needed_layout
from shardmath.distributed.layouts import indices, layout_of, of_axes, placed_part, selector
from shardmath.distributed.movement import brought, explanation, in_place_of
from shardmath.distributed.state import Distributed
from shardmath.geometry import Layout, Replicated

Axis = int | Sequence[int] | None
_EVERYWHERE = Replicated()
_NOWHERE = np.iinfo(np.int64).max  # greater than any index
# What array libraries call the reductions, and all_reduce: of bool a sum is "or", a product "and".
_OPS = {
    "sum": "sum", "prod": "product", "min": "min", "max": "max", "any": "sum", "all": "product",
}  # fmt: skip


def sum(x: Distributed, axis: Axis = None, dtype: Any = None, keepdims: bool = False) -> Any:
    """The sum of elements, as numpy.sum. Collective where `axis` is split."""
    return _reduced(x, "sum", axis, dtype, keepdims)


def prod(x: Distributed, axis: Axis = None, dtype: Any = None, keepdims: bool = False) -> Any:
    """The product of elements, as numpy.prod. Collective where `axis` is split."""
    return _reduced(x, "prod", axis, dtype, keepdims)


def min(x: Distributed, axis: Axis = None, keepdims: bool = False) -> Any:
    """The least element; NaN where there is one. Collective where `axis` is split.

    Raises ValueError where there are no elements, TypeError for complex ones.
    """
    return _reduced(x, "min", axis, None, keepdims)


def max(x: Distributed, axis: Axis = None, keepdims: bool = False) -> Any:
    """The greatest element; otherwise as `min`."""
    return _reduced(x, "max", axis, None, keepdims)


def any(x: Distributed, axis: Axis = None, keepdims: bool = False) -> Any:
    """Whether some element is not 0. Collective where `axis` is split."""
    return _reduced(x, "any", axis, None, keepdims)


def all(x: Distributed, axis: Axis = None, keepdims: bool = False) -> Any:
    """Whether no element is 0. Collective where `axis` is split."""
    return _reduced(x, "all", axis, None, keepdims)


def isclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Any:
    """Where |a - b| <= atol + rtol |b|, or both are the same infinity, as numpy.isclose."""
    # In floating type: differences of integers may not fit theirs, and bool have none.
    b = (np.asarray(b) if isinstance(b, list | tuple) else b) + 0.0
    with np.errstate(invalid="ignore"):  # the difference of infinities
        near = (abs(a - b) <= atol + rtol * abs(b)) & np.isfinite(b)
        same = near | (a == b)
        return same | (np.isnan(a) & np.isnan(b)) if equal_nan else same


def allclose(
    a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    """Whether all elements are close, on every rank, as numpy.allclose. Collective."""
    return bool(all(isclose(a, b, rtol, atol, equal_nan)))


def array_equal(a1: Any, a2: Any, equal_nan: bool = False) -> bool:
    """Whether shapes and elements are equal, on every rank, as numpy.array_equal. Collective."""
    if np.shape(a1) != np.shape(a2):
        return False
    same = a1 == a2
    return bool(all(same | (np.isnan(a1) & np.isnan(a2)) if equal_nan else same))


def mean(x: Distributed, axis: Axis = None, dtype: Any = None, keepdims: bool = False) -> Any:
    """The arithmetic mean, as numpy.mean. Collective where `axis` is split."""
    axes = checked_axes(x, axis)
    result = dtypes.inexact(x.element_type) if dtype is None else dtypes.of(dtype)
    total = _reduced(x, "sum", axes, dtypes.accumulator(result), keepdims)
    return _divided(total, _count(x, axes), result)


def var(
    x: Distributed,
    axis: Axis = None,
    dtype: Any = None,
    keepdims: bool = False,
    *,
    correction: float = 0,
) -> Any:
    """The variance: the sum of squared deviations over the number of elements less `correction`.

    As numpy.var. Collective where `axis` is split, twice: for the mean, and for the squares.
    """
    axes = checked_axes(x, axis)
    result = dtypes.inexact(x.element_type if dtype is None else dtype)
    wide = dtypes.accumulator(result)
    middle = mean(x, axes, wide, keepdims=True)
    needed = needed_layout(x.layout, middle.shape)
    part = parts.cast(x.local, wide) - brought(middle, needed, "the mean")
    total = _reduced(x.with_part(parts.squares(part)), "sum", axes, None, keepdims)
    real = dtypes.of(result.real) if result.kind == "c" else result
    return _divided(total, builtins.max(_count(x, axes) - correction, 0), real)


def sum_of_squares(x: Distributed, axis: Axis = None, keepdims: bool = False) -> Any:
    """The sum of the squared absolute values of elements. Collective where `axis` is split."""
    axes = checked_axes(x, axis)
    return _together(x, array_of(parts.sum_of_squares(x.local, axes)), "sum", axes, keepdims)


def std(
    x: Distributed,
    axis: Axis = None,
    dtype: Any = None,
    keepdims: bool = False,
    *,
    correction: float = 0,
) -> Any:
    """The standard deviation: the root of `var`."""
    squared = var(x, axis, dtype, keepdims, correction=correction)
    return squared.with_part(squared.local**0.5)


def argmin(x: Distributed, axis: int | None = None, keepdims: bool = False) -> Any:
    """The first index of the least element along `axis`, or of all in C order; NaN is the least.

    Collective where `axis` is split. Raises ValueError where there are no elements.
    """
    return _first_index(x, "min", axis, keepdims)


def argmax(x: Distributed, axis: int | None = None, keepdims: bool = False) -> Any:
    """The first index of the greatest element; otherwise as `argmin`."""
    return _first_index(x, "max", axis, keepdims)


# -- axes ------------------------------------------------------------------------------------------


def checked_axes(x: Distributed, axis: Axis) -> tuple[int, ...]:
    """`axis` as the numbers of axes, ascending. Where the array is split, all ranks raise what is
    wrong with one rank's `axis`, even those that already wait in the reduction.
    """
    try:
        return axes_of(axis, x.ndim)
    except (TypeError, ValueError) as mistake:
        if x.layout.is_replicated:
            raise
        raise_on_all_ranks(x.context, "all_reduce", mistake)


def axes_of(axis: Axis, ndim: int) -> tuple[int, ...]:
    """`axis` as the numbers of axes, ascending; None means all.

    Raises ValueError for an axis out of range, or one that is named twice, TypeError for other
    objects.
    """
    return _axes_of(tuple(axis) if isinstance(axis, list) else axis, ndim)


@lru_cache(maxsize=1024)
def _axes_of(axis: Any, ndim: int) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(ndim))
    given = axis if isinstance(axis, tuple) else (axis,)
    axes = [operator.index(one) for one in given]
    for one in axes:
        if not -ndim <= one < ndim:
            raise ValueError(f"axis {one} is out of range for an array of {ndim} axes")
    numbers = sorted(one % ndim for one in axes)
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"axis {axis!r} names an axis twice")
    return tuple(numbers)


def _count(x: Distributed, axes: Sequence[int]) -> int:
    return math.prod(x.shape[axis] for axis in axes)


# -- one reduction ---------------------------------------------------------------------------------


def _reduced(x: Distributed, name: str, axis: Axis, dtype: Any, keepdims: bool) -> Distributed:
    """The reduction of that name."""
    axes = (axis,) if type(axis) is int and 0 <= axis < x.ndim else checked_axes(x, axis)
    if name in ("min", "max"):
        require_ordered(x, name)
        _require_elements(x, axes, name)
    return _together(x, _partial(x, name, axes, dtype), name, axes, keepdims)


def _together(
    x: Distributed, part: Any, name: str, axes: tuple[int, ...], keepdims: bool
) -> Distributed:
    """The result of all ranks' partial results, combined where the axes are split."""
    kept, everywhere = _kept(x.layout, axes)
    made = None
    if everywhere is None and set(axes).isdisjoint(x.layout.partitioned_axes):
        made = of_axes(x, part, kept)
    if made is None:
        if everywhere is None:
            part, everywhere = _spread(x, part, name, kept)
        made = x.like(_of_all_ranks(x, part, name, everywhere), _EVERYWHERE, everywhere)
    if not keepdims:
        return made
    number = {axis: place for place, axis in enumerate(kept)}
    wide = tuple(number.get(axis) for axis in range(x.ndim))
    local = made.local[tuple(None if axis is None else slice(None) for axis in wide)]
    result = of_axes(made, array_of(local), wide)
    assert result is not None, "new axes leave a distribution what it is"
    return result


def _of_all_ranks(x: Distributed, part: Any, name: str, layout: Layout) -> Any:
    """`all_reduce`, by the call that is recognised soonest when it is repeated; zeros where a call
    is only explained.
    """
    op = _OPS[name]
    if explanation.get() is not None:
        spec = x.library.spec(part)
        words = f"all_reduce of {layout.elements * spec.itemsize} bytes"
        return in_place_of(lambda: words, x, layout, spec.dtype)
    if op == "sum" and current.get() is x.context:
        return all_reduce(part)
    return all_reduce(part, op=op, context=x.context)


def _spread(x: Distributed, part: Any, name: str, kept: Sequence[int]) -> tuple[Any, Layout]:
    """This rank's partial result, which has some indices of the axes `kept`, within an array that
    has all of them and the reduction's identity elsewhere; and the layout of that array on every
    rank.
    """
    everywhere = layout_of(_EVERYWHERE, tuple(x.shape[axis] for axis in kept), x.context.size)
    whole = parts.full(everywhere.global_shape, _identity(name, x.library.spec(part).dtype), part)
    if math.prod(x.local.shape):
        spans = x.layout.spans(x.context.rank)
        whole[selector([placed_part(spans[axis]) for axis in kept])] = part
    return whole, everywhere


@lru_cache(maxsize=1024)
def _kept(layout: Layout, axes: tuple[int, ...]) -> tuple[tuple[int, ...], Layout | None]:
    """The axes that remain, and their layout if every rank has a partial result for all of them."""
    kept = tuple(axis for axis in range(layout.ndim) if axis not in axes)
    if not layout.partitioned_axes or set(kept).intersection(layout.partitioned_axes):
        return kept, None
    shape = tuple(layout.global_shape[axis] for axis in kept)
    return kept, layout_of(_EVERYWHERE, shape, layout.size)


def _partial(x: Distributed, name: str, axes: tuple[int, ...], dtype: Any) -> Any:
    """This rank's part, reduced along `axes`."""
    part = x.local
    if name in ("min", "max") and not math.prod(part.shape):
        shape = [n for axis, n in enumerate(part.shape) if axis not in axes]
        return parts.full(shape, _identity(name, x.element_type.name), part)
    return array_of(parts.reduced(part, name, axes, dtype))


def _identity(name: str, dtype: str) -> Any:
    """The element that changes nothing when it is combined with others."""
    if name in ("sum", "any", "prod", "all"):
        return int(name in ("prod", "all"))
    kind = dtypes.of(dtype).kind
    if kind == "b":
        return name == "min"
    if kind in "iu":
        limits = np.iinfo(dtypes.to_numpy(dtype))
        return limits.max if name == "min" else limits.min
    return math.inf if name == "min" else -math.inf


def require_ordered(x: Distributed, name: str) -> None:
    """Raise TypeError for complex numbers."""
    if x.element_type.kind == "c":
        raise TypeError(
            f"{name} of {x.element_type}: complex numbers have no order; take it of abs(x)"
        )


def _require_elements(x: Distributed, axes: Sequence[int], name: str) -> None:
    if not _count(x, axes):
        raise ValueError(f"{name} of no elements: the array has shape {x.shape}")


def _divided(total: Distributed, count: float, dtype: DType) -> Distributed:
    """Sums divided by the count in their own type, and converted to `dtype`; NaN or infinity for a
    count of 0.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        local = array_of(total.local / count)
        return total.with_part(parts.cast(local, dtype))


# -- indices ---------------------------------------------------------------------------------------


def _first_index(x: Distributed, name: str, axis: int | None, keepdims: bool) -> Distributed:
    """The least index at which the best element of all ranks is found."""
    axes = checked_axes(x, axis)
    require_ordered(x, f"arg{name}")
    _require_elements(x, axes, f"arg{name}")
    best = _reduced(x, name, axes, None, True)
    wanted = brought(best, needed_layout(x.layout, best.shape), "the best element")
    same = x.local == wanted
    if x.element_type.kind == "f":
        isnan = parts.module_of(wanted).isnan
        same = same | (isnan(x.local) & isnan(wanted))
    held = x.with_part(parts.chosen(same, _numbered(x, axes), _NOWHERE))
    return _together(held, _partial(held, "min", axes, None), "min", axes, keepdims)


def _numbered(x: Distributed, axes: Sequence[int]) -> Any:
    """The global index of each element, counted in C order along `axes`; broadcasts to the part."""
    numbers: np.ndarray[Any, Any] = np.zeros((1,) * x.ndim, np.int64)
    for axis, spans in enumerate(x.layout.spans(x.context.rank)):
        if axis in axes:
            shape = [-1 if other == axis else 1 for other in range(x.ndim)]
            numbers = numbers * x.shape[axis] + indices(spans).reshape(shape)
    return parts.converted(numbers, x.local)
