"""What a caller hands in, as the collectives see it: flat elements, and a spec that ranks compare.

Nothing is written here, and every complaint is an exception of the door: it is raised inside
`describe`, and so reaches all ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from shardmath.arrays import Library, array_of, library_and_spec, raw_view
from shardmath.arrays.base import HostArray
from shardmath.arrays.spec import ArraySpec
from shardmath.context.context import Context, open_contexts, require_context
from shardmath.context.distributed_context import DistributedContext
from shardmath.errors import CollectiveMismatch, OpTimeout, RankFailure, UseAfterFree
from shardmath.geometry import Spans
from shardmath.redistribution import Window
from shardmath.symmetric.heap import Block, Location

__all__ = [
    "Operand",
    "Output",
    "OutputSpec",
    "Shape",
    "as_axis",
    "as_counts",
    "as_index",
    "bounds",
    "column_view",
    "context_of",
    "heap_location",
    "live_block",
    "output_spec",
    "require_outputs_fit",
    "slab_counts",
    "span_of_columns",
    "view_at_address",
]

Shape = tuple[int, ...]
_FREED = (
    "lies in symmetric memory that has been freed; free it after its last use, or leave that to "
    "the garbage collector"
)
OutputSpec = tuple[str, str, Shape] | None


@dataclass(frozen=True)
class Operand:
    """One rank's array: its library, its spec, and its elements, as NumPy sees them.

    `location` says where `flat` lies on the heap; None where it is ordinary memory or a copy.
    """

    library: Library
    spec: ArraySpec
    view: HostArray
    location: Location | None

    @cached_property
    def flat(self) -> HostArray:
        """The elements in C order: in place, or what a copy had when this was first asked for."""
        return _flat(self.view if self.view.flags.c_contiguous else _packed(self.view))

    def for_one_call(self) -> Operand:
        """This operand for a single call: what `flat` copies, it copies anew for each call."""
        return self if self.view.flags.c_contiguous else replace(self)

    def without_memory(self) -> Operand:
        """This operand without a reference to its array, which the caller keeps."""
        return replace(self, view=view_at_address(self.view))

    @classmethod
    def of(cls, x: Any, context: Context) -> Operand:
        """The operand `x`, an array or a number.

        Raises ValueError for what is no array of the host's memory.
        """
        x = array_of(x)
        library, spec = library_and_spec(x, "x")
        view = library.host_view(x)
        pointer = library.pointer(x)
        location = heap_location(context, pointer) if spec.size else None
        own = view is x or view.ctypes.data == pointer  # a lazy conjugate is resolved into a copy
        return cls(library, spec, view, location if own and view.flags.c_contiguous else None)

    def without_alias(self, out: HostArray | None) -> Operand:
        """The operand on memory that writing into `out` does not change."""
        if out is None or not self.spec.size or not np.may_share_memory(out, self.flat):
            return self
        return Operand(self.library, self.spec, self.flat.copy(), None)


@dataclass(frozen=True)
class Output:
    """The array that receives a result: `flat` are its elements in C order, to be written.

    Where `array` is not C-ordered, `flat` is memory of its own, which `finish` copies over.
    """

    array: Any
    view: HostArray
    flat: HostArray

    @classmethod
    def of(
        cls, out: Any, view: HostArray | None, library: Library, shape: Shape, dtype: str
    ) -> Output:
        """The user's `out`, as NumPy sees it in `view`; a new C-ordered array where it is None."""
        array = out
        if view is None:
            array = library.empty(shape, dtype)
            view = library.host_view(array, writable=True)
        if view.flags.c_contiguous:
            return cls(array, view, _flat(view))
        return cls(array, view, np.empty(view.size, view.dtype))

    def finish(self) -> Any:
        """The array, with all its elements in place."""
        if not self.view.flags.c_contiguous:
            np.copyto(raw_view(self.view), raw_view(self.flat.reshape(self.view.shape)))
        return self.array


def output_spec(out: Any, context: Context) -> tuple[OutputSpec, HostArray | None]:
    """What `out` is, for all ranks to check, and its memory.

    Raises ValueError when it cannot be written, UseAfterFree when it has been freed.
    """
    if out is None:
        return None, None
    library, spec = library_and_spec(out, "out")
    view = library.host_view(out, writable=True)
    block = context.heap.find(library.pointer(out)) if spec.size else None
    if block is not None and block.freed:
        raise UseAfterFree(f"out {_FREED}")
    return (library.name, spec.dtype, spec.shape), view


def heap_location(context: Context, address: int) -> Location | None:
    """Where `address` lies on this rank's heap, which peers may read from now on; else None.

    Raises UseAfterFree when the block there has been freed.
    """
    block = live_block(context, address)
    if block is None:
        return None
    context.announce(block)
    return Location(block.location.segment, block.location.offset + address - block.address)


