"""A product on a context of GPUs: feeding factors, multiplying, and what follows."""

from shardmath.operators.matmul.gpu.call import Turn, comes_again, tune
from shardmath.operators.matmul.gpu.fused import notes
from shardmath.operators.matmul.gpu.rank_plan import RankPlan
from shardmath.operators.matmul.gpu.scale_moves import choose_strategy

__all__ = ["RankPlan", "Turn", "choose_strategy", "comes_again", "notes", "tune"]
