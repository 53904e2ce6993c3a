"""Exchanges that run beside transforms: a slab transformed in chunks, each pushed when it is ready.

The first transform is cut along the axis that the operand is split along, the second along the axis
that it is split along after the exchange. Most chunks go to the peers whole; the last ones, the
tail, go in as many parts as the second transform has, so that this can begin with the first of
them. Chunks lie in their final place when they arrive. Pure; `kernels/pipeline.cu` has the tables.

    transforms   0 | 1 | 2 | 3 |                 a | b | c | d      numbers: along the first axis
    wire             0   | 1   | 2   | 3a 3b 3c 3d                  letters: along the second
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from shardmath.arrays import dtypes
from shardmath.geometry import Layout
from shardmath.operators.fft.local_steps import LocalStep, View, local_steps, packed
from shardmath.operators.fft.problem import Problem
from shardmath.operators.fft.stages import Stage, sizes_of
from shardmath.redistribution.copies import whole

__all__ = ["Chunk", "Cuts", "Pipeline", "Rows", "cuts_for", "pipelined"]

_GRAIN = 16  # bytes that bulk copies are made of
_LEAST_ROW = 512  # bytes of a row that is worth a bulk copy
_MOST_ROW = (1 << 32) - 1  # bytes, as the tables count them
_MOST_CHUNKS = 62  # kMostChunks
_RISING = 6  # so many chunks are many

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
class Cuts:
    """Into how many parts the first and the second transform are cut.

    `tail`: so many parts of the first go to the peers in parts of the second.
    """

    first: int
    second: int
    tail: int = 1


# By bytes of a rank's result, from so many on; docs/decisions/chunks-beside-transforms.md.
_CUTS = (
    (6 << 30, Cuts(16, 8, 4)),
    (1 << 30, Cuts(8, 8, 3)),
    (256 << 20, Cuts(8, 4, 3)),
    (96 << 20, Cuts(8, 4, 2)),
    (48 << 20, Cuts(4, 2, 1)),
    (12 << 20, Cuts(2, 2, 1)),
)


def cuts_for(problem: Problem) -> Cuts | None:
    """The cuts for arrays of that size; None where they are so small that chunks do not pay."""
    size = problem.source.size
    nbytes = problem.target.elements * dtypes.of(problem.result).itemsize // size
    if size == 1:
        return None
    return next((cuts for least, cuts in _CUTS if nbytes >= least), None)


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


def _slab_axis(layout: Layout) -> int | None:
    """The one axis along which every rank has a range of its own, if that is how it is split."""
    axes = layout.partitioned_axes
    if len(axes) != 1 or not layout.disjoint():
        return None
    ranges = [layout.spans(rank)[axes[0]] for rank in range(layout.size)]
    return axes[0] if all(spans.count <= 1 for spans in ranges) else None


def pipelined(
    found: Sequence[Stage],
    rank: int,
    cuts: Cuts,
    *,
    order: Literal["C", "F"],
    operand: View,
    result: View,
    last: Sequence[LocalStep] = (),
) -> Pipeline | None:
    """What `rank` does for these stages; None, on all ranks, where there is no such pipeline.

    The stages are a transform, an exchange, a transform and perhaps one more exchange, into arrays
    that are packed in `order`. The result may overlap the operand: nothing is written to it before
    all of the operand has been read.
    """
    axes = _split_axes(found)
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
    target = landing if more else result
    first = tuple(
        _transform(one, operand.part(a, lo, hi), work.part(a, lo, hi), keep=True)
        for lo, hi in _rising(operand.shape[a], cuts.first)
    )
    second = tuple(
        _transform(two, landing.part(b, lo, hi), target.part(b, lo, hi), keep=False)
        for lo, hi in _parts(landing.shape[b], cuts.second)
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


def _split_axes(found: Sequence[Stage]) -> tuple[int, ...] | None:
    """The axes along which the array is split before, between and after the exchanges."""
    if len(found) not in (3, 4) or [stage.kind is None for stage in found[:3]] != [0, 1, 0]:
        return None
    if len(found) == 4 and (found[3].kind is not None or found[2].kind != "C2C"):
        return None
    layouts = [found[1].layout, found[1].result]
    if len(found) == 4:
        layouts.append(found[3].result)
    axes = [_slab_axis(layout) for layout in layouts]
    known = tuple(axis for axis in axes if axis is not None)
    if len(known) < len(axes) or any(x == y for x, y in itertools.pairwise(known)):
        return None
    if _slab_axis(found[0].layout) != known[0] or _slab_axis(found[2].result) != known[1]:
        return None
    return known


def _placed(place: str, stage: Stage, rank: int, order: Literal["C", "F"]) -> View:
    return packed(place, stage.result.local_shape(rank), stage.made, order)


def _transform(stage: Stage, source: View, target: View, *, keep: bool) -> tuple[LocalStep, ...]:
    assert stage.kind is not None, "a transform"
    steps = local_steps(stage.kind, stage.axes, source, target, keep=keep, factor=stage.factor)
    return tuple(steps)


def _chunks(
    found: Sequence[Stage],
    rank: int,
    cuts: Cuts,
    axes: tuple[int, ...],
    order: Literal["C", "F"],
) -> tuple[Chunk, ...]:
    """What `rank` pushes, in order."""
    one = _Slabs(found[1], rank, axes[0], axes[1], order)
    made = _rising(one.extent, cuts.first)
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
            for number, (lo, hi) in enumerate(_parts(two.extent, cuts.second), 1)
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
            begin, end = _parts(shape[self.v], parts)[part]
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


def _rising(extent: int, parts: int) -> list[tuple[int, int]]:
    """Ranges that cover range(extent): one at least, and none empty beside others.

    Of many, the first are smaller: the wire begins early, and is busy while the next are made.
    """
    parts = max(1, min(extent // 2, parts))
    rises = parts >= _RISING and extent >= 4 * parts
    return _cut(extent, [min(4, 2 + i) if rises else 1 for i in range(parts)])


def _parts(extent: int, parts: int) -> list[tuple[int, int]]:
    """So many ranges that cover range(extent)."""
    return _cut(extent, [1] * parts)


def _cut(extent: int, weights: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges as long as the weights say, even ones where there are many indices."""
    grain = 2 if extent >= 2 * len(weights) else 1
    total = sum(weights) * grain
    before = itertools.accumulate(weights[:-1], initial=0)
    ends = [extent * weight // total * grain for weight in before] + [extent]
    return list(itertools.pairwise(ends))
