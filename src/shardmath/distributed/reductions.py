"""Reductions: each rank reduces its part, and where the reduced axes are split, all_reduce does the
rest.

What remains of axes that no rank has whole is on every rank (`Replicated`); a reduction along axes
that every rank has whole keeps the distribution of the other axes, and exchanges nothing.

    x (n, m) Slab.X    sum(axis=1)   (n,) Slab.X, no exchange
                       sum(axis=0)   (m,) Replicated, all_reduce of m elements
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from shardmath.arrays import DType, array_of, dtypes
from shardmath.base import current
from shardmath.call.agreement import raise_on_all_ranks
from shardmath.collectives import all_reduce
from shardmath.distributed import parts
from shardmath.distributed.elementwise import needed_layout
from shardmath.distributed.layouts import (
    indices,
    layout_of,
    placed_part,
    rearranged,
    selector,
)
from shardmath.distributed.movement import brought, explanation, in_place_of
from shardmath.distributed.state import Distributed
from shardmath.geometry import Layout, Replicated

Axis = int | Sequence[int] | None
_EVERYWHERE = Replicated()
_NOWHERE = np.iinfo(np.int64).max  # an index behind every other


class Reduction(NamedTuple):
    """A reduction by the name that array libraries have for it, and by all_reduce's."""

    name: str
    op: str


SUM, PROD = Reduction("sum", "sum"), Reduction("prod", "product")
MIN, MAX = Reduction("min", "min"), Reduction("max", "max")
ANY, ALL = Reduction("any", "sum"), Reduction("all", "product")  # of bool: "or" and "and"


def sum(x: Distributed, axis: Axis = None, dtype: Any = None, keepdims: bool = False) -> Any:
    """The sum of elements, as numpy.sum. Collective where `axis` is split."""
    return _reduced(x, SUM, axis, dtype, keepdims)


def prod(x: Distributed, axis: Axis = None, dtype: Any = None, keepdims: bool = False) -> Any:
    """The product of elements, as numpy.prod. Collective where `axis` is split."""
    return _reduced(x, PROD, axis, dtype, keepdims)


def min(x: Distributed, axis: Axis = None, keepdims: bool = False) -> Any:
    """The least element; NaN where there is one. Collective where `axis` is split.

    Raises ValueError where there are no elements, TypeError for complex ones.
    """
    return _reduced(x, MIN, axis, None, keepdims)


def max(x: Distributed, axis: Axis = None, keepdims: bool = False) -> Any:
    """The greatest element; otherwise as `min`."""
    return _reduced(x, MAX, axis, None, keepdims)


def any(x: Distributed, axis: Axis = None, keepdims: bool = False) -> Any:
    """Whether some element is not 0. Collective where `axis` is split."""
    return _reduced(x, ANY, axis, None, keepdims)


def all(x: Distributed, axis: Axis = None, keepdims: bool = False) -> Any:
    """Whether no element is 0. Collective where `axis` is split."""
    return _reduced(x, ALL, axis, None, keepdims)


def isclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Any:
    """Where |a - b| <= atol + rtol |b|, or both are the same infinity, as numpy.isclose."""
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
    result = _float_type(x, dtype)
    total = _reduced(x, SUM, axes, dtypes.accumulator(result), keepdims)
    return _divided(total, _count(x, axes), result)


def var(
    x: Distributed,
    axis: Axis = None,
    dtype: Any = None,
    keepdims: bool = False,
    *,
    correction: float = 0,
) -> Any:
    """The variance: the sum of squares over the number of elements less `correction`.

    As numpy.var. Collective where `axis` is split, twice: for the mean, and for the squares.
    """
    axes = checked_axes(x, axis)
    result, library = _float_type(x, dtype), x.library
    wide = dtypes.accumulator(result)
    middle = mean(x, axes, wide, keepdims=True)
    needed = needed_layout(x.layout, middle.shape)
    part = parts.cast(x.local, wide, library) - brought(middle, needed, "the mean")
    is_complex = wide.kind == "c"
    squares = part.real * part.real + part.imag * part.imag if is_complex else part * part
    total = _reduced(x.like(array_of(squares), x.distribution, x.layout), SUM, axes, None, keepdims)
    real = dtypes.of(result.real) if is_complex else result
    return _divided(total, builtins.max(_count(x, axes) - correction, 0), real)


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
    return squared.like(array_of(squared.local**0.5), squared.distribution, squared.layout)


