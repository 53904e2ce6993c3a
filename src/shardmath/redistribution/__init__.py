"""Move data from one layout to another: the transfer plan, and its execution on host memory.

Every rank pulls what it needs from the ranks that own it. Plans know no array library and no peer's
memory; executors know no distribution.
"""

from shardmath.handles.operand import Exposed
from shardmath.redistribution.copies import StridedCopy, lowered
from shardmath.redistribution.exposure import expose, stage, window_on
from shardmath.redistribution.host import Window, copy_moves, perform
from shardmath.redistribution.plan import TransferPlan

__all__ = [
    "Exposed",
    "StridedCopy",
    "TransferPlan",
    "Window",
    "copy_moves",
    "expose",
    "lowered",
    "perform",
    "stage",
    "window_on",
]
