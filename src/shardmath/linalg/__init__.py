"""Linear algebra on distributed arrays: `advanced`, and `ComputeType`, its MatmulComputeType.

Names are those of nvmath.distributed.linalg.
"""

from shardmath.linalg import advanced
from shardmath.operators.matmul.options import MatmulComputeType as ComputeType

__all__ = ["ComputeType", "advanced"]
