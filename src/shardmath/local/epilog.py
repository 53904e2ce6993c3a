"""The epilogs of a matrix product: what happens to one rank's sums on their way into D.

Everything is computed in the accumulator's type and rounded once, tile by tile, so that no
temporary has the size of D. Column j of a ReLU mask holds row i's bit at position i % 8 of byte i
// 8; the bit is set where the input of ReLU is greater than 0. Semantics and shapes are those of
cuBLASLt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np

from shardmath.arrays import dtypes
from shardmath.arrays.base import HostArray, raw_view
from shardmath.base.immutable import Immutable
from shardmath.base.integers import tiles, up


class MatmulEpilog(IntEnum):
    """The function of x = alpha A B + beta C that becomes D; the values are cuBLASLt's.

    `epilog_inputs` are read, by name, and outputs are returned beside D, by name. D is M x N, and
    has m x n elements on this rank:

    epilog               D                 epilog_inputs               outputs
    RELU, GELU           f(x)
    BIAS, ..._BIAS       f(x + bias)       bias (m,) or (m, 1)
    RELU_AUX, GELU_AUX   f(x)                                          relu_aux, gelu_aux
    DRELU, DGELU         x f'(aux)         relu_aux, gelu_aux
    ..._BGRAD            the same                                      drelu_bgrad, dgelu_bgrad (m,)
    BGRADA, BGRADB       x                                             bgrada (m,), bgradb (N,)
    ALLREDUCE            all of it on all ranks, with the sum of every rank's beta C

    bias is this rank's part of a vector of M elements, split as the rows of D. So are the gradients
    of a bias: sums, over all ranks, of the rows of D or of op(A). Those of the columns of op(B) are
    all on every rank. relu_aux has a bit for each element, uint8 (m / 8 rounded up to a multiple of
    16, n); gelu_aux has the elements, (m rounded up to a multiple of 8, n). Both are column-major,
    and are read by the epilogs of the backward pass only. GELU is the tanh approximation.

    The words of a member say what it does, and with which of `FUNCTIONS`.
    """

    DEFAULT = 0, ""
    ALLREDUCE = 1, ""
    RELU = 2, "relu"
    BIAS = 4, "bias"
    RELU_BIAS = 6, "relu bias"
    GELU = 32, "gelu"
    GELU_BIAS = 36, "gelu bias"
    RELU_AUX = 130, "relu aux"
    RELU_AUX_BIAS = 134, "relu aux bias"
    DRELU = 136, "derivative relu"
    DRELU_BGRAD = 152, "derivative relu bgrad"
    GELU_AUX = 160, "gelu aux"
    GELU_AUX_BIAS = 164, "gelu aux bias"
    DGELU = 192, "derivative gelu"
    DGELU_BGRAD = 208, "derivative gelu bgrad"
    BGRADA = 256, "bgrad"
    BGRADB = 512, "bgrad"

    words: frozenset[str]

    def __new__(cls, value: int, words: str = "") -> MatmulEpilog:
        """The epilog of that number; see `words` in the class."""
        member = int.__new__(cls, value)
        member._value_ = value
        member.words = frozenset(words.split())
        return member

    @property
    def has_bias(self) -> bool:
        """Whether bias[i] is added to row i."""
        return "bias" in self.words

    @property
    def activation(self) -> str | None:
        """The name of the function applied to each element."""
        return None if "derivative" in self.words else self._function

    @property
    def gradient(self) -> str | None:
        """The function whose derivative, taken at the auxiliary input, multiplies each element."""
        return self._function if "derivative" in self.words else None

    @property
    def _function(self) -> str | None:
        return next(iter(self.words & FUNCTIONS.keys()), None)

    @property
    def makes_aux(self) -> str | None:
        """The name of the output that keeps the inputs of the derivative."""
        return f"{self._function}_aux" if "aux" in self.words else None

    @property
    def needs_aux(self) -> str | None:
        """The name of the auxiliary input."""
        return f"{self.gradient}_aux" if self.gradient else None

    @property
    def makes_bgrad(self) -> str | None:
        """The name of the output that sums rows of D, rows of A, or columns of B."""
        if "bgrad" not in self.words:
            return None
        return f"d{self.gradient}_bgrad" if self.gradient else self.name.lower()

    @property
    def changes_d(self) -> bool:
        """Whether anything happens to the elements of D themselves."""
        return bool(self._function) or self.has_bias


class Extra(Immutable):
    """An array that an epilog reads or makes beside A, B, C and D.

    `shapes` lists the accepted ones, the canonical first. `column_major` says that each column must
    be contiguous; columns may be further apart than their length.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    column_major: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The canonical shape."""
        return self.shapes[0]

    def mismatch(self, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> str | None:
        """Why an array (dtype name, shape, strides in elements) cannot serve, or None if it can."""
        if dtype != self.dtype:
            return f"{self.name} has dtype {dtype}; expected {self.dtype}"
        if shape not in self.shapes:
            expected = " or ".join(map(str, self.shapes))
            return f"{self.name} has shape {shape}; expected {expected}"
        if self.column_major and shape[0] > 1 and 0 not in shape and strides[0] != 1:
            return f"{self.name} has strides {strides}; expected are contiguous columns"
        return None


class Requirements(Immutable):
    """The arrays that an epilog reads, as in `epilog_inputs`, and those that it makes."""

    inputs: tuple[Extra, ...] = ()
    outputs: tuple[Extra, ...] = ()


@lru_cache(maxsize=256)
def requirements(epilog: MatmulEpilog, m: int, n: int, dtype: Any) -> Requirements:
    """The extra arrays of `epilog` for a local D of shape (m, n) and type `dtype`.

    Raises ValueError for activations, and their derivatives, of other than real floating types.
    """
    kind, name = dtypes.of(dtype).kind, dtypes.of(dtype).name
    if (epilog.activation or epilog.gradient) and kind != "f":
        raise ValueError(f"epilog {epilog.name} needs a real floating type, not {name}")
    inputs: list[Extra] = []
    outputs: list[Extra] = []
    if epilog.has_bias:
        inputs.append(Extra("bias", ((m,), (m, 1)), name))
    for aux, extras in ((epilog.needs_aux, inputs), (epilog.makes_aux, outputs)):
        if aux and _function(epilog).slope is None:
            bits = up(-(-m // 8), 16), n
            extras.append(Extra(aux, (bits,), "uint8", column_major=True))
        elif aux:
            extras.append(Extra(aux, ((up(m, 8), n),), name, column_major=True))
    if epilog.makes_bgrad:
        extent = n if epilog is MatmulEpilog.BGRADB else m
        outputs.append(Extra(epilog.makes_bgrad, ((extent,),), name))
    return Requirements(tuple(inputs), tuple(outputs))


def apply(
    epilog: MatmulEpilog,
    acc: HostArray,
    inputs: Mapping[str, HostArray],
    *,
    dtype: Any,
    out: HostArray | None = None,
    outputs: Mapping[str, HostArray] | None = None,
) -> tuple[HostArray, Mapping[str, HostArray]]:
    """Return (D, outputs by name) for the local sums `acc` (m, n); inputs as in `requirements`.

    D has type `dtype`. It is `out` if given, which may be `acc` itself, else new, in the order of
    `acc`; `outputs` likewise. A row sum of D covers this rank's columns only, in the type of `acc`,
    and is added to those of other ranks before it is rounded. BGRADA and BGRADB do not concern D:
    see `row_sums` and `column_sums`.
    """
    m, n = acc.shape
    extras = requirements(epilog, m, n, dtype)
    if out is None:
        out = np.empty_like(acc, dtypes.to_numpy(dtype))
    if not epilog.changes_d:
        if out is not acc:
            out[...] = acc
        return out, {}
    aux = outputs or {
        extra.name: np.empty(extra.shape, acc.dtype)
        if extra.name == epilog.makes_bgrad
        else np.empty(extra.shape, dtypes.to_numpy(extra.dtype), "F")
        for extra in extras.outputs
    }
    for output in aux.values():
        output[...] = 0
    bias = inputs["bias"].reshape(m, 1) if epilog.has_bias else None
    for tile in _tiles(m, n):
        x = acc[tile].copy(order="K")
        if bias is not None:
            x += bias[tile[0]].astype(acc.dtype)
        if epilog.makes_aux:
            _keep(epilog, aux[epilog.makes_aux], tile, x)
        if epilog.activation:
            x = _function(epilog).apply(x)
        if epilog.needs_aux:
            _differentiate(epilog, inputs[epilog.needs_aux], tile, x)
        if epilog.makes_bgrad:
            aux[epilog.makes_bgrad][tile[0]] += x.sum(axis=1)
        out[tile] = x
    return out, aux


def row_sums(a: HostArray) -> HostArray:
    """The sums (m,) of the rows of a local part of A, in its accumulator's type: for BGRADA."""
    return np.asarray(a.sum(axis=1, dtype=dtypes.to_numpy(dtypes.accumulator(a.dtype))))


