"""Exchanges that overlap with transforms: a slab goes in chunks, each pushed when it is ready.

`chunking` says into which parts the transforms are cut. A chunk is what one part of the first
transform sends, or one part of the tail, or, in a second exchange, one part of the second
transform. It is pushed to its final place: nothing is packed. Pure; `kernels/pipeline.cu` reads the
tables.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from shardmath.operators.fft.chunking import (
    Chunking,
    first_parts,
    second_parts,
    split_axes,
    transform_part,
)
from shardmath.operators.fft.local_steps import LocalStep, View, packed
from shardmath.operators.fft.program import UserArrays, sizes_of
from shardmath.operators.fft.stages import Stage
from shardmath.redistribution.copies import whole

__all__ = ["Chunk", "Pipeline", "Rows", "make_pipeline"]

_ALIGNMENT = 16  # bytes, of bulk copies
_MIN_WIDTH = 512  # bytes of a row that is worth a bulk copy
_MAX_WIDTH = (1 << 32) - 1  # bytes, as the tables count them
_MAX_CHUNKS = 62  # kMaxChunks

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


@dataclass(frozen=True)
class Rows:
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


@dataclass(frozen=True)
class Chunk:
    """What is pushed when the transforms have been ready `ready_count` times.

    `exchange` is 0 or 1; of a chunk that `signals` all ranks are told when all of it has arrived.
    """

    rows: tuple[Rows, ...]
    ready_count: int
    exchange: int
    signals: bool


@dataclass(frozen=True)
class Pipeline:
    """What one rank does: the steps of its transforms, part by part, and the chunks that it pushes.

    first:   steps, ready | steps, ready | ...
    second:  wait, steps, [ready] | wait, steps, [ready] | ...
    last:    [wait], steps

    "Ready" counts one up; a chunk is pushed when the count is high enough. Each wait is for one
    chunk of all ranks. What is in brackets is there where another exchange follows the second
    transform. Exchange i goes from buffer `sources[i]` to buffer `shared[i]` of all ranks;
    `buffers` are those of the workspace, in bytes. `size` is the number of ranks.
    """

    size: int
    first: tuple[tuple[LocalStep, ...], ...]
    second: tuple[tuple[LocalStep, ...], ...]
    last: tuple[LocalStep, ...]
    chunks: tuple[Chunk, ...]
    sources: tuple[str, ...]
    shared: tuple[str, ...]
    buffers: dict[str, int]

    @property
    def two_exchanges(self) -> bool:
        """Whether an exchange follows the second transform."""
        return len(self.shared) > 1

    @property
    def on_heap(self) -> tuple[str, ...]:
        """The buffers that peers reach."""
        return self.shared

    @property
    def local(self) -> tuple[LocalStep, ...]:
        """All but the exchanges."""
        return tuple(itertools.chain(*self.first, *self.second, self.last))

    @cached_property
    def nbytes(self) -> int:
        """The bytes that are pushed."""
        return sum(rows.width * rows.count for chunk in self.chunks for rows in chunk.rows)

    def tables(self, copy_bytes: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """(chunks, rows) for the kernel, which cuts rows into copies of so many bytes."""
        chunks = np.zeros(len(self.chunks), _CHUNK)
        table = np.zeros(sum(len(chunk.rows) for chunk in self.chunks), _ROWS)
        at = 0
        for number, chunk in enumerate(self.chunks):
            copies = [-(-rows.width // copy_bytes) for rows in chunk.rows]  # of a row
            counts = [rows.count * many for rows, many in zip(chunk.rows, copies, strict=True)]
            chunks[number] = (
                at,
                len(chunk.rows),
                max(counts, default=0),
                chunk.ready_count,
                chunk.exchange,
                chunk.signals,
            )
            for rows, many in zip(chunk.rows, copies, strict=True):
                peer = chunk.exchange * self.size + rows.peer
                places = (rows.source, rows.target, rows.source_pitch, rows.target_pitch)
                table[at] = (*places, rows.width, rows.count, many, peer)
                at += 1
        return chunks, table


def make_pipeline(
    stages: Sequence[Stage],
    rank: int,
    arrays: UserArrays,
    chunking: Chunking,
    *,
    order: Literal["C", "F"],
    last: Sequence[LocalStep] = (),
) -> Pipeline | None:
    """What `rank` does for these stages; None, on all ranks, where there is no pipeline for them.

    The stages are a transform, an exchange, a transform and perhaps another exchange, into arrays
    that are packed in `order`. The result may overlap the operand: nothing is written to it before
    all of the operand has been read.
    """
    axes = split_axes(stages)
    if axes is None:
        return None
    parts = [_chunks(stages, each, chunking, axes, order) for each in range(stages[0].layout.size)]
    if len(parts[rank]) > _MAX_CHUNKS or not all(
        rows.fits for chunks in parts for chunk in chunks for rows in chunk.rows
    ):
        return None
    first_fft, exchange, second_fft, *second_exchange = stages
    u, v = axes[:2]
    work, receive = (
        _buffer_view("work", first_fft, rank, order),
        _buffer_view("receive 0", exchange, rank, order),
    )
    target = receive if second_exchange else arrays.result
    first = tuple(
        transform_part(
            first_fft, arrays.operand.part(u, lo, hi), work.part(u, lo, hi), preserve_input=True
        )
        for lo, hi in first_parts(work.shape[u], chunking.first)
    )
    second = tuple(
        transform_part(
            second_fft, receive.part(v, lo, hi), target.part(v, lo, hi), preserve_input=False
        )
        for lo, hi in second_parts(receive.shape[v], chunking.second)
    )
    views = [
        work,
        receive,
        *(_buffer_view(each.target, each, rank, order) for each in second_exchange),
    ]
    return Pipeline(
        first_fft.layout.size,
        first,
        second,
        tuple(last),
        parts[rank],
        sources=("work", "receive 0")[: 1 + len(second_exchange)],
        shared=("receive 0", *(each.target for each in second_exchange)),
        buffers=sizes_of(itertools.chain(*first, *second, last), views),
    )


def _buffer_view(buffer: str, stage: Stage, rank: int, order: Literal["C", "F"]) -> View:
    return packed(buffer, stage.result.local_shape(rank), stage.result_dtype, order)


def _chunks(
    stages: Sequence[Stage],
    rank: int,
    chunking: Chunking,
    axes: tuple[int, ...],
    order: Literal["C", "F"],
) -> tuple[Chunk, ...]:
    """What `rank` pushes, in order."""
    first = _SlabExchange(stages[1], rank, axes[0], axes[1], order)
    parts = first_parts(first.extent, chunking.first)
    tail = max(1, min(chunking.tail, len(parts)))
    chunks = [
        Chunk(first.rows(lo, hi, 0, 1), number, 0, False)
        for number, (lo, hi) in enumerate(parts[:-tail], 1)
    ]
    lo, hi = parts[-tail][0], parts[-1][1]
    chunks += [
        Chunk(first.rows(lo, hi, part, chunking.second), len(parts), 0, True)
        for part in range(chunking.second)
    ]
    if len(stages) == 4:
        second = _SlabExchange(stages[3], rank, axes[1], axes[2], order)
        chunks += [
            Chunk(second.rows(lo, hi, 0, 1), len(parts) + number, 1, number == chunking.second)
            for number, (lo, hi) in enumerate(second_parts(second.extent, chunking.second), 1)
        ]
    return tuple(chunks)


@dataclass(frozen=True)
class _SlabExchange:
    """One rank's side of an exchange from slabs along axis `u` to slabs along axis `v`."""

    stage: Stage
    rank: int
    u: int
    v: int
    order: Literal["C", "F"]

    @property
    def extent(self) -> int:
        """The extent of this rank's array along `u`."""
        return self.stage.layout.local_shape(self.rank)[self.u]

    def rows(self, lo: int, hi: int, part: int, parts: int) -> tuple[Rows, ...]:
        """What goes to each rank of the indices lo, ..., hi - 1 along `u`, the next rank's first:
        of the peer's array, part `part` of so many parts along `v`.
        """
        layout, size = self.stage.layout, self.stage.layout.size
        source = packed("", layout.local_shape(self.rank), self.stage.dtype, self.order)
        found: list[Rows] = []
        for step in range(1, size + 1):
            peer = (self.rank + step) % size
            shape = self.stage.result.local_shape(peer)
            target = packed("", shape, self.stage.dtype, self.order)
            begin, end = second_parts(shape[self.v], parts)[part]
            start = self.stage.result.spans(peer)[self.v].start
            source_part = source.part(self.u, lo, hi).part(self.v, start + begin, start + end)
            if source_part.size == 0:
                continue
            at = layout.spans(self.rank)[self.u].start
            target_part = target.part(self.u, at + lo, at + hi).part(self.v, begin, end)
            found += _rows(peer, source_part, target_part)
        return tuple(found)


def _rows(peer: int, source: View, target: View) -> Iterator[Rows]:
    """A box as rows of one pitch each."""
    copy = whole(source.shape, source.itemsize, source.strides, target.strides)
    outer = list(zip(copy.shape, copy.src_strides, copy.dst_strides, strict=True))
    count, source_pitch, target_pitch = max(outer, default=(1, 0, 0))
    if outer:
        outer.remove((count, source_pitch, target_pitch))
    for index in itertools.product(*(range(dim[0]) for dim in outer)):
        yield Rows(
            peer,
            copy.unit,
            count,
            source.offset + sum(i * dim[1] for i, dim in zip(index, outer, strict=True)),
            source_pitch,
            target.offset + sum(i * dim[2] for i, dim in zip(index, outer, strict=True)),
            target_pitch,
        )
