"""Linear algebra on distributed arrays."""

from shardmath.linalg import advanced

__all__ = ["advanced"]
