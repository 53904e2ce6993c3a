"""One file that all ranks write or read together: each its part of an array, at its own offsets.

    file    | header | a run of rank 0 | a run of rank 1 | a run of rank 0 | ...

A part consists of runs of elements that are contiguous in the file. If these are short, or several
ranks have the same elements, the array is first brought into slabs along its first axis, each of
which is one run. The file appears whole or not at all: ranks write to a hidden file beside it,
which rank 0 renames when all have written and synced their parts.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from shardmath.arrays.base import HostArray
from shardmath.context.context import DistributedContext
from shardmath.distributed import indexing, parts
from shardmath.distributed.layouts import run_length, runs
from shardmath.distributed.movement import brought, rearranged, stays
from shardmath.distributed.state import Distributed
from shardmath.errors import BackendUnavailable
from shardmath.geometry import Layout

T = TypeVar("T")

SAVE, LOAD = "save", "load"  # what ranks do together, as errors and progress bars call it

# Shorter runs, in bytes, are not written or read, but redistributed first. That is worth it sooner
# before writing, since each write takes the file's lock, for which the other ranks wait.
WRITTEN, READ = 1 << 20, 1 << 14
BEGUN = 1 << 24  # bytes that a rank writes before it tells the disk to begin
ROUND = 1 << 27  # bytes after which the ranks meet, so that none waits long
MOVED = 1 << 24  # bytes of each rank's rows that are redistributed at a time
SYNCED = 8  # rounds after which ranks wait for the disk, which works while they write
_WRITE = 2  # SYNC_FILE_RANGE_WRITE of fcntl.h: begin, and do not wait


_EXTRAS = {"h5py": "hdf5", "zarr": "zarr"}  # of this package, by the module that each installs


def extra(name: str) -> Any:
    """A module that reads and writes files. Raises BackendUnavailable where it is not installed,
    naming the extra of this package that installs it.
    """
    try:
        return import_module(name)
    except ImportError:
        raise BackendUnavailable(
            f"this file needs {name}: pip install 'shardmath[{_EXTRAS[name]}]'"
        ) from None


def on_rank_0(context: DistributedContext, act: Callable[[], None]) -> None:
    """`act()` on rank 0, while the others wait. Collective. Raises on all ranks what it raises."""
    context.on_all_ranks(SAVE, act if context.rank == 0 else lambda: None)


def shown(turns: Sequence[T], title: str, context: DistributedContext) -> Iterator[T]:
    """The turns; on rank 0 a progress bar shows how many are left.

    The bar needs rich, an extra, and a terminal.
    """
    if context.rank == 0 and len(turns) > 1 and sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import track
        except ImportError:
            pass
        else:
            yield from track(turns, title, console=Console(stderr=True))
            return
    yield from turns


# -- files that appear whole -----------------------------------------------------------------------


@contextmanager
def appearing(
    context: DistributedContext, path: Path, create: Callable[[Path], None]
) -> Iterator[Path]:
    """The file that ranks write, which is renamed to `path` at the end of the block. Collective.

    `create(file)` makes it on rank 0. All ranks give the same `path`. If an exception leaves the
    block on any rank, the file is removed, and what was at `path` before stays. Raises OSError on
    all ranks where the file cannot be made or renamed.
    """
    file = path.with_name(f".{path.name}.{agreed_token(context)}.partial")
    try:
        on_rank_0(context, partial(_create, path, file, create))
        yield file
        on_rank_0(context, partial(_rename, file, path))
    except BaseException:
        with suppress(OSError):
            file.unlink()
        shutil.rmtree(file, ignore_errors=True)  # of a format that is a folder
        raise


def agreed_token(context: DistributedContext) -> str:
    """Eight letters that are the same on all ranks, and differ from call to call. Collective."""
    return context.gather(SAVE, lambda: os.urandom(4))[0].hex()


def _create(path: Path, file: Path, create: Callable[[Path], None]) -> None:
    if not path.parent.exists():
        raise FileNotFoundError(errno.ENOENT, "There is no folder to save in", str(path.parent))
    try:
        create(file)
    except OSError as error:
        if error.filename == str(file):
            error.filename = str(path)  # the name that the user knows
        raise
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder")
    with suppress(FileNotFoundError):
        file.chmod(path.stat().st_mode & 0o777)  # of the file that is replaced


def _rename(file: Path, path: Path) -> None:
    sync(file)
    file.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- parts of an array in a file -------------------------------------------------------------------


def layout_in_file(layout: Layout, itemsize: int, *, written: bool) -> Layout:
    """The layout in which ranks write or read an array that is in C order in a file: the given one,
    if its runs are long enough. Pure.
    """
    shortest = WRITTEN if written else READ
    shape = layout.global_shape
    bytes_of = ((run_length(p, shape), prod(along.length for along in p)) for p in layout.parts)
    long = all(itemsize * run >= min(shortest, itemsize * whole) for run, whole in bytes_of)
    if not shape or (long and layout.disjoint()):
        return layout
    return Layout.slab(shape, layout.size, axis=long_axis(shape))


def long_axis(shape: tuple[int, ...]) -> int:
    """The first axis of more than one index: a slab along it is one run of a file. Pure."""
    return next((axis for axis, extent in enumerate(shape) if extent > 1), 0)


def write_part(x: Distributed, file: Path, offset: int) -> None:
    """Write the array from byte `offset` of a file on, in C order. Collective."""
    context = x.context
    layout = layout_in_file(x.layout, x.element_type.itemsize, written=True)
    descriptor = context.on_all_ranks(SAVE, partial(os.open, file, os.O_WRONLY))
    try:
        writer = _Writer(descriptor, offset)
        as_it_lies = stays(x.layout, layout)
        turns = (_runs_in_turns if as_it_lies else _slabs_in_turns)(x, layout, writer)
        synced = SYNCED if as_it_lies else max(1, SYNCED * ROUND // MOVED)
        for number, turn in enumerate(shown(turns, f"{SAVE} {file.name}", context), 1):
            turn()
            if number % synced == 0 or number == len(turns):
                context.on_all_ranks(SAVE, partial(os.fdatasync, descriptor))
    finally:
        os.close(descriptor)


def _runs_in_turns(x: Distributed, layout: Layout, writer: _Writer) -> list[Callable[[], None]]:
    """The turns in which every rank writes the runs of its part."""
    context, part = x.context, brought(x, layout, SAVE)

    def begin() -> HostArray:
        return np.ascontiguousarray(parts.on_host(part))

    host = context.on_all_ranks(SAVE, begin)
    turns = _rounds(layout, context.rank, host, writer.write)
    return [partial(context.on_all_ranks, SAVE, turn) for turn in turns]


def _slabs_in_turns(x: Distributed, layout: Layout, writer: _Writer) -> list[Callable[[], None]]:
    """The turns in which ranks bring some rows into slabs and write these. The disk can begin with
    the first, and no rank needs memory for more than `MOVED` bytes besides its part.
    """
    context, size, shape = x.context, x.context.size, x.shape
    axis = long_axis(shape)
    row = prod(shape) // shape[axis] * x.element_type.itemsize
    is_cut = not any(spans.period for spans in x.layout.column(axis))  # a slice of it is at hand
    step = max(1, MOVED // row) * size if is_cut else shape[axis]
    rooms: dict[tuple[int, ...], Any] = {}

    def turn(start: int) -> None:
        rows = x
        if step < shape[axis]:
            rows = indexing.get(x, parts.along(axis, slice(start, start + step)))
        slabs = Layout.slab(rows.shape, size, axis=axis)
        local = slabs.local_shape(context.rank)
        made = rooms[local] = rearranged(rows, slabs, rooms.get(local))

        def write() -> None:
            host = np.ascontiguousarray(parts.on_host(made))
            data = host.reshape(-1).view(np.uint8).data
            place, done = (start + slabs.spans(context.rank)[axis].start) * row, 0
            while done < len(data):
                done += writer.write(data[done:], place + done)

        context.on_all_ranks(SAVE, write)

    return [partial(turn, start) for start in range(0, shape[axis], step)]


class _Writer:
    """Writes to a file from byte `offset` on. Where the system allows it (sync_file_range), the
    disk begins with what is written while the rest follows.
    """

    def __init__(self, descriptor: int, offset: int) -> None:
        self._descriptor, self._offset = descriptor, offset
        self._first = self._count = 0  # the bytes that the disk has not been told to begin

    def write(self, data: memoryview, place: int) -> int:
        """Write the first bytes of `data`, and return how many."""
        place += self._offset
        moved = os.pwrite(self._descriptor, data[:BEGUN], place)
        self._first = self._first if self._count else place
        self._count += moved
        if self._count >= BEGUN:
            begin = _sync_file_range()
            if begin is not None:
                begin(self._descriptor, self._first, place + moved - self._first, _WRITE)
            self._count = 0
        return moved


@lru_cache(maxsize=1)
def _sync_file_range() -> Any:
    """The system's function of that name, or None. It only begins: fsync reports errors."""
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint
    return function


