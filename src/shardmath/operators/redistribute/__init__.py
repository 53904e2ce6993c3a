"""Redistribution: the same array, split otherwise."""

from shardmath.operators.redistribute.api import Redistribute, redistribute
from shardmath.operators.redistribute.operation import RedistributeOptions

__all__ = ["Redistribute", "RedistributeOptions", "redistribute"]
