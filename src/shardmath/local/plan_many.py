"""A transform of a strided array as calls of one batched plan: the arguments of cufftPlanMany.

cuFFT's advanced data layout has lengths, the extents of rows and planes in memory (`embed`), one
stride between elements and one distance between the transforms of a batch. The axes of an array
that fit are found here, by integers alone. Others take several calls, or there is no plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from shardmath.arrays.spec import coalesced, offsets
from shardmath.base.immutable import Immutable
from shardmath.local.fft import Kind

_MAX_AXES = 3  # of one plan
_MAX_CALLS = 4096


class StridedArray(Immutable):
    """One side of a transform: the shape of an array, its strides in bytes, and bytes per element.

    `misalignment` is its address modulo 16.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    misalignment: int = 0


class DataLayout(Immutable):
    """Where cuFFT finds element (b, x, y): at (b distance + (x embed[1] + y) stride) elements."""

    embed: tuple[int, ...]
    stride: int
    distance: int


class PlanMany(Immutable):
    """A plan for a batch of `batch` transforms of `lengths`, and its calls.

    `lengths` are those of the real side, if there is one. Each call starts at a pair of `offsets`
    in bytes, from the elements with index 0 of source and target.
    """

    lengths: tuple[int, ...]
    source: DataLayout
    target: DataLayout
    batch: int
    offsets: tuple[tuple[int, int], ...]

    @cached_property
    def without_calls(self) -> PlanMany:
        """The plan without its `offsets`."""
        return replace(self, offsets=())


def plan_many(
    kind: Kind, axes: Sequence[int], source: StridedArray, target: StridedArray
) -> PlanMany | None:
    """The plan of a transform along `axes`, the real one last; None where cuFFT has none.

    The arrays have elements, and different extents along the real axis alone.
    """
    real = {"R2C": source, "C2R": target}.get(kind)
    lengths = (real or source).shape
    ordered = _ordered(kind, axes, lengths, source)
    embeds = [_embed(side, ordered) for side in (source, target)]
    rest = [axis for axis in range(len(lengths)) if axis not in axes]
    strided = [(lengths[a], source.strides[a], target.strides[a]) for a in rest]
    dims = coalesced(sorted(strided, key=lambda dim: dim[1:]))
    batch = max(dims, default=(1, 0, 0), key=lambda dim: (dim[0], -dim[1]))
    others = list(dims)
    if dims:
        others.remove(batch)
    # Real data starts, as complex data does, at a multiple of a complex number's size.
    alignments = [side.itemsize * (2 if side is real else 1) for side in (source, target)]
    if (
        None in embeds
        or len(ordered) > _MAX_AXES
        # cuFFT ignores an axis of length 1, and would take another for the real one.
        or (kind == "C2R" and len(ordered) > 1 and lengths[axes[-1]] == 1)
        or math.prod(dim[0] for dim in others) > _MAX_CALLS
        or any(
            side.misalignment % alignment
            for side, alignment in zip((source, target), alignments, strict=True)
        )
        or any(
            step <= 0 or step % side.itemsize
            for dim in dims
            for step, side in zip(dim[1:], (source, target), strict=True)
        )
        or any(
            step % alignment
            for dim in others
            for step, alignment in zip(dim[1:], alignments, strict=True)
        )
    ):
        return None
    first, second = (embed for embed in embeds if embed is not None)
    return PlanMany(
        lengths=tuple(lengths[axis] for axis in ordered),
        source=DataLayout(first[0], first[1], max(1, batch[1] // source.itemsize)),
        target=DataLayout(second[0], second[1], max(1, batch[2] // target.itemsize)),
        batch=batch[0],
        offsets=tuple(offsets(others)),
    )


def _ordered(
    kind: Kind, axes: Sequence[int], lengths: Sequence[int], source: StridedArray
) -> list[int]:
    """The axes longer than 1, from the slowest in memory; a real axis is the last."""
    last = [] if kind == "C2C" else [axes[-1]]
    rest = [axis for axis in axes if axis not in last and lengths[axis] > 1]
    rest.sort(key=lambda axis: (-source.strides[axis], axis))
    return [*rest, *last] or [axes[-1]]


def _embed(side: StridedArray, axes: Sequence[int]) -> tuple[tuple[int, ...], int] | None:
    """`embed` and `stride` of a DataLayout for the elements along `axes`; None if there is none."""
    steps = [
        side.strides[axis] if side.shape[axis] > 1 else side.itemsize * (axis == axes[-1])
        for axis in axes
    ]
    inner = steps[-1]
    if inner <= 0 or inner % side.itemsize:
        return None
    embed = [side.shape[axes[0]]]
    for axis, (outer, step) in zip(axes[1:], itertools.pairwise(steps), strict=True):
        if outer <= 0 or outer % step or outer // step < side.shape[axis]:
            return None
        embed.append(outer // step)
    return tuple(embed), inner // side.itemsize
