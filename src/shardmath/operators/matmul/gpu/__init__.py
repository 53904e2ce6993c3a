"""Products on GPUs: in phases, panel by panel, or by one kernel that moves data too."""

from shardmath.operators.matmul.gpu.fused import notes
from shardmath.operators.matmul.gpu.performing import Products, tuned
from shardmath.operators.matmul.gpu.rank_plan import RankPlan
from shardmath.operators.matmul.gpu.scale_moves import choose_strategy

__all__ = ["Products", "RankPlan", "choose_strategy", "notes", "tuned"]
