"""One rank's arrays in a redistribution on GPUs, and what it says of them.

An operand in host memory is on the GPU from when it is read on, and so is the place of its result.
What was found out about arrays is kept for others that look and lie alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from shardmath.arrays import ArraySpec, Library, library_of
from shardmath.arrays.base import share_memory
from shardmath.context import Context
from shardmath.lru_cache import LRUCache
from shardmath.operators.redistribute.notes import Note, ResultLayout
from shardmath.operators.redistribute.problem import Problem
from shardmath.symmetric.allocation import block_of
from shardmath.symmetric.device_array import (
    Blank,
    DeviceArray,
    Result,
    read,
    result_in,
    stream_of,
)
from shardmath.symmetric.fingerprint import fingerprint

__all__ = ["DeviceArrays"]

_KEPT = 64  # arrays that look and lie alike, and notes on each


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
        self._made: ResultLayout | None = None
        library = library_of(operand)
        known: LRUCache[Any, _CachedArrays] = context.cache("arrays redistributed", _CACHE)
        key = fingerprint(context, operand, out)
        found = None if key is None else known.find(key)
        spec = library.spec(operand) if found is None else found.spec
        self.stream = stream_of(context, spec, stream)
        if found is not None:
            target = found.target
            self.result = None if target is None else Result(target.address, target, out)
        else:
            found, self.result = _read(context, library, spec, operand, out)
            if key is not None:
                known.keep(key, found.without_memory())
        self._read = found
        self.operand = found.operand

    def allocate(self, problem: Problem) -> None:
        """Make room for the result, where none was given. Raises HeapExhausted.

        One that was made for another problem goes.
        """
        blank = self._read.blanks.made(id(problem), lambda: self._blank(problem))
        if self.result is not None and self._made in (None, blank.made):
            return
        self._made = self.result = None
        self.result = blank.blank.make()
        self._made = blank.made

    def _blank(self, problem: Problem) -> _NewResult:
        context, order, on_heap = self._context, problem.order, self._read.on_heap
        shape = problem.transfer.dst.local_shape(context.rank)
        blank = Blank(context, self._user, shape, problem.dtype, order, on_heap=on_heap)
        return _NewResult(problem, (shape, order), blank)

    def note(self, staging: bytes) -> bytes:
        """What this rank says of this execution. `staging` is packed, b"" where there is none."""
        place = None if self.result is None else self.result.address
        return self._read.notes.made((place, staging, self._made), lambda: self._note(staging))

    def _note(self, staging: bytes) -> bytes:
        target = None if self.result is None else self.result.array
        return Note.packed(
            self.operand.told,
            b"" if target is None else target.told,
            staging,
            allocates=target is None,
            on_heap=self._read.on_heap if target is None else target.block is not None,
            made=self._made,
        )


@dataclass(frozen=True)
class _NewResult:
    """How new results look for a problem."""

    problem: Problem
    made: ResultLayout
    blank: Blank


@dataclass(frozen=True)
class _CachedArrays:
    """What was found out about the user's arrays, `spec` being the operand's, `target` being `out`;
    and what follows for problems, by their identity, and for places of results.
    """

    spec: ArraySpec
    operand: DeviceArray
    target: DeviceArray | None
    on_heap: bool
    blanks: LRUCache[int, _NewResult] = field(default_factory=lambda: LRUCache(_KEPT), repr=False)
    notes: LRUCache[Any, bytes] = field(default_factory=lambda: LRUCache(_KEPT), repr=False)

    def without_memory(self) -> _CachedArrays:
        """The same, which keeps no array."""
        target = None if self.target is None else self.target.without_memory()
        operand = self.operand.without_memory()
        return replace(self, operand=operand, target=target)


_CACHE = partial(LRUCache[Any, _CachedArrays], _KEPT)


def _read(
    context: Context, library: Library, spec: ArraySpec, operand: Any, out: Any
) -> tuple[_CachedArrays, Result | None]:
    result, on_host = None, spec.device == "cpu"
    if on_host and out is not None:
        _require_disjoint(library, operand, out)
    array = read(context, operand, spec=spec)
    on_heap = array.block is not None
    if not on_heap and library.is_lazy(operand):  # it was read into a copy
        on_heap = block_of(context, operand) is not None
    if out is not None:
        result = result_in(context, out)
        if not on_host and array.overlaps(result.array):
            _require_disjoint(library, operand, out)
    return _CachedArrays(spec, array, None if result is None else result.array, on_heap), result


def _require_disjoint(library: Library, operand: Any, out: Any) -> None:
    """Raise ValueError when `out` and the operand share memory."""
    other = library_of(out, "out")
    specs = library.spec(operand), other.spec(out)
    if specs[0].space != specs[1].space:
        return
    if specs[0].space == "cpu":
        views = library.host_view(operand), other.host_view(out)
    else:
        views = _address_range(library, operand), _address_range(other, out)
    if share_memory(*views):
        raise ValueError("out overlaps the operand: a redistribution cannot be done in place")


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
