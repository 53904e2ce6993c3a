"""One rank's arrays in a call on GPUs, and what it says of them.

An operand in host memory is on the GPU from when it is read on, and so is the place of its result.
What was found out about arrays is kept for others that look and lie alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardmath.arrays import ArraySpec, Library, library_of
from shardmath.arrays.base import HostArray, host_array, share_memory
from shardmath.base.immutable import Immutable
from shardmath.context.context import Context
from shardmath.handles.allocation import block_of
from shardmath.handles.device_array import Result, read, result_in
from shardmath.handles.operand import Operand
from shardmath.program.performing import Arguments, Names


class GPUArrays(Immutable):
    """The user's arrays by name, `spec` being the first operand's:
    `operands`, and as `targets` the results that were given.

    `places` are those of targets that are not to be found anew in each call.
    """

    spec: ArraySpec
    operands: Mapping[str, Operand]
    targets: Mapping[str, Operand]
    places: Mapping[str, Result]
    on_heap: bool

    def without_memory(self) -> GPUArrays:
        """These arrays, without a reference to what keeps their memory."""
        operands = {name: x.without_memory() for name, x in self.operands.items()}
        targets = {name: x.without_memory() for name, x in self.targets.items()}
        return replace(self, operands=operands, targets=targets, places={})


def read_arrays(context: Context, names: Names, arguments: Arguments) -> GPUArrays:
    """Read the user's arrays, a copy of those in host memory. Local.

    Raises ValueError when one lies on another GPU, or a result cannot be written to or overlaps an
    operand from which it has to be `separate`; UseAfterFree; HeapExhausted when there is no room
    for an operand in host memory.
    """
    given = {n: x for n, x in zip(names.operands, arguments.operands, strict=True) if x is not None}
    operands: dict[str, Operand] = {}
    on_heap = True
    for name, x in given.items():
        library = library_of(x, name)
        array = operands[name] = read(context, x, name, spec=library.spec(x))
        if name not in names.beside and array.block is None:
            lazy = library.is_lazy(x)  # it was read into a copy
            on_heap = on_heap and lazy and block_of(context, x) is not None
    places = {}
    for name, out in zip(names.results, arguments.results, strict=True):
        if out is None:
            continue
        own = [other for other, x in given.items() if x is out and other in names.optional]
        label = own[0] if own else name
        result = places[name] = result_in(context, out, label)
        for other, x in given.items() if names.separate else ():
            near = library_of(x).spec(x).device == "cpu" or operands[other].overlaps(result.array)
            if near and other not in own and _share_memory(x, out):
                raise ValueError(f"{label} overlaps {names.separate}")
    first = arguments.operands[0]
    targets = {name: place.array for name, place in places.items()}
    return GPUArrays(library_of(first).spec(first), operands, targets, places, on_heap)


def _share_memory(operand: Any, out: Any) -> bool:
    """Whether two arrays of the user's, one of them to be written to, share memory."""
    library, other = library_of(operand), library_of(out, "out")
    specs = library.spec(operand), other.spec(out)
    if specs[0].space != specs[1].space:
        return False
    if specs[0].space == "cpu":
        return share_memory(library.host_view(operand), other.host_view(out))
    return share_memory(_address_range(library, operand), _address_range(other, out))


def _address_range(library: Library, x: Any) -> HostArray:
    """An array of NumPy at the same addresses, which nobody may read."""
    spec = library.spec(x)
    strides = [stride * spec.itemsize for stride in spec.strides]
    return host_array(library.pointer(x), spec.shape, strides, f"|V{spec.itemsize}", None)
