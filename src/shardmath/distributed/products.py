"""Products of arrays: `x @ y` and `vecdot`, through our own product of split matrices.

The result is split as the operand that splits its axis: rows as those of x, columns as those of y;
where only the axis that is summed is split, in slabs of rows. A product of operands that every rank
has whole is each rank's own.

    x (m, k) Slab.X @ y (k, n) any       Slab.X
    x (m, k) whole  @ y (k, n) Slab.Y    Slab.Y
    x (m, k) grid   @ y (k, n) any       that grid
    x (m, k) Slab.Y @ y (k, n) Slab.X    Slab.X, sums scattered to their rows
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardmath.arrays import array_of, dtypes
from shardmath.distributed import parts, reductions
from shardmath.distributed.elementwise import applied
from shardmath.distributed.layouts import distribution_of, layout_of, rearranged
from shardmath.distributed.movement import within
from shardmath.distributed.state import Distributed
from shardmath.geometry import Distribution, Layout, Replicated, Slab
from shardmath.operators.matmul import matmul as product_of_parts


def matmul(x: Any, y: Any) -> Distributed:
    """The product of matrices, or of a matrix and a vector, as numpy.matmul. Collective.

    One operand may be an array that is the same on all ranks. Elements are of one floating type, or
    of two that NumPy promotes. Raises ValueError where the shapes do not fit, and
    NotImplementedError for integers and for more than two axes.
    """
    first = x if isinstance(x, Distributed) else y
    a, b = _matrix(x, first, (None, 0)), _matrix(y, first, (0, None))
    a, b = _of_one_type(a, b)
    kept = tuple(axis for axis, z in enumerate((x, y)) if z.ndim == 2)
    made: Distributed = product(a, b, kept=kept)
    if len(kept) == 2:
        return made
    shape = [made.local.shape[axis] for axis in kept]
    result = rearranged(made, made.local.reshape(shape), kept)
    assert result is not None, "the axis that goes is not split"
    return result


def product(
    a: Distributed,
    b: Distributed,
    c: Distributed | None = None,
    /,
    *,
    kept: tuple[int, ...] = (0, 1),
    **words: Any,
) -> Any:
    """The product of two matrices, split as c if it is given, and otherwise as operands say along
    the axes that are `kept`: others are a vector's, and go. Collective.

    `words` are those of this package's matmul, which says what an epilog's outputs are returned
    with.
    """
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"no product of shapes {a.shape} and {b.shape}")
    shape = (a.shape[0], b.shape[1])
    distribution, layout = _result(a, b, shape, kept) if c is None else (c.distribution, c.layout)
    if c is None and not words and a.layout.is_replicated and b.layout.is_replicated:
        if a.context.size > 1:
            distribution, layout = Replicated(), Layout.replicated(shape, a.context.size)
        return a.like(array_of(a.local @ b.local), distribution, layout)
    if c is None and 0 in (*shape, a.shape[1]):  # nothing is multiplied
        spec = a.library.spec(a.local)
        empty = parts.full(layout.local_shape(a.context.rank), 0, a.local, spec.dtype, a.library)
        return a.like(empty, distribution, layout)
    locals_ = [x.local for x in (a, b, c) if x is not None]
    distributions = [a.distribution, b.distribution, distribution]
    local = within(
        a.context, lambda: product_of_parts(*locals_, distributions=distributions, **words)
    )
    if isinstance(local, tuple):
        local, outputs = local
        return a.like(local, distribution, layout), outputs
    return a.like(local, distribution, layout)


def vecdot(x: Any, y: Any, axis: int = -1) -> Any:
    """The sum of conj(x) * y along an axis, as numpy.vecdot. Collective where that is split."""
    together = applied(lambda one, two: one.conj() * two, (x, y))
    return reductions.sum(together, axis=axis)


def _matrix(x: Any, first: Distributed, axes: tuple[int | None, ...]) -> Distributed:
    """An operand as a matrix; a vector gets an axis more, as `axes` say."""
    if not isinstance(x, Distributed):
        whole = parts.converted(x, first.library)
        shape = tuple(whole.shape)
        x = first.like(whole, Replicated(), Layout.replicated(shape, first.context.size))
    if x.context is not first.context:
        raise ValueError("the operands are split over the ranks of different contexts")
    if x.ndim == 0:
        raise ValueError("matmul takes matrices and vectors, not numbers: use x * y")
    if x.ndim > 2:
        raise NotImplementedError(f"a product of {x.ndim} axes: multiply its matrices one by one")
    matrix: Distributed = x
    if x.ndim == 2:
        return matrix
    widened = rearranged(
        matrix, x.local[tuple(slice(None) if a == 0 else None for a in axes)], axes
    )
    assert widened is not None, "a new axis leaves a distribution what it is"
    return widened


def _of_one_type(a: Distributed, b: Distributed) -> tuple[Distributed, Distributed]:
    """The operands in the type of the product. Raises NotImplementedError for integers."""
    names = [x.library.spec(x.local).dtype for x in (a, b)]
    name = names[0]
    if names[0] != names[1]:
        name = np.result_type(*map(dtypes.to_numpy, names)).name
    if dtypes.of(name).kind not in "fc":
        raise NotImplementedError(f"a product of {name}: multiply x.astype(float)")

    def cast(x: Distributed) -> Distributed:
        local = parts.cast(x.local, dtypes.of(name), x.library)
        return x.like(local, x.distribution, x.layout)

    return cast(a), cast(b)


def _result(
    a: Distributed, b: Distributed, shape: tuple[int, int], kept: tuple[int, ...]
) -> tuple[Distribution, Layout]:
    """How the product is split, along axes that are `kept`: others are a vector's, and go."""
    size, rank = a.context.size, a.context.rank
    if not kept:  # a number, which all ranks get
        return Replicated(), Layout.replicated(shape, size)
    candidates = []
    if a.layout.partitioned_axes == (0,) and 0 in kept:
        candidates.append((a.distribution, [a.layout.column(0), None]))
    if b.layout.partitioned_axes == (1,) and 1 in kept:
        candidates.append((b.distribution, [None, b.layout.column(1)]))
    for like, columns in candidates:
        layout = Layout.product(shape, columns, size=size)
        distribution = distribution_of(layout, rank, like)
        if distribution is not None:
            return distribution, layout
    for x in (a, b) if len(kept) == 2 else ():
        given = x.distribution
        if not isinstance(given, Slab | Replicated) and not given.per_rank:
            return given, layout_of(given, shape, size)
    slab = Slab(kept[0])
    return slab, layout_of(slab, shape, size)
