"""Move data from one layout to another: the transfer plan, and its execution on host memory.

Every rank pulls what it needs from the ranks that own it. Plans know no array library and no peer's
memory; executors know no distribution.
"""

from shardmath.redistribution.bound_copies import Window
from shardmath.redistribution.copies import StridedCopy, lowered
from shardmath.redistribution.plan import Sections, Transfer, TransferPlan

__all__ = [
    "Sections",
    "StridedCopy",
    "Transfer",
    "TransferPlan",
    "Window",
    "lowered",
]
