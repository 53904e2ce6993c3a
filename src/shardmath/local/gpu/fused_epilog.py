"""Epilogs within a product of cuBLASLt, where it computes them as we do. Pure.

Our semantics are cuBLASLt's for a result by columns. For a result by rows it writes the transpose,
whose rows are our columns: so a bias and an auxiliary matrix, which follow our rows, are impossible
there. Whether there is an algorithm, only cuBLASLt's heuristics know.
"""

from __future__ import annotations

from typing import NamedTuple

from shardmath.arrays.dtypes import HALVES, names
from shardmath.local.epilog import MatmulEpilog
from shardmath.local.gpu.blaslt import EpilogAttributes
from shardmath.local.gpu.matrix import Matrix

_FLOATS = names(lambda row: row.kind == "f" and row.itemsize > 1)
# The types of D for which its epilogs equal ours, and are faster than our kernel. Its masks have a
# bit where the input of ReLU is 0, ours have none. Its ReLU makes NaN 0 in some algorithms. Its
# GELU is off by 5e-6 in float32 and 3e-10 in float64, the derivative by several roundings in
# float16. Where a mask is read our kernel is faster. Sums of rows are added across ranks before
# rounding.
_ALIKE = {
    MatmulEpilog.BIAS: _FLOATS,
    MatmulEpilog.GELU: HALVES,
    MatmulEpilog.GELU_BIAS: HALVES,
    MatmulEpilog.GELU_AUX: HALVES,
    MatmulEpilog.GELU_AUX_BIAS: HALVES,
}
# The part that the product does, and the part that our kernel then does to D in place. ReLU and its
# derivative have the same bits before rounding and after. DGELU is rounded twice: D must not become
# infinite in between.
_SPLIT = {
    MatmulEpilog.RELU: (MatmulEpilog.DEFAULT, MatmulEpilog.RELU),
    MatmulEpilog.RELU_BIAS: (MatmulEpilog.BIAS, MatmulEpilog.RELU),
    MatmulEpilog.DRELU: (MatmulEpilog.DEFAULT, MatmulEpilog.DRELU),
    MatmulEpilog.DGELU: (MatmulEpilog.DEFAULT, MatmulEpilog.DGELU),
}
_TWICE = {MatmulEpilog.DGELU: "bfloat16"}  # the only type of D for which it is split
_ALIGNMENT = 16  # bytes, of a bias and an auxiliary matrix
_AUX_ROWS = 8  # of which the distance of columns of GELU's inputs is a multiple


def split(epilog: MatmulEpilog, dtype: str) -> tuple[MatmulEpilog, MatmulEpilog]:
    """The part of an epilog that a product can do, and the rest, done in place, for D's `dtype`."""
    if _TWICE.get(epilog, dtype) == dtype and epilog in _SPLIT:
        return _SPLIT[epilog]
    return epilog, MatmulEpilog.DEFAULT


class FusedEpilog(NamedTuple):
    """An epilog for a product: attributes, and addresses of its bias and its auxiliary matrix."""

    extras: EpilogAttributes
    bias: int = 0
    aux: int = 0


def fused_epilog(
    epilog: MatmulEpilog,
    d: Matrix,
    *,
    bias: tuple[int, int] | None = None,
    aux: Matrix | None = None,
) -> FusedEpilog | None:
    """The `epilog` for a product that writes `d`, or None where cuBLASLt cannot do it.

    `bias` and `aux` are as for `epilog.combine`.
    """
    if epilog is MatmulEpilog.DEFAULT:
        return FusedEpilog(EpilogAttributes())
    if d.dtype not in _ALIKE.get(epilog, ()):
        return None
    follows_rows = epilog.has_bias or epilog.makes_aux
    if follows_rows and d.leading is None:
        return None
    vector, leading = 0, 0
    if epilog.has_bias:
        assert bias is not None
        vector, step = bias
        if vector % _ALIGNMENT or (step != 1 and d.rows > 1):
            return None
    if epilog.makes_aux:
        assert aux is not None
        if aux.leading is None or aux.leading % _AUX_ROWS or aux.address % _ALIGNMENT:
            return None
        leading = aux.leading
    return FusedEpilog(
        EpilogAttributes(int(epilog), leading), vector, aux.address if leading and aux else 0
    )
