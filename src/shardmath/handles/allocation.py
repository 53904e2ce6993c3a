"""Arrays on the symmetric heap: made, recognised and freed.

An array on the heap is an ordinary NumPy array, CuPy array or torch tensor; what makes it symmetric
is where its memory lies, so it and every view of it are recognised by address. The memory lives as
long as any of them. Ranks agree on an allocation, so that all raise an error of one; freeing, by
hand or by the garbage collector, is local.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Sequence
from logging import Logger
from types import ModuleType
from typing import Any, Literal

import numpy as np

from shardmath.arrays import DType, Library, library_of, library_of_package
from shardmath.arrays.dtypes import of as dtype_of
from shardmath.arrays.spec import Packed, byte_span, packed_strides
from shardmath.base.collective_call import collective_call
from shardmath.base.immutable import Immutable
from shardmath.base.log import package_logger
from shardmath.base.untraced import untraced
from shardmath.context.agreement import require_equal
from shardmath.context.context import Context, open_contexts, require_context
from shardmath.errors import CollectiveMismatch, UseAfterFree
from shardmath.symmetric.heap import Block, Buffer, Heap, Location
from shardmath.transport.base import Memory

_Place = tuple[Block, int]


@collective_call
def allocate_symmetric_memory(
    shape: int | Sequence[int],
    package: ModuleType,
    *,
    dtype: Any = None,
    axis_order: Literal["C", "F"] | Sequence[int] = "C",
    make_symmetric: bool = False,
    skip_symmetric_check: bool = False,
    logger: Logger | None = None,
) -> Any:
    """An uninitialised array of `shape` on the symmetric heap. Collective, unless told otherwise.

        x = allocate_symmetric_memory((1000, 50), numpy, dtype=numpy.float32)

    `package` is the module numpy, torch or cupy: numpy where the context's device is "cpu", cupy
    where it is a GPU, torch on both. `dtype` None means float64, for torch its default.
    `axis_order` is "C", "F", or the axes from the one whose elements are adjacent to the outermost:
    "C" of three axes is (2, 1, 0). The ranks' shapes may differ as long as their bytes are equal;
    with `make_symmetric` every rank reserves as many bytes as the rank that needs most. With
    `skip_symmetric_check` nothing is compared, sizes may differ, and the call is local.

    Raises on all ranks ValueError for another package, a bad shape, dtype or axis order, both flags
    at once, and bytes that differ (naming ranks and bytes); TypeError for a shape, flag or logger
    of the wrong type; HeapExhausted when a rank lacks memory; RuntimeError before `initialize`.
    Source: nvmath.distributed.allocate_symmetric_memory.
    """
    context = require_context()

    def request() -> _Request:
        _check_flags(make_symmetric=make_symmetric, skip_symmetric_check=skip_symmetric_check)
        if logger is not None and not isinstance(logger, Logger):
            raise TypeError(f"logger is a logging.Logger or None, not {logger!r}")
        return _Request.of(shape, package, dtype, axis_order)

    if _is(True, skip_symmetric_check) and _is(False, make_symmetric):
        asked = request()
        array = asked.array(context.heap.allocate(asked.nbytes))
    else:
        asked, array = _allocate_together(context, request, make_symmetric)
    (logger or package_logger()).info(
        "allocated %s on the symmetric heap of rank %d", asked, context.rank
    )
    return observed(context, array)


@untraced
def free_symmetric_memory(*tensors: Any) -> None:
    """Give the memory of `tensors` back now, rather than when their last reference goes. Local.

    A hint: an array that nobody refers to any more is freed by itself. Memory that peers may still
    read returns to use when they have dropped it too. Afterwards the arrays, and all views of them,
    must not be used; shardmath raises UseAfterFree where they are passed to it.

    Raises TypeError for an array in ordinary memory, UseAfterFree (a RuntimeError) for one that was
    freed before, RuntimeError before `initialize`; nothing is freed then.
    Source: nvmath.distributed.free_symmetric_memory.
    """
    if not tensors:
        return
    require_context()
    doomed: dict[Block, Heap] = {}
    for position, tensor in enumerate(tensors):
        heap, block = _owner_of(position, tensor)
        if block.freed or block in doomed:
            raise UseAfterFree(f"argument {position} was freed before")
        doomed[block] = heap
    for block, heap in doomed.items():
        buffer = block.buffer()
        if buffer is not None:
            buffer.rendezvous_states.clear()
        heap.free(block)


@untraced
def is_symmetric(array: Any) -> bool:
    """Whether `array` lies on the symmetric heap of an open context, freed or not. Local.

    Raises ValueError when it is no array.
    """
    library = library_of(array, "tensor")
    return any(_find(context.heap, library, array) is not None for context in open_contexts())


def block_of(context: Context, array: Any, what: str = "an operand") -> _Place | None:
    """The block that `array` lies in, and the byte offset of its element (0, 0, ...) there.

    None for ordinary memory, for memory of peers, and for arrays that reach beyond their block.
    Raises UseAfterFree when the block was freed, ValueError when `array` is no array.
    """
    place = _find(context.heap, library_of(array), array)
    if place is not None:
        require_live(place[0], what)
    return place


def require_live(block: Block, what: str = "an operand") -> None:
    """Raise UseAfterFree, which names `what`, if the block was freed."""
    if block.freed:
        raise UseAfterFree(
            f"{what} lies in symmetric memory that has been freed; free it after its last use, or "
            "leave that to the garbage collector"
        )


def empty_on_heap(
    context: Context,
    library: Library,
    shape: Sequence[int],
    dtype: DType | str,
    order: Packed = "C",
) -> Any:
    """A new uninitialised array on the heap. Local. Raises HeapExhausted."""
    strides = _strides(tuple(shape), order)
    return strided_on_heap(context.heap, library, shape, dtype_of(dtype), strides)


def strided_on_heap(
    heap: Heap, library: Library, shape: Sequence[int], dtype: DType, strides: Sequence[int]
) -> Any:
    """A new uninitialised array with these strides, in elements. Local. Raises HeapExhausted."""
    buffer = heap.allocate(extent_of(shape, strides) * dtype.itemsize)
    return array_on(buffer, library, dtype, shape, strides)


def observed(context: Context, array: Any) -> Any:
    """`array`, new on the heap, as the user gets it: reporting accesses if they are observed."""
    if context.observer is None:
        return array
    from shardmath.handles.watched import watched

    place = block_of(context, array)
    assert place is not None, "a new array lies on the heap"
    block = place[0]
    return watched(context, array, context.rank, block.location, block.address, block.nbytes)


def maker_on_heap(
    heap: Heap, library: Library, shape: Sequence[int], dtype: DType | str, strides: Sequence[int]
) -> Callable[[], tuple[Any, int]]:
    """A function that makes arrays as `strided_on_heap` does, each with its address."""
    nbytes = extent_of(shape, strides) * dtype_of(dtype).itemsize
    view = library.viewer(dtype, shape, strides, heap.transport.device)

    def make() -> tuple[Any, int]:
        buffer = heap.allocate(nbytes)
        address = buffer.block.address
        return view(buffer, address), address

    return make


def array_on(
    owner: Any,
    library: Library,
    dtype: DType,
    shape: Sequence[int],
    strides: Sequence[int],
    *,
    start: int = 0,
) -> Any:
    """An array on the memory of `owner`, from byte `start` on, that keeps `owner` alive.

    `owner` has contiguous bytes as NumPy's array interface, or as CUDA's and then a `device`, too;
    `strides` are in elements.
    """
    if hasattr(owner, "__cuda_array_interface__"):
        return library.on_device(owner, dtype, shape, strides, start=start)
    raw: Any = np.asarray(owner)
    # An array without elements may start at the end, where torch would have no address for it.
    return library.from_bytes(raw[start:] if math.prod(shape) else raw, dtype, shape, strides)


class Owner:
    """An owner for `array_on` that keeps `memory` and other objects alive as long as the array."""

    def __init__(self, memory: Memory | Buffer, *kept: object) -> None:
        self._kept = (memory, *kept)
        source: Any = memory
        if hasattr(source, "__cuda_array_interface__"):
            self.device = source.device
            self.__cuda_array_interface__ = source.__cuda_array_interface__
        else:
            self.__array_interface__ = source.__array_interface__


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

    The memory stays reserved as long as the context lives; the number can be used again once the
    last array on it is gone or was freed. Raises RuntimeError while an earlier array of the number
    is alive, or where that had another size; HeapExhausted.
    """
    kept: dict[int, tuple[Buffer, weakref.ref[Owner]]] = context.cache("persistent", dict)
    nbytes = extent_of(shape, strides) * dtype.itemsize
    if number in kept:
        buffer, lease_of = kept[number]
        if lease_of() is not None and not buffer.block.freed:
            raise RuntimeError(
                f"alloc_id {number} is in use: an array allocated with it is alive; drop that, or "
                "take another alloc_id"
            )
        if buffer.block.nbytes != nbytes:
            raise RuntimeError(
                f"alloc_id {number} has {buffer.block.nbytes} bytes, not {nbytes}: take another "
                "alloc_id for arrays of another size"
            )
        if buffer.block.freed:
            context.heap.restore(buffer.block)
    else:
        buffer = context.heap.allocate(nbytes)
    lease = Owner(buffer)
    array = array_on(lease, library, dtype, shape, strides)
    buffer.group = group
    kept[number] = (buffer, weakref.ref(lease))
    return array


