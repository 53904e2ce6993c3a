"""The phases of a product on one rank, as steps over named matrices: what its rank plan means.

    publish a, b ── synchronise ── gather, multiply ──► "sums" ── synchronise ── add up ──► d

It follows from the rank plan and from how the arrays lie, and is the same for all executions that
are alike in this. Products never read a peer's memory themselves: what lies there is gathered
first, on a second stream while the last panel is multiplied. Sums of several ranks are added in
rank order, so that the bits are the same every time. Between hosts what peers take is packed before
they read it, and fetched by them. Pure.
"""

from __future__ import annotations

from shardmath.operators.matmul.gpu.product_lowering import ProductLowering
from shardmath.operators.matmul.gpu.rank_plan import Placement, RankPlan
from shardmath.operators.matmul.gpu.scaled_lowering import ScaledLowering
from shardmath.program.rank_program import RankProgram


def lowered(rank_plan: RankPlan, placement: Placement, addition_order: str = "") -> RankProgram:
    """What the rank does. `addition_order` is the order of products that one collective adds up,
    the same on all ranks; "" where peers read them.
    """
    kind = ScaledLowering if rank_plan.multiplies_elements else ProductLowering
    return kind(rank_plan, placement, addition_order).program()
