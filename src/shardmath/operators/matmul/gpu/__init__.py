"""A product on a context of GPUs: feeding operands, multiplying, and what follows."""

from shardmath.operators.matmul.gpu.call import Invocation, tune, was_executed
from shardmath.operators.matmul.gpu.fused import notes
from shardmath.operators.matmul.gpu.rank_plan import RankPlan
from shardmath.operators.matmul.gpu.scale_moves import choose_strategy

__all__ = ["Invocation", "RankPlan", "choose_strategy", "notes", "tune", "was_executed"]
