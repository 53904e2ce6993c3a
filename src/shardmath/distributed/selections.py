"""Arrays in files that a library reads and writes by slices, chunked and possibly compressed.

Every rank opens the file. The ranks meet after turns of one size, so that none waits long for
another. Two ranks never write the same chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod
from typing import Any

import numpy as np

from shardmath.arrays.base import HostArray
from shardmath.context.context import DistributedContext
from shardmath.distributed import parts
from shardmath.distributed.movement import part_in
from shardmath.distributed.shared_file import LOAD, ROUND, SAVE, long_axis, shown
from shardmath.distributed.state import Distributed
from shardmath.geometry import Layout, Spans

_CHUNK = 1 << 24  # bytes

Key = tuple[slice, ...]


def chunk_shape(shape: tuple[int, ...], itemsize: int, size: int) -> tuple[int, ...]:
    """The shape of chunks of some 16 MiB, small enough that each of `size` ranks has some. Pure."""
    split, rest, chunk = long_axis(shape), itemsize * prod(shape), []
    for axis, extent in enumerate(shape):
        rest //= max(extent, 1)
        most = -(-extent // size) if axis == split else extent
        chunk.append(max(1, min(most, _CHUNK // max(rest, 1))))
    return tuple(chunk)


def layout_of_chunks(shape: tuple[int, ...], chunk: tuple[int, ...], size: int) -> Layout:
    """Whole chunks for each rank, as evenly as possible. Pure."""
    if not shape:
        return Layout.replicated(shape, size)
    axis = long_axis(shape)
    wide, extent = chunk[axis], shape[axis]
    even = [Spans.even(-(-extent // wide), size, rank) for rank in range(size)]
    columns: list[list[Spans] | None] = [None] * len(shape)
    columns[axis] = [Spans.interval(s.start * wide, min(s.stop * wide, extent)) for s in even]
    return Layout.product(shape, columns, size=size)


def write_chunks(x: Distributed, chunked: Any, chunk: tuple[int, ...]) -> None:
    """Write the array into `chunked`, an array with such chunks that every rank has opened.
    Collective.
    """
    context = x.context
    layout = layout_of_chunks(x.shape, chunk, context.size)
    part = part_in(x, layout)
    host = context.on_all_ranks(SAVE, lambda: parts.on_host(part))
    unit = chunk[long_axis(x.shape)] if x.ndim else 1

    def write(here: Key, there: Key) -> None:
        if x.ndim or context.rank == 0:  # all ranks have the element of an array without axes
            chunked[there] = host[here]

    turns = list(_turns(layout, context.rank, host.itemsize, unit))
    for here, there in shown(turns, SAVE, context):
        context.on_all_ranks(SAVE, partial(write, here, there))


def read_slices(
    context: DistributedContext,
    chunked: Any,
    layout: Layout,
    dtype: np.dtype[Any],
) -> HostArray:
    """This rank's part, in a layout of slices, of what every rank has opened. Collective."""
    host = context.on_all_ranks(LOAD, lambda: np.empty(layout.local_shape(context.rank), dtype))

    def read(here: Key, there: Key) -> None:
        # As its bytes: a type that the file lacks, such as bfloat16, is opaque there.
        host[here] = np.asarray(chunked[there]).view(dtype)

    turns = list(_turns(layout, context.rank, dtype.itemsize, 1))
    for here, there in shown(turns, LOAD, context):
        context.on_all_ranks(LOAD, partial(read, here, there))
    return host


def layout_of_slices(layout: Layout) -> Layout:
    """The layout in which ranks read by slices: the given one if its parts are slices. Pure."""
    if all(spans.slice() is not None for part in layout.parts for spans in part):
        return layout
    axis = long_axis(layout.global_shape)
    return Layout.slab(layout.global_shape, layout.size, axis=axis)


def _turns(layout: Layout, rank: int, itemsize: int, unit: int) -> Iterator[tuple[Key, Key]]:
    """Slices of a rank's part, and of the whole array, for each turn; all ranks have as many turns.

    A turn has a multiple of `unit` indices along the first long axis.
    """
    shape, part = layout.global_shape, layout.spans(rank)
    if not shape:
        yield (), ()
        return
    axis = long_axis(shape)
    row = itemsize * prod(shape) // max(shape[axis], 1)
    step = unit * max(1, ROUND // max(row * unit, 1))
    for start in range(0, max(spans.length for spans in layout.column(axis)), step):
        here = [slice(None)] * len(shape)
        there = [spans.slice() or slice(0, 0) for spans in part]
        stop = min(start + step, part[axis].length)
        here[axis] = slice(start, max(start, stop))
        period = part[axis].period or 1
        first = part[axis].start
        there[axis] = slice(first + start * period, first + max(start, stop) * period, period)
        if stop <= start or 0 in layout.local_shape(rank):
            here[axis] = there[axis] = slice(0, 0)
        yield tuple(here), tuple(there)
