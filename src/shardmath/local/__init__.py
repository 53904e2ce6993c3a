"""One rank's arithmetic on its own arrays: no ranks, no communication, NumPy views in and out."""

from shardmath.local.epilog import MatmulEpilog
from shardmath.local.gemm import multiply

__all__ = ["MatmulEpilog", "multiply"]
