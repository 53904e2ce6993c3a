"""Matrix multiplication: problem, strategy, execution, and the two forms of the call."""

from shardmath.operators.matmul.forms import Matmul, matmul

__all__ = ["Matmul", "matmul"]
