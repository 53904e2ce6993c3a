"""One rank's arrays in a redistribution on GPUs, and what it says of them.

An operand in host memory is on the heap from when it is read on, and so is the place of its result.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardmath.arrays import Library, library_of
from shardmath.arrays.base import share_memory
from shardmath.context import DistributedContext
from shardmath.operators.redistribute.notes import Note
from shardmath.operators.redistribute.problem import Problem
from shardmath.redistribution import Exposed
from shardmath.symmetric.allocation import block_of
from shardmath.symmetric.device_array import (
    DeviceArray,
    Result,
    new_result,
    read,
    result_in,
    stream_of,
)

__all__ = ["DeviceArrays"]


class DeviceArrays:
    """One rank's arrays for one execution, on its GPU. `result` is None until there is one."""

    def __init__(self, context: DistributedContext, operand: Any, out: Any, stream: Any) -> None:
        """Take the user's arrays.

        Raises ValueError when one lies on another GPU, `out` cannot be written to or overlaps the
        operand, or the stream is another device's; TypeError for what is no stream; UseAfterFree;
        HeapExhausted when there is no room for an operand in host memory.
        """
        self._context = context
        self._user = operand
        library = library_of(operand)
        spec = library.spec(operand)
        self.stream = stream_of(context, spec, stream)
        if out is not None:
            _require_apart(library, operand, out)
        self.result: Result | None = None if out is None else result_in(context, out)
        self.operand = read(context, operand)
        self._on_heap = spec.device == "cpu" or block_of(context, operand) is not None

    def allocate(self, problem: Problem) -> None:
        """Make room for the result, where none was given. Raises HeapExhausted."""
        if self.result is None:
            shape = problem.transfer.dst.local_shape(self._context.rank)
            self.result = new_result(
                self._context,
                self._user,
                shape,
                problem.dtype,
                problem.order,
                on_heap=self._on_heap,
            )

    def note(self, staging: Exposed | None) -> bytes:
        """What this rank says of this execution."""
        result = self.result
        on_heap = self._on_heap if result is None else result.array.block is not None
        return Note(
            operand=self._exposed(self.operand),
            result=None if result is None else self._exposed(result.array),
            staging=staging,
            allocates=result is None,
            on_heap=on_heap,
        ).pack()

    def _exposed(self, array: DeviceArray) -> Exposed | None:
        if array.block is None:
            return None
        self._context.announce(array.block)
        if not array.size:
            return Exposed(array.block.location, 0, 0, array.strides)
        return Exposed.within(array.block, array.address, array.span, array.strides)


def _require_apart(library: Library, operand: Any, out: Any) -> None:
    """Raise ValueError when `out` and the operand share memory."""
    other = library_of(out, "out")
    specs = library.spec(operand), other.spec(out)
    if specs[0].space != specs[1].space:
        return
    if specs[0].space == "cpu":
        views = library.host_view(operand), other.host_view(out)
    else:
        views = _outline(library, operand), _outline(other, out)
    if share_memory(*views):
        raise ValueError("out overlaps the operand: a redistribution cannot be done in place")


def _outline(library: Library, x: Any) -> Any:
    """An array of NumPy at the same addresses, which nobody may read."""
    spec = library.spec(x)
    interface = {
        "shape": spec.shape,
        "strides": tuple(stride * spec.itemsize for stride in spec.strides),
        "typestr": f"|V{spec.itemsize}",
        "data": (library.pointer(x), False),
        "version": 3,
    }
    return np.asarray(type("Outline", (), {"__array_interface__": interface})())
