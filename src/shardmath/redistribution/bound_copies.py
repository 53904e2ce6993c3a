"""Copies on host memory: a rank pulls what it needs from its peers' local arrays.

Binding a copy works out its addresses; the bound call makes the copy, any number of times. Bits are
copied, never values: the element type does not matter. What is contiguous on both sides is copied
in one piece. A transposing copy goes in tiles that stay in the first caches, since walking down a
column fetches a cache line, and a page, for every element.

Where a C compiler was there at installation, `box.c` copies few bytes, and rows of any length, and
transposes elements of 4, 8 and 16 bytes, in one call, and says how. Without it NumPy makes every
copy: the results are the same, but large copies take half to twice as long again, and some
alignments several times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import groupby, product
from typing import Any

import numpy as np

from shardmath.arrays.base import HostArray, host_array
from shardmath.base.compiled import extension
from shardmath.base.recorder import spanned, this_process
from shardmath.geometry import Move
from shardmath.redistribution.copies import StridedCopy, own_first, whole

_LINE = 64  # bytes of a cache line: units as long as this can be copied in any order
_LONG = 1 << 10  # bytes of a unit; of longer ones it matters where in a page they go
_STREAMED = 32 << 20  # bytes; more will not be found in a cache of this core
_CACHED = 32 << 10  # bytes of a copy that stays in the first cache, in any order
_MOST_AXES = 16  # of a box that box.c copies
_NAME = "shardmath.redistribution._box"  # the module that is built from box.c
_SHORT, _LONG_UNITS, _PAST_CACHES, _TRANSPOSED, _TRANSPOSED_PAST_CACHES = range(5)  # ways of box.c
_TRANSPOSED_UNITS = 4, 8, 16  # bytes of a unit that box.c transposes


Calls = list[Callable[[], object]]  # what was bound, to be called in order, any number of times


def run(calls: Iterable[Callable[[], object]]) -> None:
    """Make what was bound, in order."""
    for call in calls:
        call()


def part_of(array: HostArray, cuts: Iterable[slice]) -> HostArray:
    """A view of these indices of each axis, also of an array that has no axes: without the ellipsis
    NumPy would copy its element.
    """
    index: tuple[Any, ...] = (*cuts, ...)
    part: HostArray = array[index]
    return part


class Window:
    """Where a local array lies in this process: the address of its element 0, and its strides.

    If it shows only a part of the array, the address may be outside of the memory: elements that
    are not shown are never touched. `keep` holds the memory.
    """

    __slots__ = ("address", "keep", "strides")

    def __init__(self, address: int, strides: Sequence[int], keep: object) -> None:
        self.address = address
        self.strides = tuple(strides)
        self.keep = keep

    @classmethod
    def of(cls, host: HostArray) -> Window:
        """The window on all of `host`."""
        return cls(host.__array_interface__["data"][0], host.strides, host)

    def array(self, shape: Sequence[int], dtype: np.dtype[Any]) -> HostArray:
        """The local array, of this shape and dtype. Only elements that are shown may be read."""
        raw = f"|V{dtype.itemsize}"
        return host_array(self.address, shape, self.strides, raw, self.keep).view(dtype)

    def __repr__(self) -> str:
        return f"Window({self.address:#x}, strides {self.strides})"


def bind_moves(
    moves: Iterable[Move],
    source: Callable[[int], HostArray],
    destination: HostArray,
    *,
    rank: int = 0,
) -> Calls:
    """Calls that execute `moves` into `destination`, a local array of `rank`.

    `source(r)` is rank r's local array, in memory that can be read here, of the destination's
    dtype. The own part comes first, then those of rank + 1 and onwards, so that ranks do not all
    read from one.
    """
    copies, windows = _lowered(moves, source, destination, rank)
    return bind(copies, windows, Window.of(destination), rank=rank)


def pairs(
    moves: Iterable[Move], source: Callable[[int], HostArray], destination: HostArray
) -> list[tuple[HostArray, HostArray]]:
    """For each move, its elements in the source, and the elements of `destination` where they go.

    The arguments are those of `bind_moves`.
    """
    copies, windows = _lowered(moves, source, destination, 0)
    dtype, own = destination.dtype, Window.of(destination)
    arrays = []
    for copy in copies:
        step, shape = (dtype.itemsize,), (*copy.shape, copy.unit // dtype.itemsize)
        window, strides = windows[copy.src], copy.src_strides + step
        first, start = window.address + copy.src_offset, own.address + copy.dst_offset
        src = host_array(first, shape, strides, dtype.str, window.keep)
        dst = host_array(start, shape, copy.dst_strides + step, dtype.str, own.keep)
        arrays.append((src, dst))
    return arrays


def _lowered(
    moves: Iterable[Move], source: Callable[[int], HostArray], destination: HostArray, rank: int
) -> tuple[list[StridedCopy], dict[int, Window]]:
    """The moves into `rank` as copies, and the windows that they read."""
    moves = [move for move in moves if move.elements]
    windows = {src: Window.of(source(src)) for src in dict.fromkeys(move.src for move in moves)}
    strides = {src: window.strides for src, window in windows.items()}
    copies = own_first(moves, rank, destination.itemsize, strides, destination.strides)
    return copies, windows


def bind_array(src: HostArray, dst: HostArray) -> Calls:
    """Calls that copy the bits of `src` to `dst`, of the same shape and itemsize, any strides."""
    if not src.size:
        return []
    copy = whole(src.shape, src.itemsize, src.strides, dst.strides)
    return bind([copy], {0: Window.of(src)}, Window.of(dst))


def bind(
    copies: Iterable[StridedCopy],
    sources: Mapping[int, Window],
    destination: Window,
    *,
    rank: int = 0,
    name: str = "copy",
) -> Calls:
    """Calls that perform `copies`, in order, each time that they are made.

    `sources[r]` is the window on rank r's local array. The calls keep what the windows keep. What
    already lies where it goes is not copied. In a trace the copies from each rank are a span, which
    has the given name where they are this `rank`'s own.
    """
    boxes = _boxes()
    copies = [
        copy
        for copy in copies
        if copy.nbytes and not _is_there(copy, sources[copy.src], destination)
    ]
    total = sum(copy.nbytes for copy in copies)
    in_rows = sum(copy.nbytes for copy in copies if copy.unit >= _LONG)

    def way_of(copy: StridedCopy) -> int | None:
        """How box.c makes a copy; None if NumPy does."""
        if boxes is None or len(copy.shape) > _MOST_AXES:
            return None
        if total <= _CACHED:
            return _SHORT
        if copy.unit >= _LONG:
            return _PAST_CACHES if in_rows >= _STREAMED else _LONG_UNITS
        if copy.unit >= _LINE:
            return _SHORT
        if not _transposes(copy):
            return None
        return _TRANSPOSED_PAST_CACHES if total >= _STREAMED else _TRANSPOSED

    bound: Calls = []
    traced = this_process.spans is not None
    ways = [(copy, sources[copy.src], way_of(copy)) for copy in copies]
    for (compiled, _), group in groupby(
        ways, lambda one: (one[2] is not None, one[0].src * traced)
    ):
        held = [*group]
        if compiled:
            given = tuple([_box(copy, source, destination, way) for copy, source, way in held])
            calls = [boxes(given, (destination.keep, [source.keep for _, source, _ in held]))]
        else:
            calls = [_bind(copy, source, destination) for copy, source, _ in held]
        bound += _in_spans(calls, [copy for copy, *_ in held], rank, name) if traced else calls
    return bound


def _in_spans(calls: Calls, copies: Sequence[StridedCopy], rank: int, name: str) -> Calls:
    """Calls that make copies from one rank's memory, all in one or one each, within spans."""
    src = copies[0].src
    sizes = [copy.nbytes for copy in copies]
    if len(calls) == 1:
        sizes = [sum(sizes)]
    named = name if src == rank else f"copy from rank {src}"
    return [
        spanned(call, named, "copy", size, read={} if src == rank else {src: size})
        for call, size in zip(calls, sizes, strict=True)
    ]


