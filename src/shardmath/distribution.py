"""Distributions, and redistribution from any of them to any other: the public door.

`Slab`, `Box`, `BlockCyclic`, `BlockNonCyclic` and `Replicated` say how a global array is split over
ranks; `redistribute` and `Redistribute` turn one split into another.
"""

from shardmath.errors import BindDistributionError, ConvertDistributionError
from shardmath.geometry import (
    BlockCyclic,
    BlockNonCyclic,
    Box,
    Distribution,
    Layout,
    ProcessGrid,
    Replicated,
    Slab,
    infer_global_shape,
)
from shardmath.operators.redistribute.api import Redistribute, redistribute
from shardmath.operators.redistribute.operation import RedistributeOptions

__all__ = [
    "BindDistributionError",
    "BlockCyclic",
    "BlockNonCyclic",
    "Box",
    "ConvertDistributionError",
    "Distribution",
    "Layout",
    "ProcessGrid",
    "Redistribute",
    "RedistributeOptions",
    "Replicated",
    "Slab",
    "infer_global_shape",
    "redistribute",
]


def __dir__() -> list[str]:
    return sorted(__all__)
