"""Matrix multiplication of operands that are split across ranks."""

from shardmath.operators.matmul.forms import Matmul, matmul

__all__ = ["Matmul", "matmul"]