def _transposes(copy: StridedCopy) -> bool:
    """Whether it is a transposition of box.c: of short units, which lie side by side along the last
    axis of the destination, for a line at least, and along another axis of the source.
    """
    unit, shape = copy.unit, copy.shape
    return (
        unit in _TRANSPOSED_UNITS
        and len(shape) > 1
        and copy.dst_strides[-1] == unit
        and shape[-1] * unit >= _LINE
        and unit in copy.src_strides[:-1]
    )


def _is_there(copy: StridedCopy, source: Window, destination: Window) -> bool:
    """Whether what is to be copied already lies where it goes."""
    ends = source.address + copy.src_offset, destination.address + copy.dst_offset
    return ends[0] == ends[1] and copy.src_strides == copy.dst_strides


@lru_cache(maxsize=1)
def _boxes() -> Any:
    """The compiled class that copies boxes in one call; None where box.c was not built."""
    built = extension(_NAME)
    return None if built is None else built.Boxes


def _box(
    copy: StridedCopy, source: Window, destination: Window, way: int | None
) -> tuple[Any, ...]:
    ends = destination.address + copy.dst_offset, source.address + copy.src_offset
    return (*ends, copy.shape, copy.dst_strides, copy.src_strides, copy.unit, way)


def _view(
    window: Window, offset: int, strides: Sequence[int], shape: Sequence[int], unit: int
) -> HostArray:
    """The units of one side of a copy, as an array of a type that NumPy copies fast."""
    if unit in _TYPES:
        typestr = _TYPES[unit]
    elif unit < _LINE:
        typestr = f"|V{unit}"
    else:  # one memmove for each
        typestr, shape, strides = "|u1", (*shape, unit), (*strides, 1)
    return host_array(window.address + offset, shape, strides, typestr, window.keep)


