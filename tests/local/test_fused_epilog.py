"""Which epilogs a product of cuBLASLt does as we do, and what it is told: no GPU is needed."""

from __future__ import annotations

import pytest

from shardmath.local.epilog import MatmulEpilog as E
from shardmath.local.gpu.blaslt import EpilogAttributes
from shardmath.local.gpu.fused_epilog import FusedEpilog, fused_epilog
from shardmath.local.gpu.matrix import Matrix

BIAS, AUX = 4096, 8192


def matrix(order, dtype, rows=300, columns=17):
    return Matrix.packed(1024, (rows, columns), dtype, order)


def aux_of(epilog, columns=17):
    if epilog.gradient == "relu" or epilog.makes_aux == "relu_aux":
        return Matrix(AUX, 48, columns, 1, 48, "uint8")
    return Matrix(AUX, 304, columns, 1, 304, "bfloat16")


def asked(epilog, order, dtype, **changes):
    needs = epilog.has_bias, bool(epilog.makes_aux or epilog.needs_aux)
    given = {"bias": (BIAS, 1) if needs[0] else None, "aux": aux_of(epilog) if needs[1] else None}
    return fused_epilog(epilog, matrix(order, dtype), **{**given, **changes})


@pytest.mark.parametrize(
    ("epilog", "order", "dtype", "wanted"),
    [
        (E.BIAS, "F", "bfloat16", FusedEpilog(EpilogAttributes(4), BIAS)),
        (E.BIAS, "F", "float64", FusedEpilog(EpilogAttributes(4), BIAS)),
        (E.BIAS, "C", "bfloat16", None),  # follows rows, which are columns there
        (E.GELU, "C", "float16", FusedEpilog(EpilogAttributes(32))),
        (E.GELU, "F", "float32", None),  # not as exact as ours
        (E.GELU_BIAS, "F", "bfloat16", FusedEpilog(EpilogAttributes(36), BIAS)),
        (E.GELU_AUX, "F", "bfloat16", FusedEpilog(EpilogAttributes(160, 304), 0, AUX)),
        (E.GELU_AUX, "C", "bfloat16", None),
        (E.GELU_AUX_BIAS, "F", "bfloat16", FusedEpilog(EpilogAttributes(164, 304), BIAS, AUX)),
        (E.RELU, "F", "bfloat16", None),  # NaN would be 0
        (E.RELU_BIAS, "F", "float32", None),
        (E.RELU_AUX, "F", "float32", None),  # a bit where the input is 0
        (E.DRELU, "F", "float32", None),
        (E.DGELU, "F", "bfloat16", None),
        (E.DRELU_BGRAD, "F", "float32", None),
        (E.BGRADA, "F", "float32", None),
        (E.BIAS, "F", "complex64", None),
    ],
)
def test_what_a_product_is_told(epilog, order, dtype, wanted):
    assert asked(epilog, order, dtype) == wanted


@pytest.mark.parametrize(
    ("epilog", "changes"),
    [
        (E.BIAS, {"bias": (BIAS + 2, 1)}),
        (E.BIAS, {"bias": (BIAS, 2)}),
        (E.GELU_AUX, {"aux": aux_of(E.GELU_AUX)._replace(column_stride=305)}),
        (E.GELU_AUX, {"aux": aux_of(E.GELU_AUX)._replace(address=AUX + 2)}),
        (E.GELU_AUX, {"aux": aux_of(E.GELU_AUX)._replace(row_stride=2, column_stride=608)}),
    ],
)
def test_what_does_not_lie_as_it_wants(epilog, changes):
    assert asked(epilog, "F", "bfloat16") is not None
    assert asked(epilog, "F", "bfloat16", **changes) is None
