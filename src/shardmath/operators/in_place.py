"""Results in the memory of an operand, which may differ from the result in shape and type.

A result may be larger than the operand only if `allocate_operand` has made room for it.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, Literal

import numpy as np

from shardmath.arrays import Library, dtypes, library_of
from shardmath.arrays.base import HostArray, host_array
from shardmath.arrays.spec import ArraySpec, order_of, packed_strides
from shardmath.context.context import Context
from shardmath.handles.allocation import Owner, array_on, block_of
from shardmath.symmetric.heap import Block, Buffer
from shardmath.transport.base import DeviceBytes


def array_in_place(
    context: Context, operand: Any, shape: tuple[int, ...], dtype: str, order: Literal["C", "F"]
) -> Any:
    """An array in the operand's memory: packed, of that shape, dtype and memory order; the operand
    itself if it has that shape and dtype.

    Raises RuntimeError when the operand's memory is too small for it, or not contiguous.
    """
    library = library_of(operand)
    spec = library.spec(operand)
    if (spec.shape, spec.dtype) == (shape, dtype):
        return operand
    kind = dtypes.of(dtype)
    need = math.prod(shape) * kind.itemsize
    owner, have = _memory_of(context, library, operand, spec)
    if owner is None:
        if order_of(spec.shape, spec.strides) == "strided":
            raise RuntimeError(
                f"options.inplace=True: the operand, of strides {spec.strides}, is not contiguous, "
                f"and the result has another shape, {shape}; use an operand from "
                "allocate_operand, or inplace=False"
            )
        have = spec.nbytes
    if need > have:
        raise RuntimeError(
            f"options.inplace=True: the result takes {need:,} bytes, the operand has {have:,}; use "
            "an operand from allocate_operand, or inplace=False"
        )
    if owner is None:
        address = library.pointer(operand)
        if spec.device == "cpu":
            owner = host_array(address, (have,), (1,), "|u1", operand)
        else:
            owner = Owner(DeviceBytes(address, have, spec.device), operand)
    return array_on(owner, library, kind, shape, packed_strides(shape, axes=order))


def room_for_operand(context: Context, nbytes: int, *, on_heap: bool) -> Buffer | HostArray:
    """Memory for one operand: on the heap, or ordinary memory of the host. Local."""
    if on_heap:
        buffer = context.heap.allocate(nbytes)
        _operand_blocks(context).add(buffer.block)
        return buffer
    memory = np.empty(max(nbytes, 1), np.uint8)  # one byte at least, for an address of its own
    _operands_on_host(context)[memory.ctypes.data] = memory
    return memory


def _memory_of(
    context: Context, library: Library, operand: Any, spec: ArraySpec
) -> tuple[object, int]:
    """The memory that `room_for_operand` made for the operand, and its bytes; else (None, 0).

    Raises UseAfterFree.
    """
    place = block_of(context, operand)
    if place is not None:
        block, offset = place
        known = offset == 0 and block in _operand_blocks(context)
        return (block.buffer(), block.nbytes) if known else (None, 0)
    if spec.device != "cpu":
        return None, 0
    address = library.pointer(operand) if spec.size else library.anchor(operand)
    memory = _operands_on_host(context).get(address)
    return (None, 0) if memory is None else (memory, memory.nbytes)


def _operand_blocks(context: Context) -> weakref.WeakSet[Block]:
    """The heap blocks of operands from `allocate_operand`, one for each operand."""
    return context.cache("fft operands", weakref.WeakSet)


def _operands_on_host(context: Context) -> weakref.WeakValueDictionary[int, HostArray]:
    """The ordinary memory of operands from `allocate_operand`, by address.

    Freed memory drops out, so an array that starts at one of these addresses lies in that memory.
    """
    known: weakref.WeakValueDictionary[int, HostArray]
    known = context.cache("fft operands on the host", weakref.WeakValueDictionary)
    return known