def extent_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """The number of elements from the first of an array to its last, gaps included."""
    return byte_span(shape, strides, 1)[1]


class SharedMemory(Immutable):
    """One buffer on every rank; only `buffer` keeps this rank's alive.

    `locations`, `sizes` and `notes` are those of all ranks, by rank.
    """

    buffer: Buffer
    locations: tuple[Location, ...]
    sizes: tuple[int, ...]
    notes: tuple[Any, ...]

    def addresses(self, context: Context) -> list[int]:
        """The address of each rank's buffer for this rank's cores or GPU; 0 where it has none."""
        return [
            context.peer_address(rank, location, nbytes) or 0
            for rank, (location, nbytes) in enumerate(zip(self.locations, self.sizes, strict=True))
        ]


def allocate_on_all_ranks(
    context: Context,
    operation: str,
    allocate: Callable[[], tuple[Buffer, Any]],
    check: Callable[[Sequence[Any]], None] = lambda notes: None,
) -> SharedMemory:
    """Memory from `allocate()` on every rank: a buffer, and a note for the peers. Collective.

    A note is plain data. Peers may read and write the buffer as soon as they know of it, so
    `allocate` must initialize it. `check(notes)`, a pure function of all ranks' notes, may raise.
    Raises on all ranks what `allocate` raised on one, for example HeapExhausted, or what `check`
    raises.
    """

    def describe() -> tuple[Buffer, tuple[int, int, int, Any]]:
        buffer, note = allocate()
        context.announce(buffer.block)
        location = buffer.block.location
        return buffer, (location.segment, location.offset, buffer.block.nbytes, note)

    def checked(places: list[tuple[int, int, int, Any]]) -> list[tuple[int, int, int, Any]]:
        check([note for *_, note in places])
        return places

    buffer, places = context.agree_keeping(operation, describe, checked)
    if context.heaps is not None:
        context.heaps.renew()
    segments, offsets, sizes, notes = zip(*places, strict=True)
    return SharedMemory(buffer, tuple(map(Location, segments, offsets)), sizes, notes)


