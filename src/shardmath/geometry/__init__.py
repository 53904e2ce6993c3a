"""Who owns which indices of a global array, and which moves turn one layout into another.

Pure integers: nothing here knows an array library, a communicator or a device, so every rank can
compute what every other rank owns.
"""

from shardmath.geometry.distribution import Distribution, infer_global_shape
from shardmath.geometry.distributions import (
    BlockCyclic,
    BlockNonCyclic,
    Box,
    Replicated,
    Slab,
    decode,
    unbound,
)
from shardmath.geometry.grid import ProcessGrid
from shardmath.geometry.layout import Layout
from shardmath.geometry.moves import (
    Move,
    Pattern,
    Traffic,
    bytes_moved,
    bytes_received,
    classify,
    common_elements,
    counted,
    kept_elements,
    moves,
    shared_part,
)
from shardmath.geometry.spans import Run, Spans

__all__ = [
    "BlockCyclic",
    "BlockNonCyclic",
    "Box",
    "Distribution",
    "Layout",
    "Move",
    "Pattern",
    "ProcessGrid",
    "Replicated",
    "Run",
    "Slab",
    "Spans",
    "Traffic",
    "bytes_moved",
    "bytes_received",
    "classify",
    "common_elements",
    "counted",
    "decode",
    "infer_global_shape",
    "kept_elements",
    "moves",
    "shared_part",
    "unbound",
]
