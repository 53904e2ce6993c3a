"""One rank's arrays in a redistribution on GPUs, and what it says of them.

An operand in host memory is on the heap from when it is read on, and so is the place of its result.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardmath.arrays import Library, library_of
from shardmath.arrays.base import share_memory
from shardmath.context import Context
from shardmath.operators.redistribute.notes import Made, Note
from shardmath.operators.redistribute.problem import Problem
from shardmath.symmetric.allocation import block_of
from shardmath.symmetric.device_array import (
    Result,
    new_result,
    read,
    result_in,
    stream_of,
)

__all__ = ["DeviceArrays"]


class DeviceArrays:
    """One rank's arrays for one execution, on its GPU. `result` is None until there is one."""

    def __init__(self, context: Context, operand: Any, out: Any, stream: Any) -> None:
        """Take the user's arrays.

        Raises ValueError when one lies on another GPU, `out` cannot be written to or overlaps the
        operand, or the stream is another device's; TypeError for what is no stream; UseAfterFree;
        HeapExhausted when there is no room for an operand in host memory.
        """
        self._context = context
        self._user = operand
        self._made: Made | None = None
        self.result: Result | None = None
        library = library_of(operand)
        spec = library.spec(operand)
        self.stream = stream_of(context, spec, stream)
        on_host = spec.device == "cpu"
        if on_host and out is not None:
            _require_apart(library, operand, out)
        self.operand = read(context, operand, spec=spec)
        self._on_heap = self.operand.block is not None
        if not self._on_heap and library.is_lazy(operand):  # it was read into a copy
            self._on_heap = block_of(context, operand) is not None
        if out is not None:
            self.result = result_in(context, out)
            if not on_host and self.operand.overlaps(self.result.array):
                _require_apart(library, operand, out)

    def allocate(self, problem: Problem) -> None:
        """Make room for the result, where none was given. Raises HeapExhausted.

        One that was made for another problem goes.
        """
        shape = problem.transfer.dst.local_shape(self._context.rank)
        made: Made = (shape, problem.order)
        if self.result is not None and self._made in (None, made):
            return
        self._made = self.result = None
        context, order = self._context, problem.order
        self.result = new_result(
            context, self._user, shape, problem.dtype, order, on_heap=self._on_heap
        )
        self._made = made

    def note(self, staging: bytes) -> bytes:
        """What this rank says of this execution. `staging` is packed, b"" where there is none."""
        target = None if self.result is None else self.result.array
        return Note.packed(
            self.operand.told,
            b"" if target is None else target.told,
            staging,
            allocates=target is None,
            on_heap=self._on_heap if target is None else target.block is not None,
            made=self._made,
        )


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
