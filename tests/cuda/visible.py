"""How many GPUs the driver may show to this process, and how many ranks the tests put on them.

`RANKS_PER_GPU=4` puts four ranks on each GPU. Contexts that share a GPU take turns, so it is slow,
but 8 ranks can be tested where there are 2 GPUs.
"""

from __future__ import annotations

from pathlib import Path

from shardmath.base.config import environment

__all__ = ["GPUS", "RANKS", "gpu_of"]

_VISIBLE = environment().get("CUDA_VISIBLE_DEVICES", "")
GPUS = len(_VISIBLE.split(",")) if _VISIBLE else len(list(Path("/dev").glob("nvidia[0-9]*")))
RANKS = GPUS * int(environment().get("RANKS_PER_GPU", "1"))


def gpu_of(rank: int) -> int:
    """The GPU of that rank: neighbours sit on different ones."""
    return rank % max(GPUS, 1)
