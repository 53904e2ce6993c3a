"""A product on a context of GPUs: feeding operands, multiplying, and what follows."""

from shardmath.operators.matmul.gpu.fused import notes
from shardmath.operators.matmul.gpu.performing import Products, tuned
from shardmath.operators.matmul.gpu.rank_plan import RankPlan
from shardmath.operators.matmul.gpu.scale_moves import choose_strategy

__all__ = ["Products", "RankPlan", "choose_strategy", "notes", "tuned"]