def read_part(
    context: DistributedContext,
    file: Path,
    offset: int,
    layout: Layout,
    dtype: np.dtype[Any],
) -> HostArray:
    """This rank's part, in `layout`, of an array that is in C order from byte `offset` on.
    Collective.
    """

    def begin() -> tuple[int, HostArray]:
        host = np.empty(layout.local_shape(context.rank), dtype)
        return os.open(file, os.O_RDONLY), host

    def read(data: memoryview, place: int) -> int:
        return os.preadv(descriptor, [data], offset + place)

    descriptor, host = context.on_all_ranks(LOAD, begin)
    try:
        turns = _rounds(layout, context.rank, host, read)
        for turn in shown(turns, f"{LOAD} {file.name}", context):
            context.on_all_ranks(LOAD, turn)
    finally:
        os.close(descriptor)
    return host


def _rounds(
    layout: Layout, rank: int, host: HostArray, transfer: Callable[[memoryview, int], int]
) -> list[Callable[[], None]]:
    """What a rank does in each round; all ranks have the same number of rounds.

    `transfer(data, place)` moves the first bytes of `data`, a piece of the part `host`, to or from
    a place in the array's bytes, and returns how many.
    """
    data = host.reshape(-1).view(np.uint8).data
    largest = max(prod(layout.local_shape(r)) for r in range(layout.size)) * host.itemsize
    pieces = _pieces(layout, rank, host.itemsize)

    def turn() -> None:
        for place, start, stop in pieces:
            done = start
            while done < stop:
                moved = transfer(data[done:stop], place + done - start)
                if not moved:
                    raise ValueError("the file has become shorter while it was read")
                done += moved
            if not stop % ROUND:
                return

    return [turn] * -(-largest // ROUND)


def _pieces(layout: Layout, rank: int, itemsize: int) -> Iterator[tuple[int, int, int]]:
    """(place, start, stop): bytes start, ..., stop - 1 of a rank's part are contiguous from a place
    in the array's bytes on. No piece crosses the end of a round.
    """
    start = 0
    for first, count in runs(layout.spans(rank), layout.global_shape):
        place, end = first * itemsize, start + count * itemsize
        while start < end:
            stop = min(end, (start // ROUND + 1) * ROUND)
            yield place, start, stop
            place, start = place + stop - start, stop
