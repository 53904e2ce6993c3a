"""Redistribution: the same array, split otherwise."""

from shardmath.operators.redistribute.api import Redistribute, redistribute
from shardmath.operators.redistribute.problem import RedistributeOptions

__all__ = ["Redistribute", "RedistributeOptions", "redistribute"]