_TYPES = {1: "|u1", 2: "=u2", 4: "=u4", 8: "=u8", 16: "=c16"}


def _bind(copy: StridedCopy, source: Window, destination: Window) -> Callable[[], object]:
    """A call of NumPy that makes a copy, whose last axis is the densest of the destination."""
    shape, unit = copy.shape, copy.unit
    src = _view(source, copy.src_offset, copy.src_strides, shape, unit)
    dst = _view(destination, copy.dst_offset, copy.dst_strides, shape, unit)
    if unit < _LINE and src.nbytes > _CACHED and src.ndim > 1:
        steps = [abs(stride) for stride in src.strides]
        dense = min(range(src.ndim), key=steps.__getitem__)
        if steps[dense] < steps[-1]:
            return partial(_transpose, src, dst, dense, unit)
    return partial(np.copyto, dst, src)


def _transpose(src: HostArray, dst: HostArray, dense: int, unit: int) -> None:
    """Copy in tiles along axis `dense`, the densest of `src`, and the last, the densest of `dst`.

    Elements pass through a scratch tile with padded rows: at a stride that is a power of two, the
    lines of a column would compete for the same few places of the cache. Units of 16 bytes and more
    touch so few lines that the detour does not pay.
    """
    rows, columns = _tile(unit)
    extents = [1] * src.ndim
    extents[-1], extents[dense] = min(rows, src.shape[-1]), min(columns, src.shape[dense])
    room = rows * columns // (extents[-1] * extents[dense])
    for axis in reversed(range(src.ndim)):
        if axis not in (dense, src.ndim - 1):
            extents[axis] = min(room, src.shape[axis])
            room //= extents[axis]
    scratch = None if unit >= 16 else _scratch(extents, dense, src.dtype)
    for tile in _tiles(src.shape, extents):
        part = src[tile]
        if scratch is None:
            np.copyto(dst[tile], part)
        else:
            held = scratch[tuple(slice(0, extent) for extent in part.shape)]
            np.copyto(held, part)
            np.copyto(dst[tile], held)


def _tile(unit: int) -> tuple[int, int]:
    """Extents along the densest axes of destination and source, as measured."""
    if unit <= 2:
        return 512, 512
    return (256, 128) if unit < 16 else (64, 512)


def _scratch(extents: Sequence[int], dense: int, dtype: np.dtype[Any]) -> HostArray:
    """An array of shape `extents` whose axis `dense` is contiguous, its rows a line apart."""
    others = [axis for axis in range(len(extents)) if axis != dense]
    padded = extents[dense] + max(1, _LINE // dtype.itemsize)
    memory = np.empty([extents[axis] for axis in others] + [padded], dtype)
    return np.moveaxis(memory[..., : extents[dense]], -1, dense)


def _tiles(shape: Sequence[int], extents: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    starts = [range(0, n, step) for n, step in zip(shape, extents, strict=True)]
    for corner in product(*starts):
        yield tuple(slice(start, start + step) for start, step in zip(corner, extents, strict=True))