class _Request(Immutable):
    """The array that one rank asks for. `strides` are in elements, none of them negative."""

    library: Library
    shape: tuple[int, ...]
    dtype: DType
    strides: tuple[int, ...]

    @classmethod
    def of(cls, shape: Any, package: Any, dtype: Any, axis_order: Any) -> _Request:
        library = library_of_package(package)
        extents = _extents(shape)
        known = library.default_dtype() if dtype is None else dtype_of(dtype)
        return cls(library, extents, known, _strides(extents, axis_order))

    @property
    def nbytes(self) -> int:
        return extent_of(self.shape, self.strides) * self.dtype.itemsize

    def array(self, buffer: Buffer) -> Any:
        return array_on(buffer, self.library, self.dtype, self.shape, self.strides)

    def __str__(self) -> str:
        return f"{self.library.name} {self.dtype} {self.shape}, {self.nbytes:,} bytes"


def _allocate_together(
    context: Context, request: Callable[[], _Request], make_symmetric: bool
) -> tuple[_Request, Any]:
    """The request and its array. It is allocated before the ranks agree: errors are for all."""

    def describe() -> tuple[tuple[_Request, Any], tuple[int, bool, list[int]]]:
        asked = request()
        array = asked.array(context.heap.allocate(asked.nbytes))
        description = asked.nbytes, bool(make_symmetric), context.heap.marks(context.number)
        return (asked, array), description

    def check(specs: list[tuple[int, bool, list[int]]]) -> tuple[list[int], list[list[int]]]:
        sizes, flags, marks = map(list, zip(*specs, strict=True))
        require_equal("make_symmetric", flags)
        if not flags[0]:
            _require_equal_bytes(sizes)
        return sizes, marks

    (asked, array), (sizes, marks) = context.agree_keeping(
        "allocate_symmetric_memory", describe, check
    )
    context.heap.apply_marks(context.number, marks)
    if len(set(sizes)) > 1:
        del array
        array = context.on_all_ranks(
            "allocate_symmetric_memory, padded",
            lambda: asked.array(context.heap.allocate(max(sizes))),
        )
    return asked, array


