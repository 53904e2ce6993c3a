"""Move data from one layout to another: the transfer plan, which is data, and its execution on host memory.

Every rank pulls what it needs from the ranks that own it. Plans know no array library and no peer's
memory; executors know no distribution.
"""

from shardmath.redistribution.copies import StridedCopy, lowered
from shardmath.redistribution.host import Window, perform, pull
from shardmath.redistribution.plan import TransferPlan

__all__ = ["StridedCopy", "TransferPlan", "Window", "lowered", "perform", "pull"]
