"""Scales of eight-bit operands: reading them, their granularity, and what all ranks agree on.

An element of op(A) or op(B) stands for itself times a scale. A rank gives the scales of its local
part, and counts blocks from the first element of that, so that any distribution can have them:

    granularity      of op(A), m x k here           of op(B), k x n here
    -------------    ---------------------------    ---------------------------
    tensor           a number, () or (1,)           the same
    outer            (m,) or (m, 1), each row       (n,) or (1, n), each column
    1 x 128          (m, k / 128), along k          (k / 128, n), along k
    128 x 128        (m / 128, k / 128)             (k / 128, n / 128)

Quotients are rounded up. Scales of two axes are transposed where the operand is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardmath.arrays import ArraySpec, library_of
from shardmath.base.immutable import Immutable
from shardmath.errors import CollectiveMismatch
from shardmath.geometry import Layout
from shardmath.local.float8 import BLOCK, Blocks
from shardmath.operators.arguments import options_of
from shardmath.operators.matmul.options import MatmulQuantizationScales

TENSOR, OUTER, VECTORS, SQUARES = "tensor", "outer", "1 x 128", "128 x 128"
_NAMES = ("a", "b", "c", "d")
SCALES = tuple(f"the scale of {name}" for name in _NAMES)  # as buffers and numbers

# One scale: the word "number" or "array", the spec of an array, or None.
Given = ArraySpec | str | None
Scales = tuple[tuple[Given, ...], tuple[Any, ...], tuple[float | None, ...]]
NO_SCALES: Scales = ((None,) * 4,) * 3


class Scaling(Immutable):
    """The scales that all ranks have agreed on.

    `given` are the types of a and b, `extras` that of an epilog's inputs and outputs. `a` and `b`
    are granularities; `c` and `d` say whether those have a scale, and `amax` whether the greatest
    absolute value of D is wanted.
    """

    given: tuple[str, str]
    extras: str
    a: str
    b: str
    c: bool
    d: bool
    amax: bool

    @property
    def whole(self) -> tuple[bool, bool, bool, bool]:
        """Which of a, b, c and d have one scale for the whole matrix."""
        return self.a == TENSOR, self.b == TENSOR, self.c, self.d

    def __str__(self) -> str:
        extra = ["c a number"] * self.c + ["d a number"] * self.d
        names = [
            f"a by {_IN_WORDS[self.a]}",
            f"b by {_IN_WORDS[self.b].replace('row', 'column')}",
            *extra,
        ]
        return f"scales: {', '.join(names)}" + "; amax of d" * self.amax


_IN_WORDS = {TENSOR: "tensor", OUTER: "row", VECTORS: "1 x 128 along k", SQUARES: "128 x 128"}


def blocks_of(granularity: str, index: int) -> Blocks:
    """The blocks of op(A), index 0, or op(B), index 1."""
    along_rows, along_k = {
        TENSOR: (None, None),
        OUTER: (1, None),
        VECTORS: (1, BLOCK),
        SQUARES: (BLOCK, BLOCK),
    }[granularity]
    return Blocks(along_rows, along_k) if index == 0 else Blocks(along_k, along_rows)


def merged(new: Any, old: Any) -> Any:
    """`new` scales, completed by `old` ones, after a reset."""
    if new is None or old is None:
        return old if new is None else new
    one, two = (options_of(MatmulQuantizationScales, x, "quantization_scales") for x in (new, old))
    kept = {n: getattr(two, n) if getattr(one, n) is None else getattr(one, n) for n in _NAMES}
    return MatmulQuantizationScales(**kept)


def read_scales(scales: Any) -> Scales:
    """The scales of a, b, c and d in three rows: their kinds; the arrays whose values the host does
    not know; and the values that it knows, of numbers and of arrays of one element in host memory.
    Raises TypeError or ValueError.
    """
    given = options_of(MatmulQuantizationScales, scales, "quantization_scales")
    kinds, arrays, numbers = zip(
        *(_read_scale(name, getattr(given, name)) for name in _NAMES), strict=True
    )
    return kinds, arrays, numbers


def _read_scale(name: str, scale: Any) -> tuple[Given, Any, float | None]:
    if scale is None:
        return None, None, None
    if isinstance(scale, (bool, np.bool_, str, bytes, complex, list, tuple)):
        raise ValueError(f"the scale of {name} is a number or a float32 array, not {scale!r}")
    if isinstance(scale, (int, float, np.integer, np.floating)):
        return "number", None, float(scale)
    library = library_of(scale, f"the scale of {name}")
    spec = library.spec(scale)
    if spec.device != "cpu" or spec.size != 1 or spec.dtype != "float32":
        return "array", scale, None
    return spec, None, float(library.host_view(scale).reshape(()))


def check_scales(given: Sequence[Given], needed: Mapping[str, bool], like: ArraySpec) -> None:
    """Raise ValueError for missing and for superfluous scales, TypeError for another library.

    `needed` says which of a, b, c and d are eight-bit matrices; `like` is the spec of a.
    """
    for name, scale in zip(_NAMES, given, strict=True):
        what = "the result" if name == "d" else name
        if needed[name] and scale is None:
            raise ValueError(
                f"{what} is of an eight-bit type, and quantization_scales has no {name}; pass its "
                f"scale, for example quantization_scales={{{name!r}: 1.0, ...}}"
            )
        if scale is not None and not needed[name]:
            raise ValueError(
                f"quantization_scales has {name}, and {what} is of no eight-bit type: leave it out"
            )
        if isinstance(scale, ArraySpec):
            _check_array(name, scale, like)


def readings(given: Given, index: int, stored: Sequence[int], transposed: bool) -> tuple[str, ...]:
    """The granularities that the shape of this rank's scales fits, for operand `index`, 0 or 1.

    `stored` is the shape of the local part of the operand. Raises ValueError where none fits.
    """
    if not isinstance(given, ArraySpec):
        return (TENSOR,)
    rows, columns = stored[::-1] if transposed else stored
    expected = {
        kind: blocks_of(kind, index).shape(rows, columns)[:: -1 if transposed else 1]
        for kind in (OUTER, VECTORS, SQUARES)
    }
    fitting = [TENSOR] * (given.size == 1)
    fitting += [kind for kind, shape in expected.items() if given.shape == shape]
    if given.shape == ((rows, columns)[index],):
        fitting.append(OUTER)
    if not fitting:
        name, kinds = _NAMES[index], "; ".join(f"{kind}: {x}" for kind, x in expected.items())
        raise ValueError(
            f"the scales of {name} have shape {given.shape}; for the local part of {name} they are "
            f"one number, or have a shape of {kinds}"
        )
    return tuple(fitting)


def agree_granularities(
    by_rank: Sequence[Sequence[Sequence[str]]], layouts: Sequence[Layout]
) -> tuple[str, str]:
    """The granularities of a and of b that fit the scales of every rank. `by_rank` has the
    `readings` of each rank, for a and for b.

    Where several fit all ranks they mean the same scales, and the finest is taken. Raises
    CollectiveMismatch where none fits all ranks.
    """
    chosen = []
    for index in (0, 1):
        kinds = [set(readings_[index]) for readings_ in by_rank]
        common = set.intersection(*kinds)
        if not common:
            odd = next(rank for rank, one in enumerate(kinds) if not one & kinds[0])
            raise CollectiveMismatch(
                f"the scales of {_NAMES[index]} must be of one kind on all ranks: rank 0 has "
                f"{' or '.join(by_rank[0][index])}, rank {odd} has "
                f"{' or '.join(by_rank[odd][index])}"
            )
        order = [OUTER] * layouts[index].is_whole(1 - index) + [VECTORS, SQUARES, OUTER, TENSOR]
        chosen.append(next(kind for kind in order if kind in common))
    return chosen[0], chosen[1]


def _check_array(name: str, scale: ArraySpec, like: ArraySpec) -> None:
    if scale.library != like.library:
        raise TypeError(
            f"the scale of {name} is a {scale.library} array and a is of {like.library}: convert it"
        )
    if scale.dtype != "float32":
        raise ValueError(f"the scale of {name} has dtype {scale.dtype}; scales must be float32")
    if scale.ndim > 2:
        raise ValueError(
            f"the scale of {name} has shape {scale.shape}; scales have two axes at most"
        )
    if name in "cd" and scale.size != 1:
        raise ValueError(
            f"the scale of {name} is one number for the whole matrix, not an array of "
            f"shape {scale.shape}"
        )
