"""Exchanges that one kernel pushes beside the transforms that feed it, in chunks.

A chunk is part of an exchange. The transforms say after each of their parts that they are ready; a
chunk waits for a certain number of these, and is pushed to its final place without packing. The
steps that the kernel replaces say what it does. Pure; `kernels/pipeline.cu` reads the tables.

    user's stream    transform 0, ready | transform 1, ready | await, transform a | ...
    push stream      synchronise | push 0           | push 1, record "arrived 0" | ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from shardmath.arrays.spec import offsets, packed_strides
from shardmath.base.immutable import Immutable
from shardmath.program.steps import TAKEN, Await, Fused, On, Record
from shardmath.redistribution import TransferPlan, lowered

MAX_CHUNKS = 62  # kMaxChunks
_ALIGNMENT = 16  # bytes, of bulk copies
_MIN_WIDTH = 512  # bytes: shorter rows are not worth a bulk copy
_MAX_WIDTH = (1 << 32) - 1  # bytes: the tables have 32 bits for them
PUSH = "push"  # the stream of the steps that the kernel replaces

_ROWS = np.dtype(
    [
        *((name, "<i8") for name in ("source", "target", "source_pitch", "target_pitch")),
        *((name, "<u4") for name in ("width", "count", "copies", "peer")),
    ]
)
_CHUNK = np.dtype(
    [
        (name, "<u4")
        for name in ("first", "rows", "max_copies", "ready_count", "exchange", "signals")
    ]
)


class Rows(Immutable):
    """`count` rows of `width` bytes for rank `peer`, as cudaMemcpy2D takes them. All in bytes."""

    peer: int
    width: int
    count: int
    source: int
    source_pitch: int
    target: int
    target_pitch: int

    @property
    def fits(self) -> bool:
        """Whether bulk copies can move the rows, and are worth it."""
        steps = (self.width, self.source, self.source_pitch, self.target, self.target_pitch)
        fits = _MIN_WIDTH <= self.width <= _MAX_WIDTH
        return fits and not any(step % _ALIGNMENT for step in steps)


def pushed_rows(transfer: TransferPlan, rank: int, order: Literal["C", "F"]) -> Iterator[Rows]:
    """The rows that `rank` pushes, to the next rank first, between arrays packed in `order`."""
    size = transfer.itemsize
    for move in transfer.out_of(rank):
        shapes = transfer.src.local_shape(rank), transfer.dst.local_shape(move.dst)
        copy = lowered(move, size, *(packed_strides(shape, size, order) for shape in shapes))
        outer = list(zip(copy.shape, copy.src_strides, copy.dst_strides, strict=True))
        count, source_pitch, target_pitch = max(outer, default=(1, 0, 0))
        if outer:
            outer.remove((count, source_pitch, target_pitch))
        for one, two in offsets(outer):
            source, target = copy.src_offset + one, copy.dst_offset + two
            yield Rows(move.dst, copy.unit, count, source, source_pitch, target, target_pitch)


class Chunk(Immutable):
    """Rows from memory `source` into memory `target` of the ranks, pushed when the transforms have
    been ready `ready_count` times.

    `exchange` is 0 or 1. If the chunk `signals`, all ranks are told when all of it has arrived.
    """

    rows: tuple[Rows, ...] = field(repr=False)
    source: str
    target: str
    exchange: int
    ready_count: int
    signals: bool

    def __str__(self) -> str:
        nbytes = sum(rows.width * rows.count for rows in self.rows)
        return f"push {nbytes:,} bytes of {self.source} to {self.target}"


# -- launches, and the steps that they replace -----------------------------------------------------


class Start(Immutable):
    """Start the kernel. Exchange i is from memory `sources[i]` to `targets[i]` of all ranks."""

    size: int
    chunks: tuple[Chunk, ...] = field(repr=False)
    sources: tuple[str, ...]
    targets: tuple[str, ...]

    def __str__(self) -> str:
        return f"push {len(self.chunks)} chunks beside the steps that follow, by one kernel"


class Signal(Immutable):
    """A signal between the user's stream and the kernel that pushes: a verb of PushStream."""

    verb: Literal["signal_ready", "wait_for_chunk", "join"]

    def __str__(self) -> str:
        return self.verb.replace("_", " ")


def started(start: Start) -> Fused:
    """Start the kernel, when no owner uses any more what it overwrites."""
    all_come = On(PUSH, TAKEN)
    return Fused(start, (Record("begin"), On(PUSH, Await("begin")), all_come))


def ready(number: int, chunks: Sequence[Chunk], arrivals: Sequence[str]) -> Fused:
    """Say for the `number`th time that transforms are ready, for these chunks. `arrivals` are the
    events of those that signal.
    """
    events, event = iter(arrivals), f"ready {number}"
    replaced: list[Any] = [Record(event), On(PUSH, Await(event))]
    for chunk in chunks:
        replaced.append(On(PUSH, chunk))
        if chunk.signals:
            replaced.append(On(PUSH, Record(next(events))))
    return Fused(Signal("signal_ready"), tuple(replaced))


def arrived(event: str) -> Fused:
    """Wait for one more chunk of all ranks, whose arrival is the event of that name."""
    return Fused(Signal("wait_for_chunk"), (Await(event, everywhere=True),))


def joined() -> Fused:
    """Wait for all pushes."""
    return Fused(Signal("join"), (On(PUSH, Record("pushed")), Await("pushed")))


def tables(start: Start, copy_bytes: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The tables (chunks, rows) of the kernel, which cuts rows into copies of so many bytes."""
    chunks = np.zeros(len(start.chunks), _CHUNK)
    table = np.zeros(sum(len(chunk.rows) for chunk in start.chunks), _ROWS)
    first = 0
    for number, chunk in enumerate(start.chunks):
        most = 0
        for line, rows in enumerate(chunk.rows, first):
            copies = -(-rows.width // copy_bytes)  # of a row
            most = max(most, rows.count * copies)
            places = (rows.source, rows.target, rows.source_pitch, rows.target_pitch)
            peer = chunk.exchange * start.size + rows.peer
            table[line] = (*places, rows.width, rows.count, copies, peer)
        counts = len(chunk.rows), most, chunk.ready_count, chunk.exchange, chunk.signals
        chunks[number] = (first, *counts)
        first += len(chunk.rows)
    return chunks, table
