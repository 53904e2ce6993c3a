"""How many GPUs the driver may show to this process."""

from __future__ import annotations

from pathlib import Path

from shardmath.config import environment

__all__ = ["GPUS"]

_VISIBLE = environment().get("CUDA_VISIBLE_DEVICES", "")
GPUS = len(_VISIBLE.split(",")) if _VISIBLE else len(list(Path("/dev").glob("nvidia[0-9]*")))
