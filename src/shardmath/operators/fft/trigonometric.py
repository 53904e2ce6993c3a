"""Cosine and sine transforms of types I to IV, by the names and arguments of scipy.fft.

They use the strategies of Fourier transforms. As in scipy, and unlike in `fft`, `norm` None is
"backward".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from shardmath.arrays import Array
from shardmath.base.collective_call import differentiable
from shardmath.call.driver import call
from shardmath.local.fft import Norm
from shardmath.operators.fft.operation import OPERATIONS
from shardmath.operators.fft.options import Options
from shardmath.program.performing import Arguments


class AlongOne(Protocol):
    """A transform along one axis."""

    def __call__(
        self,
        x: Array,
        type: int = 2,
        n: int | None = None,
        axis: int = -1,
        norm: Norm = None,
        *,
        orthogonalize: bool | None = None,
        distribution: Any = None,
        options: Options = None,
        stream: Any = None,
        out: Any = None,
    ) -> Array:
        """See scipy.fft."""


class AlongSeveral(Protocol):
    """A transform along several axes."""

    def __call__(
        self,
        x: Array,
        type: int = 2,
        s: Sequence[int] | None = None,
        axes: Any = None,
        norm: Norm = None,
        *,
        orthogonalize: bool | None = None,
        distribution: Any = None,
        options: Options = None,
        stream: Any = None,
        out: Any = None,
    ) -> Array:
        """See scipy.fft."""


def _functions(name: str, what: str) -> tuple[AlongOne, AlongSeveral]:
    """The functions of an operation: along one axis, and along several."""
    operation = OPERATIONS[name]

    def along_one(
        x: Any,
        type: int = 2,
        n: int | None = None,
        axis: int = -1,
        norm: Norm = None,
        *,
        orthogonalize: bool | None = None,
        distribution: Any = None,
        options: Options = None,
        stream: Any = None,
        out: Any = None,
    ) -> Any:
        words = (distribution, axis, norm, type, orthogonalize, n)
        return call(operation, Arguments((x,), (out,), words, options, stream))

    def along_several(
        x: Any,
        type: int = 2,
        s: Sequence[int] | None = None,
        axes: Any = None,
        norm: Norm = None,
        *,
        orthogonalize: bool | None = None,
        distribution: Any = None,
        options: Options = None,
        stream: Any = None,
        out: Any = None,
    ) -> Any:
        words = (distribution, axes, norm, type, orthogonalize, s)
        return call(operation, Arguments((x,), (out,), words, options, stream))

    for function, own, axes in (
        (along_one, name, "one axis"),
        (along_several, f"{name}n", "several axes, by default all"),
    ):
        function.__name__ = function.__qualname__ = own
        function.__doc__ = f"{what}, along {axes}. Collective.\n{_ABOUT}scipy.fft.{own}.\n"
    return differentiable(along_one), differentiable(along_several)


_ABOUT = """
        y = dct(x, norm="ortho")                        # x knows how it is split
        y = dctn(part, distribution=Slab.X, axes=[0])   # a part does not

    `x` is a DistributedArray, which is padded with zeros or cut where `n` or `s` give its axes
    other extents; or this rank's part of an array, real or complex, with any strides, which is left
    as it was. `distribution` says which part that is, or is a pair of distributions, of operand and
    result; with a DistributedArray it is that of the result. `type` is 1 to 4; `norm` and
    `orthogonalize` are scipy's, where None means "backward", and True if the norm is "ortho". Half
    precision gives float32, integers of a DistributedArray float64.

    Returns a DistributedArray, or this rank's part: `out`, or a new array of the operand's library.

    Raises the same on all ranks, before an element is written: what `fft` does; ValueError for
    another type, and for one element along an axis of a cosine transform of type 1;
    NotImplementedError for `n` and `s` of parts.
    Source: """

dct, dctn = _functions("dct", "The cosine transform")
idct, idctn = _functions("idct", "The inverse of the cosine transform")
dst, dstn = _functions("dst", "The sine transform")
idst, idstn = _functions("idst", "The inverse of the sine transform")
