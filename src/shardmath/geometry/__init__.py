"""Who owns which indices of a global array, and which moves turn one layout into another.

Pure integers: nothing here knows an array library, a communicator or a device, so every rank can
compute what every other rank owns.
"""

from shardmath.geometry.layout import Layout
from shardmath.geometry.moves import Move, Pattern, Traffic, bytes_moved, classify, moves
from shardmath.geometry.spans import Run, Spans

__all__ = [
    "Layout",
    "Move",
    "Pattern",
    "Run",
    "Spans",
    "Traffic",
    "bytes_moved",
    "classify",
    "moves",
]
