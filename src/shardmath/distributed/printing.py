"""The text of an array, as NumPy prints the whole; of a long one only the corners are fetched."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardmath.arrays.base import HostArray
from shardmath.collectives import all_reduce
from shardmath.distributed import parts
from shardmath.distributed.layouts import indices
from shardmath.distributed.state import Distributed


def shown(x: Distributed) -> str:
    """The text that NumPy's `str` gives for the global array. Collective."""
    options = np.get_printoptions()
    edge = options["edgeitems"]
    is_long = x.size > options["threshold"]
    # Along an axis that is cut, one index stands for all between the ends.
    cut = [is_long and extent > 2 * edge for extent in x.shape]
    kept = [2 * edge + 1 if short else extent for short, extent in zip(cut, x.shape, strict=True)]
    corners = _corners(x, tuple(kept), cut, edge)
    with np.printoptions(threshold=0 if is_long else corners.size + 1):
        return str(corners)


def _corners(x: Distributed, shape: tuple[int, ...], cut: list[bool], edge: int) -> HostArray:
    """A shorter array with the same ends along each axis as `x`, on every rank."""
    mine, there = [], []
    for axis, spans in enumerate(x.layout.spans(x.context.rank)):
        held = indices(spans)
        extent = x.shape[axis]
        ends = (held < edge) | (held >= extent - edge) if cut[axis] else np.ones(len(held), bool)
        mine.append(np.flatnonzero(ends))
        numbers = held[ends]
        shift = extent - shape[axis]
        there.append(np.where(numbers >= edge, numbers - shift, numbers) if cut[axis] else numbers)
    chosen: Any = x.local[np.ix_(*mine)] if x.ndim else x.local
    own = parts.on_host(chosen)
    if x.layout.is_replicated:
        corners = np.zeros(shape, own.dtype)
        corners[np.ix_(*there)] = own
        return corners
    # Each element is on one rank, and the others contribute zeros, so its bytes are the sums.
    raw = np.zeros((*shape, own.dtype.itemsize), np.uint8)
    if own.size:
        octets = np.ascontiguousarray(own).view(np.uint8).reshape(*own.shape, own.dtype.itemsize)
        raw[np.ix_(*there)] = octets
    everywhere = all_reduce(parts.converted(raw, x.local), context=x.context)
    summed = np.ascontiguousarray(parts.on_host(everywhere))
    return summed.reshape(-1).view(own.dtype).reshape(shape)
