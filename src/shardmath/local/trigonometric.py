"""One rank's cosine and sine transforms of types I to IV, along axes that it holds whole.

They are done by ducc0 where it is installed, else by scipy. Without both, and on GPUs, they are
made of Fourier transforms and `turns`. Definitions, scaling and `orthogonalize` are those of
scipy.fft; m is n - 1 for type I of a cosine, n + 1 for type I of a sine, and else n.

    DCT   y[k] = 2 sum over j of w[j] x[j] cos(pi (j + a) (k + b) / m)      DST: sin
    type      I         II        III       IV
    a, b      0, 0      1/2, 0    0, 1/2    1/2, 1/2                        DST: 1 in place of 0

w[j] is 1/2 at ends about which the series is symmetric, if an element lies there, else 1.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardmath.arrays.base import HostArray


class Series(NamedTuple):
    """A kind of transform: "dct" or "dst", its type from 1 to 4, and whether it is orthogonalized,
    which makes its matrix orthogonal but for a factor. The matrix of an `adjoint` is transposed.
    """

    function: str
    type: int
    orthogonal: bool
    adjoint: bool = False

    @property
    def kind(self) -> str:
        """Its name, such as "DCT2"."""
        name = f"{'orthogonal ' * self.orthogonal}{self.function.upper()}{self.type}"
        return f"{'adjoint ' * self.adjoint}{name}"

    @property
    def transposed(self) -> Series:
        """The series that has the transposed matrix, but for factors at its ends."""
        return Series(self.function, {2: 3, 3: 2}.get(self.type, self.type), self.orthogonal)

    def period(self, extent: int) -> int:
        """The length of the Fourier transform behind a transform of `extent` numbers."""
        return 2 * (extent + {"dct": -1, "dst": 1}[self.function] * (self.type == 1))


SERIES = {
    series.kind: series
    for series in (
        Series(function, number, orthogonal, adjoint)
        for function in ("dct", "dst")
        for number in (1, 2, 3, 4)
        for orthogonal in (False, True)
        for adjoint in (False, True)
    )
}


def bound_series(
    x: HostArray, axes: tuple[int, ...], out: HostArray, series: Series, scale: str, engine: str
) -> Callable[[], object]:
    """A call that writes the transform of `x` along `axes` to `out`, which may be `x` itself.

    `scale` is NumPy's norm of a forward transform: "backward" none, "ortho" one over the root of
    the periods, "forward" one over them. `engine` is "ducc0", "scipy" or "numpy".
    """
    if series.adjoint:
        return _bound_adjoint(x, axes, out, series, scale, engine)
    if engine == "ducc0" and x.flags.aligned and out.flags.aligned:
        return _by_ducc0(x, axes, out, series, scale)
    transform = _by_numpy if engine == "numpy" else _by_scipy if engine == "scipy" else _aligned

    def copied() -> None:
        np.copyto(out, transform(x, axes, series, scale))

    return copied


def _bound_adjoint(
    x: HostArray, axes: tuple[int, ...], out: HostArray, series: Series, scale: str, engine: str
) -> Callable[[], object]:
    """See `bound_series`: a transform of the transposed series, in `out`, between two products."""
    transform = bound_series(out, axes, out, series.transposed, scale, engine)
    before, after = np.ones((2, *[1] * x.ndim), out.real.dtype)
    for axis in axes:
        weights = _weights_of_adjoint(series, x.shape[axis])
        one, two = (np.expand_dims(each, [*range(1, x.ndim)]).swapaxes(0, axis) for each in weights)
        before, after = before * one, after * two

    def written() -> None:
        np.multiply(x, before, out=out)
        transform()
        np.multiply(out, after, out=out)

    return written


def _weights_of_adjoint(series: Series, extent: int) -> tuple[HostArray, HostArray]:
    """The factors of an adjoint's operand and result, if `series.transposed` comes in between.

    Unless they are orthogonal, matrices of types 1 and 3 weight their first or last columns by 1/2.
    """
    before, after = np.ones((2, extent), np.float32)
    if series.orthogonal or series.type == 4:
        return before, after
    end = -1 if series.function == "dst" else 0
    if series.type == 2:
        before[end] = 2.0
    elif series.type == 3:
        after[end] = 0.5
    elif series.function == "dct":
        before[1:-1], after[1:-1] = 0.5, 2.0
    return before, after


Turn = npt.NDArray[np.complex128]


def turns(series: Series, extent: int) -> tuple[Turn, Turn]:
    """The factors of `extent` numbers before their Fourier transform, and after it.

    The sum over j is a Fourier transform of the length of the period, padded with zeros, between
    two multiplications for the shifts by a half. The result is the real part.
    """
    if series.adjoint:  # the matrix of the Fourier transform is symmetric
        before, after = turns(series._replace(adjoint=False), extent)
        return after, before
    function, number, orthogonal, _ = series
    period, sine, places = series.period(extent), function == "dst", np.arange(extent)
    a, b = (0.5 if number in halves else float(sine) for halves in ((2, 4), (3, 4)))
    weights, factors = np.ones(extent), np.full(extent, 2.0)
    if number == 1 and not sine:
        weights[[0, -1]] = 0.5
    if number == 3:
        weights[-1 if sine else 0] = 0.5
    if orthogonal:
        ends = [-1] if sine else [0] if number in (2, 3) else [0, -1]
        if number == 3 or (number == 1 and not sine):
            weights[ends] *= math.sqrt(2)
        if number == 2 or (number == 1 and not sine):
            factors[ends] /= math.sqrt(2)
    before = weights * np.exp(-2j * np.pi * places * b / period)
    after = factors * np.exp(-2j * np.pi * a * (places + b) / period)
    return before, after * 1j if sine else after


def _by_ducc0(
    x: HostArray, axes: tuple[int, ...], out: HostArray, series: Series, scale: str
) -> Callable[[], object]:
    """By ducc0, which takes real numbers, and orthogonalizes only if it divides by the root."""
    transform = getattr(importlib.import_module("ducc0.fft"), series.function)
    root = math.sqrt(math.prod(series.period(x.shape[axis]) for axis in axes))
    divisor = 1 if series.orthogonal else 2 if scale == "forward" else 0
    left = {"backward": 1.0, "ortho": 1 / root, "forward": 1 / root**2}[scale]
    left *= {0: 1.0, 1: root, 2: root**2}[divisor]
    is_complex = x.dtype.kind == "c"
    pairs = [(x.real, out.real), (x.imag, out.imag)] if is_complex else [(x, out)]

    def written() -> None:
        for source, target in pairs:
            transform(source, series.type, axes, divisor, target, 1)
        if not math.isclose(left, 1.0):
            np.multiply(out, left, out=out)

    return written


def _aligned(x: HostArray, axes: tuple[int, ...], series: Series, scale: str) -> HostArray:
    copy = np.array(x)
    _by_ducc0(copy, axes, copy, series, scale)()
    return copy


def _by_scipy(x: HostArray, axes: tuple[int, ...], series: Series, scale: str) -> HostArray:
    if x.dtype.kind == "c":  # scipy ignores orthogonalize=True for these
        return _of_both(_by_scipy, x, axes, series, scale)
    transform = getattr(importlib.import_module("scipy.fft"), f"{series.function}n")
    words = {"type": series.type, "axes": axes, "norm": scale, "orthogonalize": series.orthogonal}
    return np.asarray(transform(x, **words))


def _by_numpy(x: HostArray, axes: tuple[int, ...], series: Series, scale: str) -> HostArray:
    if x.dtype.kind == "c":
        return _of_both(_by_numpy, x, axes, series, scale)
    for axis in axes:
        lines = _lines_by_numpy(np.moveaxis(x, axis, -1), series, scale)
        x = np.moveaxis(lines, -1, axis)
    return x


def _of_both(transform: Callable[..., HostArray], x: HostArray, *arguments: Any) -> HostArray:
    result = np.empty_like(x)
    result.real, result.imag = transform(x.real, *arguments), transform(x.imag, *arguments)
    return result


def _lines_by_numpy(x: HostArray, series: Series, scale: str) -> HostArray:
    """The transform of each line."""
    extent = x.shape[-1]
    period = series.period(extent)
    before, after = turns(series, extent)
    after *= {"backward": 1.0, "ortho": period**-0.5, "forward": 1 / period}[scale]
    lines: Any = (np.fft.fft(x * before, period, axis=-1)[..., :extent] * after).real
    return lines.astype(x.dtype)  # type: ignore[no-any-return]
