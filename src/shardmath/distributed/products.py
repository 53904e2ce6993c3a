"""Products of arrays, `x @ y` and `vecdot`, by this package's product of split matrices.

The result is split as the operand that splits its axis: by rows as x, by columns as y. Where only
the summed axis is split, it is in slabs of rows. If every rank has both operands whole, each
computes the product by itself.

    x (m, k) Slab.X @ y (k, n) any       Slab.X
    x (m, k) whole  @ y (k, n) Slab.Y    Slab.Y
    x (m, k) grid   @ y (k, n) any       that grid
    x (m, k) Slab.Y @ y (k, n) Slab.X    Slab.X, sums scattered to their rows
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from shardmath.arrays import array_of, dtypes
from shardmath.base import current
from shardmath.distributed import parts, reductions
from shardmath.distributed.elementwise import all_distributed, applied, needed_layout, whole
from shardmath.distributed.layouts import distribution_of, layout_of, of_axes
from shardmath.distributed.manipulation import of_one_type, one_axis, permute_dims, reshape
from shardmath.distributed.movement import brought, explanation, in_place_of
from shardmath.distributed.state import Distributed
from shardmath.geometry import Distribution, Layout, Replicated, Slab, Spans, unbound
from shardmath.operators.matmul.forms import matmul as product_of_parts


def matmul(x: Any, y: Any) -> Distributed:
    """The product of matrices, of stacks of them, and of vectors, as numpy.matmul. Collective.

    One operand may be an array that is the same on all ranks. Elements are of floating types, which
    are promoted as NumPy does. Stacks are split along an axis of the stack, and each rank
    multiplies whole matrices. Raises ValueError where the shapes do not fit, NotImplementedError
    for integers that are in no stack.
    """
    if type(x) is type(y) and isinstance(x, Distributed) and x.context is y.context:
        a, b, context = x.local, y.local, x.context
        # A repeated product is recognised by identity: hashing its operands' layouts would take as
        # long as everything else here.
        p, q, like_x, like_y, dtype, plan = context.caches.get(matmul, _NONE)
        if not (
            p is x.layout
            and q is y.layout
            and like_x is x.distribution
            and like_y is y.distribution
            and dtype is a.dtype is b.dtype
        ):
            given = x.layout, y.layout, x.distribution, y.distribution
            plan = _of_matrices(*given, a.dtype, b.dtype, context.rank)
            if a.dtype is b.dtype:
                context.caches[matmul] = (*given, a.dtype, plan)
        if plan is not None and explanation.get() is None and current.get() is context:
            local = product_of_parts(a, b, distributions=plan[2])
            return x.like(local, plan[0], plan[1])
    first = x if isinstance(x, Distributed) else y
    x, y = whole(x, first), whole(y, first)
    if not (x.ndim and y.ndim):
        raise ValueError("matmul takes matrices and vectors, not numbers: use x * y")
    a, b = _matrix(x, (None, 0)), _matrix(y, (0, None))
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"arrays of shapes {x.shape} and {y.shape} cannot be multiplied")
    if a.ndim > 2 or b.ndim > 2:
        made = _stacked(a, b)
    else:
        kept = tuple(axis for axis, z in enumerate((x, y)) if z.ndim == 2)
        a, b = of_one_type([a, b])
        if a.element_type.kind not in "fc":
            raise NotImplementedError(f"matmul of {a.element_type}: multiply x.astype(float)")
        made = product(a, b, kept=kept)
    if x.ndim > 1 and y.ndim > 1:
        return made
    gone = [place for place, z in ((made.ndim - 2, x), (made.ndim - 1, y)) if z.ndim == 1]
    kept = tuple(axis for axis in range(made.ndim) if axis not in gone)
    shape = [made.local.shape[axis] for axis in kept]
    result = of_axes(made, made.local.reshape(shape), kept)
    assert result is not None, "the axis that goes is not split"
    return result


def tensordot(x: Any, y: Any, axes: Any = 2) -> Any:
    """The sums of products over axes of both arrays, as numpy.tensordot. Collective.

    `axes` is the number of last axes of x and first axes of y, or a pair of lists. Both are
    reshaped to matrices, and multiplied by `matmul`.
    """
    x, y = all_distributed((x, y))
    if isinstance(axes, int):
        axes = range(x.ndim - axes, x.ndim), range(axes)
    pair = [(one,) if isinstance(one, int) else tuple(one) for one in axes]
    summed = [[one_axis(axis, z.ndim) for axis in one] for z, one in zip((x, y), pair, strict=True)]
    kept = [
        [n for n in range(z.ndim) if n not in gone] for z, gone in zip((x, y), summed, strict=True)
    ]
    extents = [[z.shape[axis] for axis in one] for z, one in zip((x, y), summed, strict=True)]
    if extents[0] != extents[1]:
        raise ValueError(
            f"arrays of shapes {x.shape} and {y.shape} differ along axes {pair} of tensordot"
        )
    shape = [z.shape[axis] for z, one in zip((x, y), kept, strict=True) for axis in one]
    inner = math.prod(extents[0])
    rows, columns = (
        math.prod(z.shape[n] for n in one) for z, one in zip((x, y), kept, strict=True)
    )
    a = reshape(permute_dims(x, [*kept[0], *summed[0]]), (rows, inner))
    b = reshape(permute_dims(y, [*summed[1], *kept[1]]), (inner, columns))
    return reshape(matmul(a, b), shape)


def product(
    a: Distributed,
    b: Distributed,
    c: Distributed | None = None,
    /,
    *,
    kept: tuple[int, ...] = (0, 1),
    **words: Any,
) -> Any:
    """The product of two matrices, split as c if that is given, else as the operands say. Axes that
    are not `kept` are a vector's, and will be dropped. Collective.

    `words` are those of this package's matmul; with an epilog that has outputs these are returned,
    too.
    """
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"arrays of shapes {a.shape} and {b.shape} cannot be multiplied")
    operands = (a.layout, a.distribution), (b.layout, b.distribution)
    distribution, layout, distributions = _result(*operands, kept, a.context.rank)
    locals_ = [a.local, b.local]
    if c is not None:
        distribution, layout = c.distribution, c.layout
        distributions = [*distributions[:2], distribution]
        locals_.append(c.local)
    elif not words and a.layout.is_replicated and b.layout.is_replicated:
        local = array_of(a.local @ b.local)
        return a.everywhere(local) if a.context.size > 1 else a.like(local, distribution, layout)
    elif 0 in (a.shape[0], *b.shape):  # nothing is multiplied
        zeros = parts.full(layout.local_shape(a.context.rank), 0, a.local)
        return a.like(zeros, distribution, layout)
    if explanation.get() is not None:
        zeros = in_place_of(lambda: f"matmul: {a.layout} @ {b.layout} -> {layout}", a, layout)
        return a.like(zeros, distribution, layout)
    words["distributions"] = distributions
    with current.within(a.context):
        made = product_of_parts(*locals_, **words)
    if isinstance(made, tuple):
        made, outputs = made
        return a.like(made, distribution, layout), outputs
    return a.like(made, distribution, layout)


Plan = tuple[Distribution, Layout, list[Distribution]]
_NONE = (None,) * 6


@lru_cache(maxsize=1024)
def _of_matrices(
    rows: Layout,
    columns: Layout,
    like_a: Distribution,
    like_b: Distribution,
    type_a: Any,
    type_b: Any,
    rank: int,
) -> Plan | None:
    """How two matrices are multiplied if a call of `matmul` is all that it takes; else None."""
    if type_a != type_b or dtypes.of(type_a).kind not in "fc":
        return None
    is_plain = rows.ndim == columns.ndim == 2 and not (rows.is_replicated or columns.is_replicated)
    if not is_plain or rows.global_shape[1] != columns.global_shape[0]:
        return None
    if not (rows.elements and columns.elements):
        return None
    return _result((rows, like_a), (columns, like_b), (0, 1), rank)


def vecdot(x: Any, y: Any, axis: int = -1) -> Any:
    """The sum of conj(x) * y along an axis, as numpy.vecdot. Collective where that is split."""
    together = applied(lambda one, two: one.conj() * two, (x, y))
    return reductions.sum(together, axis=axis, dtype=together.element_type)


def _matrix(x: Distributed, axes: tuple[int | None, ...]) -> Distributed:
    """An operand with at least two axes: a vector gets a new one, where `axes` has None."""
    if x.ndim > 1:
        return x
    key = tuple(slice(None) if axis == 0 else None for axis in axes)
    widened = of_axes(x, x.local[key], axes)
    assert widened is not None, "a new axis leaves a distribution what it is"
    return widened


def _stacked(a: Distributed, b: Distributed) -> Distributed:
    """The products of whole matrices. The stack is split as an operand splits it, if one does,
    otherwise along its longest axis.
    """
    stack = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    size = a.context.size
    columns = stack_columns((a, b), stack)
    places = Layout.product((*stack, 1, 1), columns, size=size)
    locals_ = []
    for name, x in (("the first stack", a), ("the second stack", b)):
        held = needed_layout(places, (*x.shape[:-2], 1, 1))
        needed = [held.column(axis) for axis in range(x.ndim - 2)]
        locals_.append(brought(x, Layout.product(x.shape, needed, size=size), name))
    shape = (*stack, a.shape[-2], b.shape[-1])
    layout = Layout.product(shape, columns, size=size)
    like = unbound(a.distribution) if a.ndim == len(shape) else None
    distribution = distribution_of(layout, a.context.rank, like)
    if distribution is None:  # only b is cyclic
        distribution = unbound(b.distribution)
    return a.like(parts.module_of(a.local).matmul(*locals_), distribution, layout)


def stack_columns(arrays: Sequence[Distributed], stack: tuple[int, ...]) -> list[Any]:
    """How to split a stack so that each rank has whole matrices: like the first array that has this
    stack and is split along it, otherwise along the longest axis.
    """
    count, size = len(stack), arrays[0].layout.size
    for x in arrays:
        split = x.layout.partitioned_axes
        if x.shape[:-2] != stack or not x.size:  # boxes of nothing may overlap, or leave gaps
            continue
        if split and max(split) < count and x.layout.disjoint():
            return [x.layout.column(axis) for axis in range(count)]
    columns: list[Any] = [None] * count
    axis = int(np.argmax(stack))
    columns[axis] = [Spans.even(stack[axis], size, rank) for rank in range(size)]
    return columns


@lru_cache(maxsize=1024)
def _result(
    a: tuple[Layout, Distribution],
    b: tuple[Layout, Distribution],
    kept: tuple[int, ...],
    rank: int,
) -> Plan:
    """How a product is split, and the distributions of all three matrices, in one list that is
    shared by all such products. Axes that are not `kept` are a vector's.
    """
    (rows, like_a), (columns, like_b) = a, b
    size, shape = rows.size, (rows.global_shape[0], columns.global_shape[1])

    def chosen() -> tuple[Distribution, Layout]:
        if not kept:  # a number, which all ranks get
            return Replicated(), Layout.replicated(shape, size)
        candidates = []
        if rows.partitioned_axes == (0,) and 0 in kept:
            candidates.append((like_a, [rows.column(0), None]))
        if columns.partitioned_axes == (1,) and 1 in kept:
            candidates.append((like_b, [None, columns.column(1)]))
        for like, split in candidates:
            layout = Layout.product(shape, split, size=size)
            distribution = distribution_of(layout, rank, like)
            if distribution is not None:
                return distribution, layout
        for given in (like_a, like_b) if len(kept) == 2 else ():
            if not isinstance(given, Slab | Replicated) and not given.per_rank:
                return given, layout_of(given, shape, size)
        return Slab(kept[0]), layout_of(Slab(kept[0]), shape, size)

    distribution, layout = chosen()
    return distribution, layout, [like_a, like_b, distribution]
