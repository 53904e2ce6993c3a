"""Transforms with the names and the scaling of numpy.fft and scipy.fft, by this package's own.

The result is split as the operand is; boxes, whose extents a real transform changes, become slabs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from shardmath.arrays import dtypes
from shardmath.base import current
from shardmath.distributed import parts
from shardmath.distributed.manipulation import pad, roll
from shardmath.distributed.movement import agreed_layout, end_explanation
from shardmath.distributed.reductions import axes_of
from shardmath.distributed.state import Distributed
from shardmath.geometry import Distribution, Slab, unbound
from shardmath.operators.arguments import options_of
from shardmath.operators.fft import api as of_parts
from shardmath.operators.fft.options import FFTOptions

Axes = Sequence[int] | None
Call = Callable[..., Distributed]


def fftn(x: Distributed, s: Any = None, axes: Axes = None, norm: Any = None) -> Distributed:
    """The Fourier transform along `axes`, by default all, as numpy.fft.fftn. Collective.

    `s` gives other extents along the axes: the array is padded with zeros, or cut; -1 is the
    array's own extent.
    """
    return _as_numpy(_complexed(x), of_parts.fft, s, axes, norm)


def ifftn(x: Distributed, s: Any = None, axes: Axes = None, norm: Any = None) -> Distributed:
    """The inverse of `fftn`, as numpy.fft.ifftn. Collective."""
    return _as_numpy(_complexed(x), of_parts.ifft, s, axes, norm)


def rfftn(x: Distributed, s: Any = None, axes: Axes = None, norm: Any = None) -> Distributed:
    """The transform of a real array, half of it along the last of `axes`, as numpy.fft.rfftn.
    Collective.
    """
    return _as_numpy(_floating(x), of_parts.rfft, s, axes, norm)


def irfftn(x: Distributed, s: Any = None, axes: Axes = None, norm: Any = None) -> Distributed:
    """The inverse of `rfftn`, as numpy.fft.irfftn: without `s` the last extent is even. Collective.

    The result is split as the operand is.
    """
    return _as_numpy(_complexed(x), of_parts.irfft, s, axes, norm)


def _along_one(function: Call) -> Call:
    """`fftn` or the like as `fft`: along one axis."""

    def along_one(
        x: Distributed, n: int | None = None, axis: int = -1, norm: Any = None
    ) -> Distributed:
        return function(x, _one(n), [axis], norm)

    return _named(along_one, function, "", "one axis")


def _along_two(function: Call) -> Call:
    """`fftn` or the like as `fft2`: by default along the last two axes."""

    def along_two(
        x: Distributed, s: Any = None, axes: Axes = (-2, -1), norm: Any = None
    ) -> Distributed:
        return function(x, s, axes, norm)

    return _named(along_two, function, "2", "two axes")


def _named(called: Call, function: Call, ending: str, axes: str) -> Call:
    """`called` with the name of `function`, whose "n" becomes an ending, and a docstring."""
    name = function.__name__.removesuffix("n") + ending
    called.__name__ = called.__qualname__ = name
    called.__doc__ = f"`{function.__name__}` along {axes}, as numpy.fft.{name}. Collective."
    return called


fft, ifft, rfft, irfft = map(_along_one, (fftn, ifftn, rfftn, irfftn))
fft2, ifft2, rfft2, irfft2 = map(_along_two, (fftn, ifftn, rfftn, irfftn))


def hfft(x: Any, n: int | None = None, axis: int = -1, norm: Any = None) -> Distributed:
    """The real spectrum of a hermitian signal along one axis, as numpy.fft.hfft. Collective."""
    return irfft(_complexed(x).conj(), n, axis, _SWAPPED[norm or _NORM])


def ihfft(x: Any, n: int | None = None, axis: int = -1, norm: Any = None) -> Distributed:
    """The inverse of `hfft`, as numpy.fft.ihfft. Collective."""
    return rfft(x, n, axis, _SWAPPED[norm or _NORM]).conj()  # type: ignore[attr-defined,no-any-return]


def fftshift(x: Any, axes: Any = None) -> Any:
    """The array with frequency 0 in the middle, as numpy.fft.fftshift."""
    return _shifted(x, axes, lambda extent: extent // 2)


def ifftshift(x: Any, axes: Any = None) -> Any:
    """The inverse of `fftshift`, as numpy.fft.ifftshift."""
    return _shifted(x, axes, lambda extent: -(extent // 2))


_NORM = "backward"  # NumPy's default; ours does not scale
_SWAPPED = {"backward": "forward", "forward": "backward", "ortho": "ortho"}


def _shifted(x: Any, axes: Any, shift: Callable[[int], int]) -> Any:
    numbers = axes_of(axes, x.ndim)
    return roll(x, [shift(x.shape[axis]) for axis in numbers], numbers)


def _one(n: int | None) -> list[int] | None:
    """The extents of a transform along one axis, or None. Raises ValueError below 1."""
    if n is None:
        return None
    _require_extents([operator.index(n)])
    return [n]


def _as_numpy(x: Distributed, function: Any, s: Any, axes: Axes, norm: Any) -> Distributed:
    """The transform of the array, padded or cut to the extents `s`."""
    numbers, wanted = _extents(x, s, axes)
    options = None
    if function is of_parts.irfft:
        last = wanted[-1] if s is not None else 2 * (wanted[-1] - 1)
        wanted[-1], options = last // 2 + 1, {"last_axis_parity": "odd" if last % 2 else "even"}
    x = _of_extents(x, numbers, wanted)
    return transform(function, x, axes=numbers, norm=norm or _NORM, options=options)


def trigonometric(
    function: Any,
    x: Any,
    type: int = 2,
    s: Any = None,
    axes: Any = None,
    norm: Any = None,
    **words: Any,
) -> Distributed:
    """The cosine or sine transform of the array, padded or cut to the extents `s`."""
    numbers, wanted = _extents(x, s, axes)
    x = _of_extents(_floating(x), numbers, wanted)
    return transform(function, x, axes=numbers, type=type, norm=norm, **words)


def trigonometric_along_one(
    along_several: Any,
    x: Any,
    type: int = 2,
    n: Any = None,
    axis: int = -1,
    norm: Any = None,
    **words: Any,
) -> Distributed:
    """The cosine or sine transform along one axis, by the function along several."""
    return trigonometric(along_several, x, type, _one(n), [axis], norm, **words)


def _extents(x: Any, s: Any, axes: Any) -> tuple[list[int], list[int]]:
    """The axes of a transform, counted from the start, and the extents that they are to have."""
    given = range(x.ndim) if axes is None else [axes] if hasattr(axes, "__index__") else axes
    if axes is None and s is not None:
        given = range(x.ndim - len(s), x.ndim)
    axes_of(tuple(given), x.ndim)  # raises for an axis out of range
    numbers = [axis % x.ndim for axis in given]
    if not numbers:
        raise ValueError("a transform needs one axis at least")
    if s is not None and len(s) != len(numbers):
        raise ValueError(f"s gives {len(s)} extents, for {len(numbers)} axes")
    own = [x.shape[axis] for axis in numbers]
    given_extents = own if s is None else map(operator.index, s)
    wanted = [old if new == -1 else new for old, new in zip(own, given_extents, strict=True)]
    _require_extents(wanted)
    return numbers, wanted


def _require_extents(wanted: Sequence[int]) -> None:
    if min(wanted) < 1:
        raise ValueError(f"the extents of a transform are {tuple(wanted)}: each must be 1 at least")


def _of_extents(x: Any, axes: Sequence[int], wanted: Sequence[int]) -> Any:
    """The array, cut or padded with zeros along axes."""
    for axis, target in zip(axes, wanted, strict=True):
        extent = x.shape[axis]
        if target < extent:
            x = x[parts.along(axis, slice(0, target))]
        elif target > extent:
            x = pad(x, {axis: (0, target - extent)})
    return x


def transform(
    function: Any,
    x: Distributed,
    *,
    distribution: Distribution | None = None,
    axes: Axes = None,
    options: Any = None,
    out: Any = None,
    **words: Any,
) -> Distributed:
    """The array, transformed by this package's `function`, and split as `out`, by `distribution`,
    or as x. Collective.

    Boxes become slabs where a real transform changes the extents. Errors are the function's.
    """
    known = options_of(FFTOptions, options)
    target = distribution if out is None else out.distribution
    if target is None:
        changes = function in (of_parts.rfft, of_parts.irfft)
        target = Slab(0) if changes and x.distribution.per_rank else x.distribution
    pair, into = (x.distribution, target), None if out is None else out.local
    end_explanation(lambda: f"{function.__name__} of {x.layout}, along axes {axes}, to {target}")
    with current.within(x.context):
        local = function(x.local, distribution=pair, axes=axes, options=known, out=into, **words)
    if out is not None:
        made: Distributed = out
        return made
    extents, last = list(x.shape), -1 if axes is None else axes[-1]
    if function is of_parts.rfft:
        extents[last] = extents[last] // 2 + 1
    elif function is of_parts.irfft:
        extents[last] = 2 * (extents[last] - 1) + (known.last_axis_parity == "odd")
    if target is x.distribution and tuple(extents) == x.shape:
        return x.like(local, target, x.layout)
    return x.like(local, unbound(target), agreed_layout(target, tuple(extents), x.context))


def _floating(x: Any) -> Any:
    """The array in a type that has a transform: integers in float64, halves in float32."""
    return x.astype(dtypes.accumulator(dtypes.inexact(x.element_type)), copy=False)


def _complexed(x: Any) -> Any:
    x = _floating(x)
    return x if x.element_type.kind == "c" else x.astype(x.element_type.complex, copy=False)
