"""One rank's arithmetic on its own arrays: no ranks, no communication, NumPy views in and out."""

from shardmath.local.epilog import MatmulEpilog
from shardmath.local.gemm import multiply
from shardmath.local.threads import share_cores

__all__ = ["MatmulEpilog", "multiply", "share_cores"]
