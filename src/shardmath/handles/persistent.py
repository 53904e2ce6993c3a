"""Allocations that come back at the same address: memory kept under a number.

The memory of a number is never given back while the context lives. An array on it holds a lease,
and the number can be asked for again only after the lease has ended, with its last array or by
hand.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from shardmath.arrays import DType, Library
from shardmath.context.context import Context
from shardmath.handles.allocation import array_on, extent_of
from shardmath.symmetric.heap import Buffer

__all__ = ["persistent_array"]


class _Lease:
    """What the arrays on a kept buffer hold on to."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self.device = buffer.device
        vars(self)[buffer.interface] = getattr(buffer, buffer.interface)


def persistent_array(
    context: Context,
    library: Library,
    shape: Sequence[int],
    dtype: DType,
    strides: Sequence[int],
    *,
    number: int,
    group: str | None,
) -> Any:
    """An array on the memory of `number`, which is reserved when first asked for. Local.

    Raises RuntimeError while an earlier array of the number is alive, or when it had another size;
    HeapExhausted.
    """
    kept: dict[int, tuple[Buffer, weakref.ref[_Lease]]] = context.cache("persistent", dict)
    nbytes = extent_of(shape, strides) * dtype.itemsize
    if number in kept:
        buffer, lease_of = kept[number]
        if lease_of() is not None and not buffer.block.freed:
            raise RuntimeError(f"alloc_id {number} is in use: an array allocated with it is alive")
        if buffer.block.nbytes != nbytes:
            raise RuntimeError(
                f"alloc_id {number} has {buffer.block.nbytes} bytes; asked for were {nbytes}"
            )
        if buffer.block.freed:
            context.heap.restore(buffer.block)
    else:
        buffer = context.heap.allocate(nbytes)
    lease = _Lease(buffer)
    array = array_on(lease, library, dtype, shape, strides)
    buffer.group = group
    kept[number] = (buffer, weakref.ref(lease))
    return array