def live_block(context: Context, address: int) -> Block | None:
    """The block of this rank's heap in which `address` lies, if any; UseAfterFree if freed."""
    block = context.heap.find(address)
    if block is not None and block.freed:
        raise UseAfterFree(f"an operand {_FREED}")
    return block


def context_of(operation: str, context: DistributedContext | None) -> Context:
    """`context`, or the current one where it is None.

    Raises TypeError for anything else, RuntimeError when there is no current one. Where this
    process has one context only, its ranks are told: they call `operation` there, if anywhere.
    """
    if context is None:
        return require_context()
    if isinstance(context, Context):
        return context
    wrong = TypeError(f"context is a DistributedContext or None, not {context!r}")
    candidates = open_contexts()
    if len(candidates) == 1:

        def refuse() -> bytes:
            raise wrong

        with suppress(OpTimeout, RankFailure, CollectiveMismatch):  # they called nothing there
            candidates[0].gather(operation, refuse)
    raise wrong


def as_index(what: str, value: Any, bound: int, *, negative: bool = False) -> int:
    """`value` as an index below `bound`; negative ones count from the end where that is allowed."""
    try:
        index = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} is an integer, not {value!r}") from None
    low = -bound if negative else 0
    if isinstance(value, bool) or not low <= index < bound:
        raise ValueError(f"{what} is an integer from {low} to {bound - 1}, not {value!r}")
    return index % bound


def as_axis(axis: Any, ndim: int) -> int:
    """`axis` as an index of one of `ndim` axes, counted from the end where it is negative."""
    if ndim == 0:
        raise ValueError(f"axis={axis!r}: an array of no axes has none; pass x.reshape(1)")
    return as_index("axis", axis, ndim, negative=True)


def as_counts(
    what: str, counts: Sequence[int] | None, size: int, total: int | None
) -> Shape | None:
    """`counts`, one per rank, as a tuple that adds up to `total` where that is known."""
    if counts is None:
        return None
    try:
        numbers = tuple(operator.index(n) for n in counts)
    except TypeError:
        raise TypeError(f"{what} is a sequence of {size} integers, not {counts!r}") from None
    if len(numbers) != size or any(n < 0 for n in numbers):
        raise ValueError(f"{what} holds {size} numbers >= 0, one per rank, not {list(numbers)}")
    if total is not None and sum(numbers) != total:
        raise ValueError(f"{what} {list(numbers)} add up to {sum(numbers)}; the axis has {total}")
    return numbers


def slab_counts(extent: int, size: int) -> Shape:
    """`extent` divided among `size` ranks as a slab is."""
    return tuple(Spans.even(extent, size, rank).length for rank in range(size))


def bounds(counts: Sequence[int]) -> list[int]:
    """Where each part begins, and where the last one ends."""
    return [0, *accumulate(counts)]


def column_view(flat: HostArray, shape: Shape, axis: int) -> tuple[HostArray, int]:
    """C-ordered elements as a matrix in which a range of `axis` is a range of columns.

    Returns the matrix, of as many rows as the axes before `axis` have indices, and the number of
    columns that one index of `axis` takes.
    """
    rows, columns = prod(shape[:axis]), prod(shape[axis + 1 :])
    return flat.reshape(rows, shape[axis] * columns), columns


def span_of_columns(shape: Shape, axis: int, first: int, count: int) -> tuple[int, int]:
    """The range of C-ordered elements in which all of those indices of `axis` lie."""
    rows, width = prod(shape[:axis]), prod(shape[axis + 1 :])
    if not rows * count * width:
        return 0, 0
    return first * width, ((rows - 1) * shape[axis] + first + count) * width


def require_outputs_fit(
    outputs: Sequence[OutputSpec], libraries: Sequence[str], dtype: str, shapes: Sequence[Shape]
) -> None:
    """Raise ValueError where a rank's `out` is not what its result will be."""
    for rank, (out, library, shape) in enumerate(zip(outputs, libraries, shapes, strict=True)):
        if out is not None and out != (library, dtype, shape):
            raise ValueError(
                f"rank {rank}: out is a {out[0]} array of {out[1]} {out[2]}; "
                f"the result is a {library} array of {dtype} {shape}"
            )


def view_at_address(view: HostArray) -> HostArray:
    """The elements of `view`, as an array that keeps no reference to their memory."""
    return Window(view.__array_interface__["data"][0], view.strides, None).array(
        view.shape, view.dtype
    )


def _flat(view: HostArray) -> HostArray:
    return view if view.ndim == 1 and view.flags.c_contiguous else view.reshape(-1)


def _packed(view: HostArray) -> HostArray:
    """The elements in C order, on memory of their own."""
    packed = np.empty(view.shape, view.dtype)
    np.copyto(raw_view(packed), raw_view(view))
    return packed
