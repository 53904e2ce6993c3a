"""One rank's arrays in a redistribution on GPUs, and what it says of them.

An operand in host memory is on the heap from when it is read on, and so is the place of its result.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from shardmath.arrays import ArraySpec, Library, library_of
from shardmath.arrays.base import share_memory
from shardmath.context import DistributedContext
from shardmath.operators.redistribute.notes import Made, Note
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

_KEPT = 64  # places of arrays


@dataclass(frozen=True, slots=True)
class Placed:
    """An array on this GPU, and what is said of its place: b"" where it is not on the heap."""

    array: DeviceArray
    said: bytes

    @classmethod
    def of(cls, context: DistributedContext, array: DeviceArray) -> Self:
        """Let peers reach it, if it is on the heap. Local."""
        if array.block is None:
            return cls(array, b"")
        context.announce(array.block)
        if not array.size:
            return cls(array, Exposed(array.block.location, 0, 0, array.strides).pack())
        shown = Exposed.within(array.block, array.address, array.span, array.strides)
        return cls(array, shown.pack())


class DeviceArrays:
    """One rank's arrays for one execution, on its GPU. `result` is None until there is one."""

    def __init__(
        self, context: DistributedContext, operand: Any, out: Any, stream: Any, known: KnownArrays
    ) -> None:
        """Take the user's arrays. `known` is what earlier executions have found out.

        Raises ValueError when one lies on another GPU, `out` cannot be written to or overlaps the
        operand, or the stream is another device's; TypeError for what is no stream; UseAfterFree;
        HeapExhausted when there is no room for an operand in host memory.
        """
        self._context = context
        self._user = operand
        self._made: Made | None = None
        self._target: Placed | None = None
        self.result: Result | None = None
        library = library_of(operand)
        spec = library.spec(operand)
        self.stream = stream_of(context, spec, stream)
        if spec.device == "cpu":
            if out is not None:
                _require_apart(library, operand, out)
                self._take(result_in(context, out))
            self._source, self._on_heap = Placed.of(context, read(context, operand)), True
            return
        self._source = known.operand(operand, spec)
        self._on_heap = self.operand.block is not None
        if not self._on_heap and library.is_lazy(operand):  # it was read into a copy
            self._on_heap = block_of(context, operand) is not None
        if out is not None:
            self._target = known.out(out)
            if self.operand.overlaps(self._target.array):
                _require_apart(library, operand, out)
            self.result = Result(self._target.array, out)

    @property
    def operand(self) -> DeviceArray:
        """The operand, or a copy of it."""
        return self._source.array

    def allocate(self, problem: Problem) -> None:
        """Make room for the result, where none was given. Raises HeapExhausted.

        One that was made for another problem goes.
        """
        shape = problem.transfer.dst.local_shape(self._context.rank)
        made: Made = (shape, problem.order)
        if self.result is not None and self._made in (None, made):
            return
        self._made = self.result = self._target = None
        context, order = self._context, problem.order
        self._take(
            new_result(context, self._user, shape, problem.dtype, order, on_heap=self._on_heap)
        )
        self._made = made

    def _take(self, result: Result) -> None:
        self.result, self._target = result, Placed.of(self._context, result.array)

    def note(self, staging: bytes) -> bytes:
        """What this rank says of this execution. `staging` is packed, b"" where there is none."""
        target = self._target
        return Note.packed(
            self._source.said,
            b"" if target is None else target.said,
            staging,
            allocates=target is None,
            on_heap=self._on_heap if target is None else target.array.block is not None,
            made=self._made,
        )


class KnownArrays:
    """Where arrays of earlier executions lie, so that the same ones are not looked at again.

    It refers to none of them. What is compared is all that was looked at: library, shape, strides,
    type, address, and whether the block of the heap there is still the same and in use.
    """

    def __init__(self, context: DistributedContext) -> None:
        self._context = context
        self._known: OrderedDict[tuple[Any, ...], Placed] = OrderedDict()

    @classmethod
    def of(cls, context: DistributedContext) -> KnownArrays:
        """Those of a context."""
        known: KnownArrays = context.cache("places of arrays", lambda: cls(context))
        return known

    def operand(self, x: Any, spec: ArraySpec) -> Placed:
        """The operand `x`, which is on a GPU."""
        key = (spec, library_of(x).pointer(x), "read")
        return self._find(key, x) or self._keep(key, x, read(self._context, x))

    def out(self, x: Any) -> Placed:
        """The array `x`, to be written to."""
        library = library_of(x, "out")
        key = (library.spec(x), library.pointer(x), "written")
        return self._find(key, x) or self._keep(key, x, result_in(self._context, x).array)

    def _find(self, key: tuple[Any, ...], x: Any) -> Placed | None:
        found = self._known.get(key)
        if found is None or library_of(x).is_lazy(x):
            return None
        return found if found.array.is_there(self._context) else None

    def _keep(self, key: tuple[Any, ...], x: Any, array: DeviceArray) -> Placed:
        """Remember where it lies, if its memory is what the user gave."""
        made = Placed.of(self._context, array)
        spec: ArraySpec = key[0]
        if spec.size and spec.space != "cpu" and not library_of(x).is_lazy(x):
            self._known[key] = Placed(replace(array, keep=None), made.said)
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return made


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
