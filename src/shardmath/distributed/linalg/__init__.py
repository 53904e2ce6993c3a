"""The standard's `linalg` extension: products, norms and factorisations of arrays."""

from typing import Any

from shardmath.distributed import decompositions
from shardmath.distributed.decompositions import eigh, eigvalsh, lstsq, qr, svdvals
from shardmath.distributed.manipulation import matrix_transpose
from shardmath.distributed.norms import (
    cond,
    cross,
    diagonal,
    matrix_norm,
    matrix_power,
    matrix_rank,
    norm,
    outer,
    pinv,
    trace,
    vector_norm,
)
from shardmath.distributed.products import matmul, tensordot, vecdot
from shardmath.distributed.systems import cholesky, det, inv, slogdet, solve

__all__ = [
    "cholesky",
    "cond",
    "cross",
    "det",
    "diagonal",
    "eigh",
    "eigvalsh",
    "inv",
    "lstsq",
    "matmul",
    "matrix_norm",
    "matrix_power",
    "matrix_rank",
    "matrix_transpose",
    "norm",
    "outer",
    "pinv",
    "qr",
    "slogdet",
    "solve",
    "svd",
    "svdvals",
    "tensordot",
    "trace",
    "vecdot",
    "vector_norm",
]


def svd(x: Any, /, *, full_matrices: bool = True) -> Any:
    """The singular value decomposition, whose factors are square, as the standard has it, unless
    `full_matrices` is False. Collective. Otherwise as `shardmath.linalg.svd`.
    """
    return decompositions.svd(x, full_matrices)
