"""One rank's arrays in a redistribution on GPUs, and what it says of them.

An operand in host memory is on the heap from when it is read on, and so is the place of its result.
"""

from __future__ import annotations

from dataclasses import replace
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

__all__ = ["DeviceArrays", "KnownArrays"]


class DeviceArrays:
    """One rank's arrays for one execution, on its GPU. `result` is None until there is one."""

    def __init__(
        self,
        context: DistributedContext,
        operand: Any,
        out: Any,
        stream: Any,
        known: KnownArrays | None = None,
    ) -> None:
        """Take the user's arrays. `known` is what the last execution has found out.

        Raises ValueError when one lies on another GPU, `out` cannot be written to or overlaps the
        operand, or the stream is another device's; TypeError for what is no stream; UseAfterFree;
        HeapExhausted when there is no room for an operand in host memory.
        """
        self._context = context
        self._user = operand
        library = library_of(operand)
        spec = library.spec(operand)
        self.stream = stream_of(context, spec, stream)
        self.result: Result | None
        found = None if known is None or out is None else known.find(operand, out)
        if found is not None:
            self._on_heap = found[0].block is not None
            self.operand, self.result = found[0], Result(found[1], out)
            return
        if out is not None:
            _require_apart(library, operand, out)
        self.result = None if out is None else result_in(context, out)
        self.operand = read(context, operand)
        self._on_heap = spec.device == "cpu" or block_of(context, operand) is not None
        if known is not None and self.result is not None:
            known.keep(operand, out, self.operand, self.result.array)

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
            operand=self.exposed(self.operand),
            result=None if result is None else self.exposed(result.array),
            staging=staging,
            allocates=result is None,
            on_heap=on_heap,
        ).pack()

    def exposed(self, array: DeviceArray) -> Exposed | None:
        """Where peers find an array of the heap; None for other memory."""
        if array.block is None:
            return None
        self._context.announce(array.block)
        if not array.size:
            return Exposed(array.block.location, 0, 0, array.strides)
        return Exposed.within(array.block, array.address, array.span, array.strides)


class KnownArrays:
    """Where the arrays of the last execution lie, so that the same ones are not looked at again.

    It refers to none of them. What is compared is all that was looked at: library, shape, strides,
    type, address, and whether the block of the heap there is still the same and in use.
    """

    def __init__(self, context: DistributedContext) -> None:
        self._context = context
        self._key: tuple[Any, ...] | None = None
        self._arrays: tuple[DeviceArray, DeviceArray] | None = None

    def find(self, operand: Any, out: Any) -> tuple[DeviceArray, DeviceArray] | None:
        """The operand and `out` as arrays of this GPU, if they are those of the last execution."""
        if self._arrays is None or self._key != self._outlined(operand, out):
            return None
        for array in self._arrays:
            block = self._context.heap.find(array.address)
            if block is not array.block or (block is not None and block.freed):
                return None
        return self._arrays

    def keep(self, operand: Any, out: Any, *arrays: DeviceArray) -> None:
        """Remember these, where their memory is what the user gave."""
        self._arrays = None
        self._key = key = self._outlined(operand, out)
        if not any(lazy or spec.space == "cpu" or not spec.size for spec, _, lazy in key):
            first, second = (replace(array, keep=None) for array in arrays)
            self._arrays = first, second

    @staticmethod
    def _outlined(*arrays: Any) -> tuple[Any, ...]:
        outline = []
        for x in arrays:
            library = library_of(x)
            lazy = hasattr(x, "is_conj") and (x.is_conj() or x.is_neg())
            outline.append((library.spec(x), library.pointer(x), lazy))
        return tuple(outline)


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
