"""Who are the ranks? Start-up and agreement of a few bytes, never data.

Every group offers `ProcessGroup`'s members. Importing the package imports no library of the user's.
"""

from __future__ import annotations

from shardmath.group.base import ProcessGroup, ReductionOp
from shardmath.group.local import LocalProcessGroup
from shardmath.group.solo import SoloProcessGroup

__all__ = [
    "LocalProcessGroup",
    "ProcessGroup",
    "ReductionOp",
    "SoloProcessGroup",
]
