"""A product on a context of GPUs: feeding factors, multiplying, and what follows."""

from shardmath.operators.matmul.gpu.call import run, tune
from shardmath.operators.matmul.gpu.fusing import notes
from shardmath.operators.matmul.gpu.scale_moves import chosen
from shardmath.operators.matmul.gpu.share import Share

__all__ = ["Share", "chosen", "notes", "run", "tune"]