def _require_equal_bytes(sizes: list[int]) -> None:
    for rank, nbytes in enumerate(sizes):
        if nbytes != sizes[0]:
            raise CollectiveMismatch(
                f"the ranks ask for different sizes: rank 0 for {sizes[0]:,} bytes, rank {rank} "
                f"for {nbytes:,}; pass make_symmetric=True to reserve the largest on every rank, "
                "or skip_symmetric_check=True to let sizes differ"
            )


def _check_flags(**flags: Any) -> None:
    """Raise TypeError where a flag is no truth value, ValueError for both flags at once."""
    for name, flag in flags.items():
        if not _is(True, flag) and not _is(False, flag):
            raise TypeError(f"{name} is True or False, not {flag!r}")
    if all(flags.values()):
        raise ValueError("make_symmetric compares sizes, which skip_symmetric_check forbids")


def _is(value: bool, flag: Any) -> bool:
    """Whether `flag` is this truth value, of Python's type or NumPy's."""
    return isinstance(flag, (bool, np.bool_)) and bool(flag) is value


def _extents(shape: Any) -> tuple[int, ...]:
    extents: tuple[int, ...]
    try:
        extents = (operator.index(shape),)
    except TypeError:
        try:
            extents = tuple(map(operator.index, shape))
        except TypeError:
            raise TypeError(f"shape is an integer or a sequence of them, not {shape!r}") from None
    if any(extent < 0 for extent in extents):
        raise ValueError(f"shape {extents} has a negative extent")
    return extents


def _strides(shape: tuple[int, ...], axis_order: Any) -> tuple[int, ...]:
    """The strides in elements; `axis_order`: see `allocate_symmetric_memory`."""
    if isinstance(axis_order, str):
        if axis_order not in ("C", "F"):
            raise ValueError(f'axis_order is "C", "F" or a permutation, not {axis_order!r}')
        return packed_strides(shape, axes="F" if axis_order == "F" else "C")
    try:
        axes = [operator.index(axis) for axis in axis_order]
    except TypeError:
        axes = []
    if sorted(axes) != list(range(len(shape))):
        raise ValueError(
            f"axis_order is a permutation of the axes 0 to {len(shape) - 1}, not {axis_order!r}"
        )
    return packed_strides(shape, axes=axes)


def _find(heap: Heap, library: Library, array: Any) -> _Place | None:
    spec = library.spec(array)
    if spec.size == 0:
        block = heap.find(library.anchor(array))
        return None if block is None else (block, 0)
    address = library.pointer(array)
    block = heap.find(address)
    if block is None:
        return None
    offset, (low, high) = address - block.address, spec.span
    return (block, offset) if offset + low >= 0 and offset + high <= block.nbytes else None


def _owner_of(position: int, tensor: Any) -> tuple[Heap, Block]:
    try:
        library = library_of(tensor)
        for context in open_contexts():
            place = _find(context.heap, library, tensor)
            if place is not None:
                return context.heap, place[0]
    except ValueError as error:
        raise TypeError(f"argument {position} is not on the symmetric heap: {error}") from None
    raise TypeError(
        f"argument {position} is in ordinary memory, and its owner frees it; free_symmetric_memory "
        "takes what allocate_symmetric_memory returned, and views of it"
    )
