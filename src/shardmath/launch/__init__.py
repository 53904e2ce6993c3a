"""Start ranks on this host: `python -m shardmath run` for programs, `spawn` for functions."""

from __future__ import annotations

from shardmath.launch.spawn import spawn

__all__ = ["spawn"]
