"""Fourier transforms of arrays, by the names and the scaling of numpy.fft, through our own.

The result is split as the operand is; boxes, whose extents a real transform changes, become slabs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardmath.arrays import dtypes
from shardmath.distributed import parts
from shardmath.distributed.layouts import unbound
from shardmath.distributed.movement import agreed_layout, within
from shardmath.distributed.reductions import axes_of
from shardmath.distributed.state import Distributed
from shardmath.geometry import Distribution, Slab
from shardmath.operators.arguments import options_of
from shardmath.operators.fft import FFTOptions
from shardmath.operators.fft import fft as own_fft
from shardmath.operators.fft import ifft as own_ifft
from shardmath.operators.fft import irfft as own_irfft
from shardmath.operators.fft import rfft as own_rfft

Axes = Sequence[int] | None


def fftn(x: Distributed, s: Any = None, axes: Axes = None, norm: Any = None) -> Distributed:
    """The Fourier transform along `axes`, by default all, as numpy.fft.fftn. Collective.

    Raises NotImplementedError for `s` other than the extents: pad or cut the array first.
    """
    return transform(_complexed(x), own_fft, axes=_axes(x, s, axes), norm=norm or _NORM)


def ifftn(x: Distributed, s: Any = None, axes: Axes = None, norm: Any = None) -> Distributed:
    """The inverse of `fftn`, as numpy.fft.ifftn. Collective."""
    return transform(_complexed(x), own_ifft, axes=_axes(x, s, axes), norm=norm or _NORM)


def rfftn(x: Distributed, s: Any = None, axes: Axes = None, norm: Any = None) -> Distributed:
    """The transform of a real array, half of it along the last of `axes`, as numpy.fft.rfftn.
    Collective.
    """
    return transform(_floating(x), own_rfft, axes=_axes(x, s, axes), norm=norm or _NORM)


def irfftn(x: Distributed, s: Any = None, axes: Axes = None, norm: Any = None) -> Distributed:
    """The inverse of `rfftn`, as numpy.fft.irfftn: `s` may say that the last extent is odd.
    Collective.
    """
    numbers = _axes(x, None, axes)
    is_odd = s is not None and s[-1] % 2 == 1
    if s is not None:
        half = s[-1] // 2 + 1
        if [*s[:-1], half] != [x.shape[axis] for axis in numbers]:
            raise NotImplementedError(_PAD)
    options = {"last_axis_parity": "odd" if is_odd else "even"}
    return transform(_complexed(x), own_irfft, axes=numbers, norm=norm or _NORM, options=options)


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


_NORM = "backward"  # as NumPy scales, where ours do not
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


def transform(
    x: Distributed,
    function: Any,
    *,
    distribution: Distribution | None = None,
    axes: Axes = None,
    options: Any = None,
    out: Any = None,
    **words: Any,
) -> Distributed:
    """An array transformed by this package's `function`, split by `distribution` or as x.
    Collective.

    Boxes, of which a real transform changes the extents, become slabs. Errors as the function's.
    """
    known, target = options_of(FFTOptions, options), distribution
    if target is None:
        changes = function in (own_rfft, own_irfft)
        target = Slab(0) if changes and x.distribution.per_rank else x.distribution
    pair, into = (x.distribution, target), None if out is None else out.local
    local = within(
        x.context,
        lambda: function(x.local, distribution=pair, axes=axes, options=known, out=into, **words),
    )
    if out is not None:
        made: Distributed = out
        return made
    extents, last = list(x.shape), -1 if axes is None else axes[-1]
    if function is own_rfft:
        extents[last] = extents[last] // 2 + 1
    elif function is own_irfft:
        extents[last] = 2 * (extents[last] - 1) + (known.last_axis_parity == "odd")
    if target is x.distribution and tuple(extents) == x.shape:
        return x.like(local, target, x.layout)
    return x.like(local, unbound(target), agreed_layout(target, tuple(extents), x.context))


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
