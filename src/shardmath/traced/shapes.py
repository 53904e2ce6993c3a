"""The shape and the type of this rank's result of an operator, whose extents may be symbols.

An extent is None if only the peers know it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from shardmath.arrays import DType, dtypes
from shardmath.base.immutable import Immutable
from shardmath.context.context import require_context
from shardmath.geometry import Box, Distribution, Spans
from shardmath.traced.words import Words

Shape = Sequence[Any]  # of integers, of which some may be symbols of torch's compiler
Tensors = Sequence[Any]


def of_transform(name: str, xs: Tensors, words: Words, counts: Any) -> Shape:
    """The shape of this rank's result of the transform of that name."""
    shape, target, odd = xs[0].shape, words["target"], int(words["parity"] == "odd")
    changes = {"rfft": lambda n: n // 2 + 1, "irfft": lambda n: 2 * (n - 1) + odd}
    return [
        _Axis.of(shape, words["source"], axis).to(
            target, axis, len(shape), changes.get(name) if axis == words["axes"][-1] else None
        )
        for axis in range(len(shape))
    ]


def of_redistribution(xs: Tensors, words: Words, counts: Any) -> Shape:
    """The shape of this rank's part once its array is redistributed. `counts` are the array's
    global shape, where the call says it.
    """
    if counts is None:
        return of_transform("fft", xs, dict(words, axes=[0], parity=""), counts)
    shape, target = xs[0].shape, words["target"]
    pairs = zip(shape, counts, strict=True)
    axes = [_Axis(own, whole, None) for own, whole in pairs]
    return [x.to(target, axis, len(shape)) for axis, x in enumerate(axes)]


def of_product(xs: Tensors, words: Words, counts: Any) -> Shape:
    """The shape of this rank's part of a matrix product: that of C, if there is one."""
    if len(xs) == 3:
        return list(xs[2].shape)
    (a, b), (of_a, of_b, target) = xs, words["distributions"]
    ta, tb = words["transpose"]
    rows, columns = _Axis.of(a.shape, of_a, int(ta)), _Axis.of(b.shape, of_b, int(not tb))
    return [rows.to(target, 0, 2), columns.to(target, 1, 2)]


def of_exchange(xs: Tensors, words: Words, counts: Any) -> Shape:
    """The shape that `all_to_all` returns, known if the call says how much is received."""
    size = require_context().size
    received = () if counts is None else counts[size:]
    return with_extent(xs, words, sum(received) if received else None)


def with_extent(xs: Tensors, words: Words, extent: Any) -> Shape:
    """The operand's shape with another extent along the axis of the call."""
    made = list(xs[0].shape)
    made[words["axis"]] = extent
    return made


def of_scattering(xs: Tensors, words: Words, counts: Any) -> Shape:
    """The shape of this rank's part of `reduce_scatter`: an even one, or as `counts` say."""
    context = require_context()
    extent = xs[0].shape[words["axis"]]
    if counts is not None:
        return with_extent(xs, words, counts[context.rank])
    return with_extent(xs, words, (extent + context.size - 1 - context.rank) // context.size)


def alike(xs: Tensors, words: Words, counts: Any) -> Shape:
    """The operand's shape."""
    return list(xs[0].shape)


def type_of(name: str, xs: Tensors, words: Words) -> DType:
    """The data type of the result of the operator of that name."""
    own = dtypes.of(xs[-1 if len(xs) == 3 else 0].dtype)  # of C, if a product has one
    if name in ("rfft", "irfft_adjoint"):
        return dtypes.of(own.complex or own)
    if name in ("irfft", "rfft_adjoint"):
        return dtypes.of(own.real or own)
    if name.startswith(("dct", "dst")):
        return dtypes.accumulator(own)
    number = words["options"].get("result_type") if name == "matmul" else None
    return (None if number is None else dtypes.numbered(number)) or own


class _Split(Immutable):
    """How an axis is split: part `k` of `parts` even ones, or as `other` says if `parts` is 0."""

    parts: int = 1
    k: int = 0
    other: Any = None


@lru_cache(maxsize=1024)
def _splits(distribution: Distribution, ndim: int, rank: int, size: int) -> tuple[_Split, ...]:
    """How a distribution that is neither bound nor a rank's own splits each axis."""
    extent = 4 * size * size  # long enough to tell even parts apart
    short, long = (
        distribution.part(rank, (n,) * ndim, size=size) for n in (extent, 2 * extent + 1)
    )
    return tuple(
        next(
            (
                _Split(parts, k)
                for parts in range(1, size + 1)
                for k in range(parts)
                if (Spans.even(extent, parts, k), Spans.even(2 * extent + 1, parts, k)) == pair
            ),
            _Split(0, 0, pair),
        )
        for pair in zip(short, long, strict=True)
    )


class _Axis(Immutable, eq=False):
    """An axis of which this rank has `own` indices out of `whole`, None if that is not known. The
    `split` is None if it says nothing about other ranks.
    """

    own: Any
    whole: Any
    split: _Split | None

    @classmethod
    def of(cls, shape: Shape, distribution: Distribution, axis: int) -> _Axis:
        """An axis of an array; this rank's part has this shape."""
        if distribution.binding is not None:
            return cls(shape[axis], distribution.binding.global_shape[axis], None)
        if distribution.per_rank:
            return cls(shape[axis], None, None)
        context = require_context()
        split = _splits(distribution, len(shape), context.rank, context.size)[axis]
        return cls(shape[axis], shape[axis] if split.parts == 1 else None, split)

    def to(self, target: Distribution, axis: int, ndim: int, change: Any = None) -> Any:
        """The indices that this rank gets if the axis is split by `target`, as the result's `axis`;
        None if geometry does not say. `change(n)` is the result's extent where this one's is n.
        """
        context = require_context()
        rank, size = context.rank, context.size
        if isinstance(target, Box):
            return target.box_shape[axis]
        if target.binding is not None:
            return target.shape(rank, size=size)[axis]
        split = _splits(target, ndim, rank, size)[axis]
        if self.whole is None:
            return self.own if split == self.split and change is None else None
        whole = self.whole if change is None else change(self.whole)
        if split.parts:
            return (whole + split.parts - 1 - split.k) // split.parts
        if not isinstance(whole, int):
            return None
        extents = [whole if n == axis else 1 for n in range(ndim)]
        return target.part(rank, extents, size=size)[axis].length
