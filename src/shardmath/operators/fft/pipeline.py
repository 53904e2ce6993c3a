"""Exchanges that run beside transforms: a slab transformed in chunks, each pushed when it is ready.

`chunking` says into which parts the transforms are cut. A chunk is a part of the first, or of the
tail, or what a part of the second sends back; it lies in its final place when it arrives. Pure;
`kernels/pipeline.cu` has the tables.
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
    Cuts,
    first_parts,
    second_parts,
    split_axes,
    transform_part,
)
from shardmath.operators.fft.local_steps import LocalStep, View, packed
from shardmath.operators.fft.program import Ends, sizes_of
from shardmath.operators.fft.stages import Stage
from shardmath.redistribution.copies import whole

__all__ = ["Chunk", "Pipeline", "Rows", "pipelined"]

_GRAIN = 16  # bytes that bulk copies are made of
_LEAST_ROW = 512  # bytes of a row that is worth a bulk copy
_MOST_ROW = (1 << 32) - 1  # bytes, as the tables count them
_MOST_CHUNKS = 62  # kMostChunks

_ROWS = np.dtype(
    [
        *((name, "<i8") for name in ("from", "to", "from_step", "to_step")),
        *((name, "<u4") for name in ("unit", "count", "pieces", "target")),
    ]
)
_CHUNK = np.dtype(
    [(name, "<u4") for name in ("first", "boxes", "most", "needs", "source", "signals")]
)


@dataclass(frozen=True)
class Rows:
    """`count` rows of `unit` bytes for rank `peer`. Offsets and steps are bytes."""

    peer: int
    unit: int
    count: int
    source: int
    source_step: int
    target: int
    target_step: int

    @property
    def fits(self) -> bool:
        """Whether bulk copies can move it, and are worth it."""
        steps = (self.unit, self.source, self.source_step, self.target, self.target_step)
        fits = _LEAST_ROW <= self.unit <= _MOST_ROW
        return fits and not any(step % _GRAIN for step in steps)


@dataclass(frozen=True)
class Chunk:
    """What goes when the transforms have said `needs` times that they are ready.

    `exchange` 0 is the first, 1 the second; peers are told when all of a chunk that `signals` has
    arrived.
    """

    rows: tuple[Rows, ...]
    needs: int
    exchange: int
    signals: bool


@dataclass(frozen=True)
class Pipeline:
    """What one rank does: `first`, and `second` after the arrival of a part each, in steps.

    After each of `first`, and each of `second` where there is a second exchange, the transforms say
    that they are ready. Then they wait for the second exchange, and do what is in `last`. Exchange
    i goes from place `sources[i]` to place `shared[i]` of all ranks; `places` are those of the
    workspace, in bytes. `size` is the number of ranks.
    """

    size: int
    first: tuple[tuple[LocalStep, ...], ...]
    second: tuple[tuple[LocalStep, ...], ...]
    last: tuple[LocalStep, ...]
    chunks: tuple[Chunk, ...]
    sources: tuple[str, ...]
    shared: tuple[str, ...]
    places: dict[str, int]

    @property
    def returns(self) -> bool:
        """Whether there is a second exchange."""
        return len(self.shared) > 1

    @property
    def on_heap(self) -> tuple[str, ...]:
        """The places that peers reach."""
        return self.shared

    @property
    def local(self) -> tuple[LocalStep, ...]:
        """All but the exchanges."""
        return tuple(itertools.chain(*self.first, *self.second, self.last))

    @cached_property
    def nbytes(self) -> int:
        """The bytes that are pushed."""
        return sum(rows.unit * rows.count for chunk in self.chunks for rows in chunk.rows)

    def tables(self, piece: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """(chunks, rows) for the kernel, which cuts rows into pieces of so many bytes."""
        chunks = np.zeros(len(self.chunks), _CHUNK)
        table = np.zeros(sum(len(chunk.rows) for chunk in self.chunks), _ROWS)
        at = 0
        for number, chunk in enumerate(self.chunks):
            pieces = [-(-rows.unit // piece) for rows in chunk.rows]
            counts = [rows.count * many for rows, many in zip(chunk.rows, pieces, strict=True)]
            chunks[number] = (
                at,
                len(chunk.rows),
                max(counts, default=0),
                chunk.needs,
                chunk.exchange,
                chunk.signals,
            )
            for rows, many in zip(chunk.rows, pieces, strict=True):
                target = chunk.exchange * self.size + rows.peer
                steps = (rows.source, rows.target, rows.source_step, rows.target_step)
                table[at] = (*steps, rows.unit, rows.count, many, target)
                at += 1
        return chunks, table


def pipelined(
    found: Sequence[Stage],
    rank: int,
    ends: Ends,
    cuts: Cuts,
    *,
    order: Literal["C", "F"],
    last: Sequence[LocalStep] = (),
) -> Pipeline | None:
    """What `rank` does for these stages; None, on all ranks, where there is no such pipeline.

    The stages are a transform, an exchange, a transform and perhaps one more exchange, into arrays
    that are packed in `order`. The result may overlap the operand: nothing is written to it before
    all of the operand has been read.
    """
    axes = split_axes(found)
    if axes is None:
        return None
    parts = [_chunks(found, each, cuts, axes, order) for each in range(found[0].layout.size)]
    if len(parts[rank]) > _MOST_CHUNKS or not all(
        rows.fits for chunks in parts for chunk in chunks for rows in chunk.rows
    ):
        return None
    one, exchange, two, *more = found
    a, b = axes[:2]
    work, landing = _placed("work", one, rank, order), _placed("landing 0", exchange, rank, order)
    target = landing if more else ends.result
    first = tuple(
        transform_part(one, ends.operand.part(a, lo, hi), work.part(a, lo, hi), keep=True)
        for lo, hi in first_parts(work.shape[a], cuts.first)
    )
    second = tuple(
        transform_part(two, landing.part(b, lo, hi), target.part(b, lo, hi), keep=False)
        for lo, hi in second_parts(landing.shape[b], cuts.second)
    )
    arrays = [work, landing, *(_placed(each.target, each, rank, order) for each in more)]
    return Pipeline(
        one.layout.size,
        first,
        second,
        tuple(last),
        parts[rank],
        sources=("work", "landing 0")[: 1 + len(more)],
        shared=("landing 0", *(each.target for each in more)),
        places=sizes_of(itertools.chain(*first, *second, last), arrays),
    )


def _placed(place: str, stage: Stage, rank: int, order: Literal["C", "F"]) -> View:
    return packed(place, stage.result.local_shape(rank), stage.made, order)


def _chunks(
    found: Sequence[Stage],
    rank: int,
    cuts: Cuts,
    axes: tuple[int, ...],
    order: Literal["C", "F"],
) -> tuple[Chunk, ...]:
    """What `rank` pushes, in order."""
    one = _Slabs(found[1], rank, axes[0], axes[1], order)
    made = first_parts(one.extent, cuts.first)
    tail = max(1, min(cuts.tail, len(made)))
    chunks = [
        Chunk(one.rows(lo, hi, 0, 1), number, 0, False)
        for number, (lo, hi) in enumerate(made[:-tail], 1)
    ]
    lo, hi = made[-tail][0], made[-1][1]
    chunks += [
        Chunk(one.rows(lo, hi, part, cuts.second), len(made), 0, True)
        for part in range(cuts.second)
    ]
    if len(found) == 4:
        two = _Slabs(found[3], rank, axes[1], axes[2], order)
        chunks += [
            Chunk(two.rows(lo, hi, 0, 1), len(made) + number, 1, number == cuts.second)
            for number, (lo, hi) in enumerate(second_parts(two.extent, cuts.second), 1)
        ]
    return tuple(chunks)


@dataclass(frozen=True)
class _Slabs:
    """An exchange of a rank: its array is split along axis `u`, and is to be along axis `v`."""

    stage: Stage
    rank: int
    u: int
    v: int
    order: Literal["C", "F"]

    @property
    def extent(self) -> int:
        """Of this rank's array along `u`."""
        return self.stage.layout.local_shape(self.rank)[self.u]

    def rows(self, lo: int, hi: int, part: int, parts: int) -> tuple[Rows, ...]:
        """Of the indices lo, ..., hi - 1 along `u`: one of so many parts of what each rank gets,
        the next rank's first.
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
    """A box as rows, of one step each."""
    copy = whole(source.shape, source.itemsize, source.strides, target.strides)
    outer = list(zip(copy.shape, copy.src_strides, copy.dst_strides, strict=True))
    count, step, to_step = max(outer, default=(1, 0, 0))
    if outer:
        outer.remove((count, step, to_step))
    for index in itertools.product(*(range(dim[0]) for dim in outer)):
        yield Rows(
            peer,
            copy.unit,
            count,
            source.offset + sum(i * dim[1] for i, dim in zip(index, outer, strict=True)),
            step,
            target.offset + sum(i * dim[2] for i, dim in zip(index, outer, strict=True)),
            to_step,
        )