def argmin(x: Distributed, axis: int | None = None, keepdims: bool = False) -> Any:
    """The first index of the least element along `axis`, or of all in C order; NaN is the least.

    Collective where `axis` is split. Raises ValueError where there are no elements.
    """
    return _first_index(x, MIN, axis, keepdims)


def argmax(x: Distributed, axis: int | None = None, keepdims: bool = False) -> Any:
    """The first index of the greatest element; otherwise as `argmin`."""
    return _first_index(x, MAX, axis, keepdims)


# -- axes ------------------------------------------------------------------------------------------


def checked_axes(x: Distributed, axis: Axis) -> tuple[int, ...]:
    """`axis` as the numbers of axes, ascending. All ranks raise what is wrong with one rank's:
    those that are in the reduction already, too.
    """
    try:
        return axes_of(axis, x.ndim)
    except (TypeError, ValueError) as mistake:
        if x.layout.is_replicated:
            raise
        raise_on_all_ranks(x.context, "all_reduce", mistake)


def axes_of(axis: Axis, ndim: int) -> tuple[int, ...]:
    """`axis` as the numbers of axes, ascending; None stands for all.

    Raises ValueError for an axis that there is not, or that is named twice, TypeError for others.
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
            raise ValueError(f"axis {one} of an array of {ndim} axes")
    numbers = sorted(one % ndim for one in axes)
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"axis {axis!r} names an axis twice")
    return tuple(numbers)


def _count(x: Distributed, axes: Sequence[int]) -> int:
    return math.prod(x.shape[axis] for axis in axes)


# -- one reduction ---------------------------------------------------------------------------------


def _reduced(
    x: Distributed, reduction: Reduction, axis: Axis, dtype: Any, keepdims: bool
) -> Distributed:
    axes = (axis,) if type(axis) is int and 0 <= axis < x.ndim else checked_axes(x, axis)
    if reduction.name in ("min", "max"):
        require_ordered(x, reduction.name)
        _require_elements(x, axes, reduction.name)
    part = _partial(x, reduction, axes, dtype)
    return _together(x, part, reduction, axes, keepdims)


def _together(
    x: Distributed, part: Any, reduction: Reduction, axes: tuple[int, ...], keepdims: bool
) -> Distributed:
    """The array of all ranks' partial results: combined where the axes are split."""
    kept, everywhere = _kept(x.layout, axes)
    if everywhere is not None:
        made: Distributed | None
        if explanation.get() is not None:
            made = x.like(_instead(x, part, everywhere), _EVERYWHERE, everywhere)
        else:
            made = x.like(_of_all_ranks(x, part, reduction.op), _EVERYWHERE, everywhere)
    else:
        is_split = not set(axes).isdisjoint(x.layout.partitioned_axes)
        made = None if is_split else rearranged(x, part, kept)
    if made is None:
        made = _combined(x, part, reduction, kept)
    if not keepdims:
        return made
    number = {axis: place for place, axis in enumerate(kept)}
    wide = tuple(number.get(axis) for axis in range(x.ndim))
    local = made.local[tuple(None if axis is None else slice(None) for axis in wide)]
    result = rearranged(made, array_of(local), wide)
    assert result is not None, "new axes leave a distribution what it is"
    return result


def _of_all_ranks(x: Distributed, part: Any, op: str) -> Any:
    """`all_reduce`, by the call that is soonest recognised where it comes again."""
    if op == "sum" and current.get() is x.context:
        return all_reduce(part)
    return all_reduce(part, op=op, context=x.context)


def _combined(x: Distributed, part: Any, reduction: Reduction, kept: Sequence[int]) -> Distributed:
    """What `reduction` makes of all ranks' partial results, each along the axes that are `kept`."""
    library = x.library
    shape = tuple(x.shape[axis] for axis in kept)
    dtype = library.spec(part).dtype
    whole = parts.full(shape, _identity(reduction.name, dtype), x.local, dtype, library)
    if math.prod(x.local.shape):
        spans = x.layout.spans(x.context.rank)
        whole[selector([placed_part(spans[axis]) for axis in kept])] = part
    everywhere = layout_of(_EVERYWHERE, shape, x.context.size)
    if _instead(x, part, everywhere) is None:
        all_reduce(whole, op=reduction.op, out=whole, context=x.context)
    return x.like(whole, _EVERYWHERE, everywhere)


