"""Matrix multiplication on distributed operands: `matmul`, and `Matmul` to plan once.

Names and arguments are those of nvmath.distributed.linalg.advanced.
"""

from shardmath.local.epilog import MatmulEpilog
from shardmath.operators.matmul.forms import Matmul, matmul
from shardmath.operators.matmul.options import (
    MatmulAlgoType,
    MatmulComputeType,
    MatmulEpilogPreferences,
    MatmulOptions,
    MatmulPlanPreferences,
    MatmulQuantizationScales,
    matrix_qualifiers_dtype,
)

__all__ = [
    "Matmul",
    "MatmulAlgoType",
    "MatmulComputeType",
    "MatmulEpilog",
    "MatmulEpilogPreferences",
    "MatmulOptions",
    "MatmulPlanPreferences",
    "MatmulQuantizationScales",
    "matmul",
    "matrix_qualifiers_dtype",
]


def __dir__() -> list[str]:
    return sorted(__all__)
