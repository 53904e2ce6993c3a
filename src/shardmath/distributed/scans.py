"""Cumulative sums and products, and differences, along one axis.

Each rank accumulates its block of a split axis. The last element is the block's total, and the
totals of the blocks before are all that a rank needs of the others:

    x (n, m) Slab.X   totals (ranks, m) Slab.X  ->  on every rank, which adds its offset
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from shardmath.arrays import array_of, dtypes
from shardmath.distributed import parts
from shardmath.distributed.layouts import layout_of
from shardmath.distributed.manipulation import concat, one_axis
from shardmath.distributed.movement import rearranged
from shardmath.geometry import Slab, Spans


def cumulative_sum(
    x: Any, axis: int | None = None, dtype: Any = None, include_initial: bool = False
) -> Any:
    """The sum of all elements up to each one along an axis, as numpy.cumulative_sum.

    `axis` may be None for arrays of one axis. Collective where the axis is split.
    """
    return _cumulative(x, "sum", axis, dtype, include_initial)


def cumulative_prod(
    x: Any, axis: int | None = None, dtype: Any = None, include_initial: bool = False
) -> Any:
    """The product of all elements up to each one along an axis; otherwise as `cumulative_sum`."""
    return _cumulative(x, "prod", axis, dtype, include_initial)


def diff(x: Any, n: int = 1, axis: int = -1, prepend: Any = None, append: Any = None) -> Any:
    """The differences of neighbouring elements along an axis, `n` times, as numpy.diff.

    Where the axis is split, the first index of each block moves to the rank before.
    """
    if n < 0:
        raise ValueError(f"n is {n}, and must not be negative")
    axis = one_axis(axis, x.ndim)
    if not n:
        return x
    ends = [_end(end, x, axis) for end in (prepend, append)]
    pieces = [piece for piece in (ends[0], x, ends[1]) if piece is not None]
    x = concat(pieces, axis) if len(pieces) > 1 else x
    behind, before = parts.along(axis, slice(1, None)), parts.along(axis, slice(None, -1))
    is_bool = x.element_type.kind == "b"
    for _ in range(n):
        x = x[behind] != x[before] if is_bool else x[behind] - x[before]
    return x


def _end(end: Any, x: Any, axis: int) -> Any:
    """An array to join before or behind `x`; a number is repeated along the whole end."""
    if end is None or np.ndim(end):
        return end
    shape = [1 if number == axis else extent for number, extent in enumerate(x.shape)]
    return np.broadcast_to(np.asarray(end), shape)


def _cumulative(x: Any, name: str, axis: int | None, dtype: Any, include_initial: bool) -> Any:
    if axis is None and x.ndim != 1:
        raise ValueError(f"cumulative_{name} of an array of {x.ndim} axes: pass axis=")
    axis = one_axis(axis or 0, x.ndim)
    if axis in x.layout.partitioned_axes and _blocks(x.layout.column(axis), x.shape[axis]) is None:
        slab = layout_of(Slab(axis), x.shape, x.context.size)
        x = x.like(rearranged(x, slab), Slab(axis), slab)
    local = array_of(parts.accumulated(x.local, f"cum{name}", axis, dtype))
    if axis in x.layout.partitioned_axes:
        local = _offset(x, local, name, axis)
    made = x.with_part(local)
    if not include_initial:
        return made
    start = np.asarray(name == "prod", dtypes.to_numpy(made.element_type))
    return concat([_end(start, x, axis), made], axis)


def _offset(x: Any, local: Any, name: str, axis: int) -> Any:
    """This rank's accumulated part, combined with the total of all elements before it."""
    column = x.layout.column(axis)
    blocks = _blocks(column, x.shape[axis])
    assert blocks is not None, "the array was brought to a slab"
    number = {spans: place for place, spans in enumerate(blocks)}
    own_block = [
        Spans.interval(number[spans], number[spans] + 1) if spans.block else spans
        for spans in column
    ]
    totals, everywhere = (x.layout.with_column(axis, len(blocks), one) for one in (own_block, None))
    held = x.like(local[parts.along(axis, slice(-1, None))], x.distribution, totals)
    place = number.get(column[x.context.rank], 0)
    earlier = rearranged(held, everywhere)[parts.along(axis, slice(0, place))]
    if not place:
        return local
    own = held.element_type
    offset = parts.reduced(earlier, name, (axis,), own)[parts.along(axis, None)]
    return local + offset if name == "sum" else local * offset


@lru_cache(maxsize=1024)
def _blocks(column: tuple[Spans, ...], extent: int) -> list[Spans] | None:
    """The different blocks of an axis, in order; None where the ranks' blocks overlap or are
    cyclic.
    """
    blocks = sorted({spans for spans in column if spans.block}, key=lambda spans: spans.start)
    ends = [0, *(spans.stop for spans in blocks)]
    starts = [*(spans.start for spans in blocks), extent]
    return None if any(spans.period for spans in blocks) or starts != ends else blocks