def column_sums(b: HostArray) -> HostArray:
    """The sums (n,) of the columns of a local part of B, in its accumulator's type: for BGRADB."""
    return row_sums(b.T)


_TILE = 1 << 16  # elements: a few arrays of them stay in a core's second-level cache
_C0, _C1 = math.sqrt(2 / math.pi), 0.044715


def _tiles(m: int, n: int) -> Iterator[tuple[slice, slice]]:
    """Nearly square tiles that cover (m, n), so that no order of any array costs much.

    Each starts at a row that is a multiple of 8, so that no byte of a mask lies in two tiles.
    """
    side = up(max(1, min(m, math.isqrt(_TILE))), 8)
    columns = max(1, min(n, _TILE // side))
    return tiles(m, n, up(_TILE // columns, 8), columns)


def _keep(epilog: MatmulEpilog, aux: HostArray, tile: tuple[slice, slice], x: HostArray) -> None:
    """Keep what the derivative needs of `x`, the input of the activation."""
    rows, columns = tile
    if _function(epilog).slope is None:
        positive = np.ascontiguousarray((x > 0).T)  # bits are packed fast along contiguous rows
        aux.T[columns, _bytes_of(rows)] = np.packbits(positive, axis=1, bitorder="little")
    else:
        aux[rows, columns] = x


def _differentiate(
    epilog: MatmulEpilog, aux: HostArray, tile: tuple[slice, slice], x: HostArray
) -> None:
    """Multiply tile `x`, a gradient, by the activation's derivative."""
    rows, columns = tile
    slope = _function(epilog).slope
    if slope is not None:
        x *= slope(aux[rows, columns].astype(x.dtype))
        return
    packed = aux.T[columns, _bytes_of(rows)]
    raw = raw_view(x)
    keep = np.empty_like(raw)
    keep[...] = np.unpackbits(packed, axis=1, count=len(x), bitorder="little").T
    np.negative(keep, out=keep)  # all bits, or none
    raw &= keep  # unlike a product, this makes a masked infinity 0


def _bytes_of(rows: slice) -> slice:
    return slice(rows.start // 8, -(-rows.stop // 8))


def _relu(x: HostArray) -> HostArray:
    np.maximum(x, 0, out=x)
    return x


def _gelu(x: HostArray) -> HostArray:
    """GELU in its tanh form: x (1 + tanh(u)) / 2 = x / (1 + exp(-2 u)), u = c0 x (1 + c1 x^2)."""
    with np.errstate(over="ignore", invalid="ignore"):  # an infinite exponential gives the limit, 0
        e: HostArray = x * x
        e *= -2 * _C0 * _C1
        e -= 2 * _C0
        e *= x
        np.exp(e, out=e)
        e += 1
        np.divide(x, e, out=e)
    return e


def _gelu_slope(x: HostArray) -> HostArray:
    """The derivative of `_gelu`: p (1 + 2 (1 - p) x u'), where p = 1 / (1 + e), e = exp(-2 u).

    Written with 1 - p = e p, which loses no digits where p is near 0 or 1.
    """
    x = np.clip(x, -10, 10)  # flat from there on, and e just fits float32
    square = x * x
    e: HostArray = square * (-2 * _C0 * _C1)
    e -= 2 * _C0
    e *= x
    np.exp(e, out=e)
    p = 1 / (1 + e)
    square *= 6 * _C0 * _C1
    square += 2 * _C0
    e *= p
    e *= square
    e *= x
    e += 1
    e *= p
    return e


class Function(Immutable):
    """An activation: `apply` may overwrite its argument, and `slope` is its derivative.

    Without a `slope` the derivative is 1 where the input is greater than 0, and else 0. A bit for
    each element is kept for it; for other functions the inputs are kept.
    """

    apply: Callable[[HostArray], HostArray]
    slope: Callable[[HostArray], HostArray] | None = None


FUNCTIONS = {
    "relu": Function(_relu),
    "gelu": Function(_gelu, _gelu_slope),
}
INPUTS = ("bias", *(f"{name}_aux" for name in FUNCTIONS))
OUTPUTS = tuple(
    dict.fromkeys(
        name for each in MatmulEpilog for name in (each.makes_aux, each.makes_bgrad) if name
    )
)


def _function(epilog: MatmulEpilog) -> Function:
    name = epilog.activation or epilog.gradient
    assert name is not None, "an epilog with a function"
    return FUNCTIONS[name]