def _instead(x: Distributed, part: Any, layout: Layout) -> Any:
    """Zeros for what all_reduce gives, where a call is explained only; otherwise None."""
    spec = x.library.spec(part)
    moved = lambda: f"all_reduce of {layout.elements * spec.itemsize} bytes"  # noqa: E731
    return in_place_of(moved, x, layout, spec.dtype)


@lru_cache(maxsize=1024)
def _kept(layout: Layout, axes: tuple[int, ...]) -> tuple[tuple[int, ...], Layout | None]:
    """The axes that remain, and their layout where each rank has a sum for all of them."""
    kept = tuple(axis for axis in range(layout.ndim) if axis not in axes)
    if not layout.partitioned_axes or set(kept).intersection(layout.partitioned_axes):
        return kept, None
    shape = tuple(layout.global_shape[axis] for axis in kept)
    return kept, layout_of(_EVERYWHERE, shape, layout.size)


def _partial(x: Distributed, reduction: Reduction, axes: tuple[int, ...], dtype: Any) -> Any:
    """This rank's part, reduced along `axes`."""
    library, part, name = x.library, x.local, reduction.name
    if name in ("min", "max") and not math.prod(part.shape):
        shape = [n for axis, n in enumerate(part.shape) if axis not in axes]
        own = library.spec(part).dtype
        return parts.full(shape, _identity(name, own), part, own, library)
    words = {} if dtype is None else {"dtype": parts.native_dtype(dtype, library)}
    return array_of(parts.reduced(part, name, axes, library, words))


def _identity(name: str, dtype: str) -> Any:
    """What changes nothing that it is combined with."""
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
    dtype = x.library.spec(x.local).dtype
    if dtypes.of(dtype).kind == "c":
        raise TypeError(f"{name} of {dtype}: complex numbers have no order; take it of abs(x)")


def _require_elements(x: Distributed, axes: Sequence[int], name: str) -> None:
    if not _count(x, axes):
        raise ValueError(f"{name} of no elements: the array has shape {x.shape}")


def _float_type(x: Distributed, dtype: Any) -> DType:
    """The type of a mean: `dtype`, or that of the elements, or float64 for integers and bool."""
    own = dtypes.of(x.library.spec(x.local).dtype) if dtype is None else dtypes.of(dtype)
    return dtypes.of("float64") if own.kind in "iub" else own


def _divided(total: Distributed, count: float, dtype: DType) -> Distributed:
    """Sums divided by the count, in their type, and rounded to `dtype`; NaN where that is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        local = array_of(total.local / count) if count else total.local * math.nan
    part = parts.cast(array_of(local), dtype, total.library)
    return total.like(part, total.distribution, total.layout)


# -- indices ---------------------------------------------------------------------------------------


def _first_index(
    x: Distributed, reduction: Reduction, axis: int | None, keepdims: bool
) -> Distributed:
    """The least index at which the best element of all ranks is."""
    axes = checked_axes(x, axis)
    require_ordered(x, f"arg{reduction.name}")
    _require_elements(x, axes, f"arg{reduction.name}")
    best = _reduced(x, reduction, axes, None, True)
    needed = needed_layout(x.layout, best.shape)
    wanted = brought(best, needed, "the best element")
    library = x.library
    numbers = _numbered(x, axes)
    same = x.local == wanted
    if dtypes.of(library.spec(x.local).dtype).kind == "f":
        same = same | (parts.is_nan(x.local, library) & parts.is_nan(wanted, library))
    place = parts.chosen(same, numbers, _NOWHERE, library)
    held = x.like(array_of(place), x.distribution, x.layout)
    return _together(held, _partial(held, MIN, axes, None), MIN, axes, keepdims)


def _numbered(x: Distributed, axes: Sequence[int]) -> Any:
    """The global index along `axes` of each element of the part, in C order, to be broadcast."""
    numbers: np.ndarray[Any, Any] = np.zeros((1,) * x.ndim, np.int64)
    for axis, spans in enumerate(x.layout.spans(x.context.rank)):
        if axis in axes:
            shape = [-1 if other == axis else 1 for other in range(x.ndim)]
            numbers = numbers * x.shape[axis] + indices(spans).reshape(shape)
    return parts.on_device(numbers, x.library, x.library.spec(x.local).device)
