"""Start ranks on this host: `python -m shardmath run` for programs, `spawn` for functions."""

from __future__ import annotations

from shardmath.launch.function import spawn

__all__ = ["spawn"]
