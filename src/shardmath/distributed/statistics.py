"""Medians and histograms of the elements of arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardmath.collectives import all_reduce
from shardmath.distributed import parts, reductions
from shardmath.distributed.elementwise import where, whole
from shardmath.distributed.manipulation import expand_dims, moveaxis, reshape
from shardmath.distributed.movement import brought, in_place_of, in_slabs
from shardmath.distributed.searching import in_order


def median(
    a: Any,
    axis: int | Sequence[int] | None = None,
    *,
    overwrite_input: bool = False,
    keepdims: bool = False,
) -> Any:
    """The middle element along axes, by default all, or the mean of the two in the middle, as
    numpy.median; NaN if an element is NaN, or there is none. `overwrite_input` has no effect.

    Collective where the axes are split; they are then sorted as by `sort`. Raises TypeError for
    complex numbers.
    """
    axes = reductions.checked_axes(a, axis)
    kept = [number for number in range(a.ndim) if number not in axes]
    count = math.prod(a.shape[number] for number in axes)
    lines = moveaxis(a, axes, range(len(kept), a.ndim))
    lines = reshape(lines, (*(a.shape[number] for number in kept), count))
    ordered, _ = in_order(lines, len(kept))
    middle = reductions.mean(ordered[..., max(0, (count - 1) // 2) : count // 2 + 1], -1)
    if count and a.element_type.kind == "f":
        last = ordered[..., -1]  # NaN if any element is
        middle = where(np.isnan(last), last, middle)
    return expand_dims(middle, axes) if keepdims else middle


def histogram(
    a: Any,
    bins: Any = 10,
    range: tuple[float, float] | None = None,
    density: bool | None = None,
    weights: Any = None,
) -> tuple[Any, Any]:
    """How many elements lie in each bin, and the edges of the bins, as numpy.histogram. Collective:
    each rank counts its part, and every rank gets the sums.

    `bins` is their number, or their edges, the same on all ranks. `weights`, of the shape of `a`,
    are summed instead of counting elements, and are moved where they are split otherwise. Raises
    ValueError for edges that do not ascend, and for elements that are not finite unless `range` is
    given; NotImplementedError for rules such as "auto".
    """
    if isinstance(bins, str):
        raise NotImplementedError(
            f"histogram with bins={bins!r}: give a number, or the edges that "
            f"np.histogram_bin_edges(sample, {bins!r}) finds for a sample that every rank has"
        )
    if not a.layout.is_replicated and not a.layout.disjoint():
        a = in_slabs(a, 0, "histogram")
    if range is None and np.ndim(bins) == 0:
        range = (0.0, 1.0)
        if a.size:
            range = reductions.min(a).item(), reductions.max(a).item()
    of_each = None
    if weights is not None:
        weights = whole(weights, a)
        if weights.shape != a.shape:
            raise ValueError(f"weights of shape {weights.shape} for an array of shape {a.shape}")
        of_each = brought(weights, a.layout, "the weights")
    counts, edges = map(a.everywhere, parts.histogram(a.local, bins, range, of_each))
    if not a.layout.is_replicated:
        local = in_place_of(lambda: f"all_reduce of {counts.size} counts", counts, counts.layout)
        if local is None:
            local = all_reduce(counts.local, context=a.context)
        counts = counts.with_part(local)
    if density:
        wide = edges.astype("float64")
        counts = counts / (wide[1:] - wide[:-1]) / counts.sum()
    return counts, edges
