"""Masks: what `x[mask]` reads, and `x[mask] = value` writes, with a mask of the first axes of x.

    x (n, m) Slab.X   x[mask]            boxes: ranks keep what they have, one after the other
                      x[mask] = 7        nothing moves where the mask is split as x is
                      x[mask] = values   values move to the ranks that have the rows

In slabs of rows the elements that a rank selects are contiguous in C order among all that are
selected, so results and values are split in boxes. Other arrays are first moved to such slabs,
unless one value is assigned.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from shardmath.collectives import all_gather
from shardmath.distributed import parts
from shardmath.distributed.elementwise import local_part, needed_layout
from shardmath.distributed.indexing import require_value
from shardmath.distributed.layouts import distribution_of
from shardmath.distributed.movement import (
    brought,
    end_explanation,
    explanation,
    in_slabs,
    whole_everywhere,
)
from shardmath.distributed.state import Distributed
from shardmath.geometry import Layout, Spans


def is_mask(key: Any) -> bool:
    """Whether `key` is an array of bool."""
    return not isinstance(key, tuple) and "bool" in str(getattr(key, "dtype", ""))


def get(x: Any, mask: Any) -> Any:
    """`x[mask]`: the elements, or the rows, where the mask holds; in boxes. Collective.

    Raises IndexError where the shape of the mask is not that of the first axes of x.
    """
    held = in_rows(x)
    return of_rows(held, held.local[_beside(held, mask)])


def put_one(x: Any, mask: Any, value: Any) -> None:
    """`x[mask] = value`, one value for all. Collective where the mask or the value has to move.

    Raises IndexError as `get`.
    """
    where = _beside(x, mask)
    if isinstance(value, Distributed):
        value = whole_everywhere(value, "the value").local
    if explanation.get() is None:
        parts.assign(x.local, where, value)


def put(x: Any, mask: Any, value: Any) -> None:
    """`x[mask] = value`, with an element or a row for each place where a distributed mask holds, in
    C order. Collective.

    If x is in slabs of rows, x[mask] = f(x[mask]) moves nothing. Raises IndexError as `get`,
    ValueError where the value does not broadcast to the shape of x[mask].
    """
    held = in_rows(x)
    where = _beside(held, mask)
    chosen = of_rows(held, held.local[where])
    require_value(value, chosen.shape)
    if isinstance(value, Distributed):
        part = brought(value, needed_layout(chosen.layout, value.shape), "what is assigned")
    else:
        part = local_part(value, chosen.layout, x)
    parts.assign(held.local, where, part)
    if held.local is not x.local:
        x.local[...] = brought(held, x.layout, "what is assigned")


def _beside(x: Any, mask: Any) -> Any:
    """This rank's part of a mask for its part of x."""
    shape = tuple(mask.shape)
    if shape != x.shape[: len(shape)] or not shape:
        raise IndexError(f"a mask of shape {shape} does not fit an array of shape {x.shape}")
    columns = [x.layout.column(axis) for axis in range(len(shape))]
    needed = Layout.product(shape, columns, size=x.context.size)
    if isinstance(mask, Distributed):
        return brought(mask, needed, "the mask")
    return local_part(mask, needed, x)


def in_rows(x: Any) -> Any:
    """The array in slabs of rows, or itself if every rank has all of it."""
    return x if x.layout.is_replicated else in_slabs(x, 0, "rows")


def of_rows(held: Any, part: Any) -> Any:
    """The array of what the ranks have selected of their rows: one part after the other, or, if
    `held` is whole on every rank, the same on all.
    """
    return held.everywhere(part) if held.layout.is_replicated else in_boxes(held, part)


def in_boxes(x: Any, part: Any) -> Any:
    """The array whose parts follow each other along the first axis, whatever their lengths."""
    end_explanation(lambda: "all_gather of how many elements each rank has")
    counts = all_gather(np.asarray([len(part)]), context=x.context).tolist()
    ends = np.cumsum([0, *counts]).tolist()
    column = [Spans.interval(lo, hi) for lo, hi in pairwise(ends)]
    shape = (ends[-1], *part.shape[1:])
    layout = Layout.product(shape, [column], size=x.context.size)
    distribution = distribution_of(layout, x.context.rank)
    assert distribution is not None, "boxes along one axis"
    return x.like(part, distribution, layout)
