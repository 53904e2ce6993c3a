"""Epilogs within a product of cuBLASLt: what it is to be told, for epilogs that it does as we do.

Our semantics are cuBLASLt's for a result by columns. Of a result by rows it writes the transpose,
whose rows are our columns: so a bias, a mask and a gradient, which follow our rows, cannot be had
there. Pure: whether there is an algorithm, cuBLASLt's heuristics are asked.
"""

from __future__ import annotations

from typing import NamedTuple

from shardmath.local.epilog import MatmulEpilog
from shardmath.local.gpu.blaslt import Extras
from shardmath.local.gpu.matrix import Matrix

__all__ = ["Within", "within"]

_HALVES = ("float16", "bfloat16")
_FLOATS = (*_HALVES, "float32", "float64")
# For which types of D its epilogs are ours. Its masks have a bit where the input of ReLU is 0, ours
# have none: our kernel makes those. Its ReLU of float16 makes NaN 0 by some algorithms. Its GELU is
# off by 5e-6 in float32 and 3e-10 in float64, its derivative by several roundings in float16. Sums
# of rows are added across ranks before they are rounded.
_ALIKE = {
    MatmulEpilog.BIAS: _FLOATS,
    MatmulEpilog.RELU: _FLOATS[1:],
    MatmulEpilog.RELU_BIAS: _FLOATS[1:],
    MatmulEpilog.DRELU: _FLOATS,
    MatmulEpilog.GELU: _HALVES,
    MatmulEpilog.GELU_BIAS: _HALVES,
    MatmulEpilog.GELU_AUX: _HALVES,
    MatmulEpilog.GELU_AUX_BIAS: _HALVES,
    MatmulEpilog.DGELU: ("bfloat16",),
}
_ALIGNMENT = 16  # bytes, of a bias and an auxiliary matrix
_MASK_ROWS = 128  # bits of a mask's column are a multiple of
_AUX_ROWS = 8  # elements of a column of the inputs of GELU


class Within(NamedTuple):
    """An epilog as a product takes it: the addresses of its vector and its auxiliary matrix."""

    extras: Extras
    bias: int = 0
    aux: int = 0


def within(
    epilog: MatmulEpilog,
    d: Matrix,
    *,
    bias: tuple[int, int] | None = None,
    aux: Matrix | None = None,
) -> Within | None:
    """How a product that writes `d` does `epilog` too, or None where cuBLASLt cannot.

    `bias` and `aux` are as for `epilog.finish`.
    """
    if d.dtype not in _ALIKE.get(epilog, ()):
        return None
    follows_rows = epilog.has_bias or epilog.makes_aux or epilog.needs_aux
    if follows_rows and d.leading is None:
        return None
    vector, leading = 0, 0
    if epilog.has_bias:
        assert bias is not None
        vector, step = bias
        if vector % _ALIGNMENT or (step != 1 and d.rows > 1):
            return None
    if epilog.makes_aux or epilog.needs_aux:
        assert aux is not None
        found = _leading(aux, bits=aux.dtype == "uint8")
        if found is None or aux.address % _ALIGNMENT:
            return None
        leading = found
    return Within(Extras(int(epilog), leading), vector, aux.address if leading and aux else 0)


def _leading(aux: Matrix, *, bits: bool) -> int | None:
    """From a column to the next, in bits of a mask or in elements; None where it does not suit."""
    distance = aux.leading
    if distance is None:
        return None
    distance *= 8 if bits else 1
    return None if distance % (_MASK_ROWS if bits else _AUX_ROWS) else distance
