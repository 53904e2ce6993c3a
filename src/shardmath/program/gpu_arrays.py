"""One rank's arrays in a call on GPUs, and what it says of them.

An operand in host memory is on the GPU from when it is read on, and so is the place of its result.
What was found out about arrays is kept for others that look and lie alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardmath.arrays import ArraySpec, Library, library_of
from shardmath.arrays.base import share_memory
from shardmath.context.context import Context
from shardmath.handles.allocation import block_of
from shardmath.handles.device_array import (
    Result,
    read,
    result_in,
)
from shardmath.handles.operand import Operand

__all__ = ["GPUArrays", "read_arrays"]


@dataclass(frozen=True)
class GPUArrays:
    """What was found out about the user's arrays, `spec` being the operand's, `target` being `out`.

    `result` is the place of `out`, where that is not to be found anew in each call.
    """

    spec: ArraySpec
    operand: Operand
    target: Operand | None
    result: Result | None
    on_heap: bool

    def without_memory(self) -> GPUArrays:
        """These arrays, without a reference to what keeps their memory."""
        target = None if self.target is None else self.target.without_memory()
        operand = self.operand.without_memory()
        return replace(self, operand=operand, target=target, result=None)


def read_arrays(context: Context, operand: Any, out: Any, separate: str) -> GPUArrays:
    """Read the user's arrays, a copy of those in host memory. Local.

    Raises ValueError when one lies on another GPU, `out` cannot be written to or overlaps the
    operand where it has to be `separate`; UseAfterFree; HeapExhausted when there is no room for an
    operand in host memory.
    """
    library = library_of(operand)
    spec = library.spec(operand)
    result, on_host = None, spec.device == "cpu"
    if on_host and out is not None:
        _require_disjoint(library, operand, out, separate)
    array = read(context, operand, spec=spec)
    on_heap = array.block is not None
    if not on_heap and library.is_lazy(operand):  # it was read into a copy
        on_heap = block_of(context, operand) is not None
    if out is not None:
        result = result_in(context, out)
        if not on_host and array.overlaps(result.array):
            _require_disjoint(library, operand, out, separate)
    target = None if result is None else result.array
    return GPUArrays(spec, array, target, result, on_heap)


def _require_disjoint(library: Library, operand: Any, out: Any, separate: str) -> None:
    """Raise ValueError when `out` and the operand share memory."""
    other = library_of(out, "out")
    specs = library.spec(operand), other.spec(out)
    if not separate or specs[0].space != specs[1].space:
        return
    if specs[0].space == "cpu":
        views = library.host_view(operand), other.host_view(out)
    else:
        views = _address_range(library, operand), _address_range(other, out)
    if share_memory(*views):
        raise ValueError(f"out overlaps {separate}")


def _address_range(library: Library, x: Any) -> Any:
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
