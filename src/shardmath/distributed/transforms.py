"""Fourier transforms of arrays, by the names and the scaling of numpy.fft, through our own.

The result is split as the operand is; boxes, whose extents a real transform changes, become slabs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardmath.arrays import dtypes
from shardmath.distributed import parts
from shardmath.distributed.layouts import layout_of
from shardmath.distributed.movement import within
from shardmath.distributed.reductions import axes_of
from shardmath.distributed.state import Distributed
from shardmath.geometry import Slab
from shardmath.operators.fft import fft as transform
from shardmath.operators.fft import ifft as inverse
from shardmath.operators.fft import irfft as real_inverse
from shardmath.operators.fft import rfft as real_transform

Axes = Sequence[int] | None


def fftn(x: Distributed, s: Any = None, axes: Axes = None, norm: Any = None) -> Distributed:
    """The Fourier transform along `axes`, by default all, as numpy.fft.fftn. Collective.

    Raises NotImplementedError for `s` other than the extents: pad or cut the array first.
    """
    return _complex(x, transform, s, axes, norm)


def ifftn(x: Distributed, s: Any = None, axes: Axes = None, norm: Any = None) -> Distributed:
    """The inverse of `fftn`, as numpy.fft.ifftn. Collective."""
    return _complex(x, inverse, s, axes, norm)


def rfftn(x: Distributed, s: Any = None, axes: Axes = None, norm: Any = None) -> Distributed:
    """The transform of a real array, half of it along the last of `axes`, as numpy.fft.rfftn.
    Collective.
    """
    numbers = _axes(x, s, axes)
    extents = list(x.shape)
    extents[numbers[-1]] = extents[numbers[-1]] // 2 + 1
    return _changing(_floating(x), real_transform, numbers, norm, extents, None)


def irfftn(x: Distributed, s: Any = None, axes: Axes = None, norm: Any = None) -> Distributed:
    """The inverse of `rfftn`, as numpy.fft.irfftn: `s` may say that the last extent is odd.
    Collective.
    """
    numbers = _axes(x, None, axes)
    extents = list(x.shape)
    last = 2 * (extents[numbers[-1]] - 1)
    if s is not None:
        wanted = [extents[axis] for axis in numbers[:-1]]
        if list(s[:-1]) != wanted or s[-1] not in (last, last + 1):
            raise NotImplementedError(_PAD)
        last = s[-1]
    extents[numbers[-1]] = last
    options = {"last_axis_parity": "odd" if last % 2 else "even"}
    return _changing(_complexed(x), real_inverse, numbers, norm, extents, options)


def fft(x: Distributed, n: int | None = None, axis: int = -1, norm: Any = None) -> Distributed:
    """The Fourier transform along one axis, as numpy.fft.fft. Collective."""
    return fftn(x, None if n is None else [n], [axis], norm)


def ifft(x: Distributed, n: int | None = None, axis: int = -1, norm: Any = None) -> Distributed:
    """The inverse of `fft`, as numpy.fft.ifft. Collective."""
    return ifftn(x, None if n is None else [n], [axis], norm)


def rfft(x: Distributed, n: int | None = None, axis: int = -1, norm: Any = None) -> Distributed:
    """The transform of a real array along one axis, as numpy.fft.rfft. Collective."""
    return rfftn(x, None if n is None else [n], [axis], norm)


def irfft(x: Distributed, n: int | None = None, axis: int = -1, norm: Any = None) -> Distributed:
    """The inverse of `rfft`, as numpy.fft.irfft. Collective."""
    return irfftn(x, None if n is None else [n], [axis], norm)


_PAD = "a transform of other extents than the array has: pad or cut it first"


def _axes(x: Distributed, s: Any, axes: Axes) -> list[int]:
    """The axes that are transformed, in the order given; the last is halved."""
    given = range(x.ndim) if axes is None else axes
    axes_of(tuple(given), x.ndim)  # raises for one that there is not
    numbers = [axis % x.ndim for axis in given]
    if not numbers:
        raise ValueError("a transform wants an axis")
    if s is not None and list(s) != [x.shape[axis] for axis in numbers]:
        raise NotImplementedError(_PAD)
    return numbers


def _complex(x: Distributed, function: Any, s: Any, axes: Axes, norm: Any) -> Distributed:
    numbers = _axes(x, s, axes)
    x = _complexed(x)
    local = within(
        x.context,
        lambda: function(
            x.local, distribution=x.distribution, axes=numbers, norm=norm or "backward"
        ),
    )
    return x.like(local, x.distribution, x.layout)


def _changing(
    x: Distributed,
    function: Any,
    axes: Sequence[int],
    norm: Any,
    extents: Sequence[int],
    options: Any,
) -> Distributed:
    """A transform of which the result has other extents."""
    target = Slab(0) if x.distribution.per_rank else x.distribution
    local = within(
        x.context,
        lambda: function(
            x.local,
            distribution=(x.distribution, target),
            axes=axes,
            norm=norm or "backward",
            options=options,
        ),
    )
    return x.like(local, target, layout_of(target, tuple(extents), x.context.size))


def _floating(x: Distributed) -> Distributed:
    """The array in the type whose transform there is: float64 for integers, float32 for halves."""
    own = dtypes.of(x.library.spec(x.local).dtype)
    wide = "float64" if own.kind in "iub" else dtypes.accumulator(own).name
    return _as(x, wide)


def _complexed(x: Distributed) -> Distributed:
    x = _floating(x)
    own = dtypes.of(x.library.spec(x.local).dtype)
    return x if own.kind == "c" else _as(x, own.complex)


def _as(x: Distributed, dtype: str) -> Distributed:
    local = parts.cast(x.local, dtypes.of(dtype), x.library)
    return x.like(local, x.distribution, x.layout)
