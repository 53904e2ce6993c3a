"""Which rank sits at which coordinate of an N-dimensional grid of processes.

Two grids are equal exactly when they have the same shape and the same rank at every coordinate,
whichever way they were described.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import field
from math import prod
from typing import Any

from shardmath.base.immutable import Immutable
from shardmath.base.integers import integer, integers
from shardmath.base.untraced import constant_to_compiler


@constant_to_compiler
class ProcessGrid(Immutable):
    """Ranks 0, ..., size - 1 on a grid, by `shape` and `layout`, or one by one by `process_array`.

        ROW_MAJOR  0 1 2    COL_MAJOR  0 2 4    process_array=  [[5, 3, 1],
                   3 4 5               1 3 5                     [4, 2, 0]]

    `layout` may be left out when one extent holds all ranks. Raises ValueError when there is no
    shape, when the layout is missing, or when `process_array` does not hold every rank once or
    contradicts the others; TypeError when `layout` is not a `ProcessGrid.Layout`.
    """

    class Layout(enum.IntEnum):
        """The order in which ranks fill a grid."""

        COL_MAJOR = 0
        ROW_MAJOR = 1

    shape: tuple[int, ...]
    ranks: tuple[int, ...]  # by coordinate, the last coordinate fastest
    _layout: ProcessGrid.Layout | None = field(compare=False)
    _coordinates: tuple[tuple[int, ...], ...] = field(compare=False)

    def __init__(
        self,
        *,
        shape: Sequence[int] | None = None,
        layout: ProcessGrid.Layout | None = None,
        process_array: Any = None,
    ) -> None:
        if layout is not None and not isinstance(layout, ProcessGrid.Layout):
            raise TypeError(f"layout must be a ProcessGrid.Layout, not {layout!r}")
        if process_array is None:
            if shape is None:
                raise ValueError("a process grid needs a shape or a process_array")
            extents = _grid_shape(shape)
            if layout is None and max(extents) != prod(extents):
                raise ValueError(
                    f"a grid of shape {extents} needs a layout: with ProcessGrid.Layout.ROW_MAJOR "
                    "ranks 0, 1, ... lie along the last axis, with COL_MAJOR along the first"
                )
            ranks = _fill(extents, layout)
        else:
            extents, ranks = _read(process_array)
            if shape is not None and _grid_shape(shape) != extents:
                raise ValueError(f"shape {tuple(shape)} but process_array has shape {extents}")
            if layout is not None and ranks != _fill(extents, layout):
                raise ValueError(f"process_array is not in {layout.name} order; leave out layout")
        write = object.__setattr__
        write(self, "shape", extents)
        write(self, "ranks", ranks)
        write(self, "_layout", layout)
        coordinates = dict(zip(ranks, itertools.product(*map(range, extents)), strict=True))
        write(self, "_coordinates", tuple(coordinates[rank] for rank in range(len(ranks))))

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def layout(self) -> ProcessGrid.Layout | None:
        """The order of the ranks; None where `process_array` follows neither order."""
        if self._layout is not None:
            return self._layout
        for layout in (ProcessGrid.Layout.ROW_MAJOR, ProcessGrid.Layout.COL_MAJOR):
            if self.ranks == _fill(self.shape, layout):
                return layout
        return None

    @property
    def process_array(self) -> tuple[Any, ...]:
        """The ranks as nested tuples, indexed by coordinate."""
        return _nest(self.ranks, self.shape)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Where `rank` sits. Raises ValueError when it is not on the grid."""
        number = integer(rank, "rank")
        if not 0 <= number < self.size:
            raise ValueError(f"rank {number} is not on a grid of {self.size} ranks")
        return self._coordinates[number]

    def rank(self, coordinate: Sequence[int]) -> int:
        """The rank at `coordinate`. Raises ValueError when that is outside the grid."""
        cell = integers(coordinate, "coordinate")
        inside = all(0 <= c < p for c, p in zip(cell, self.shape, strict=False))
        if len(cell) != self.ndim or not inside:
            raise ValueError(f"coordinate {cell} is outside a grid of shape {self.shape}")
        place = 0
        for c, p in zip(cell, self.shape, strict=True):
            place = place * p + c
        return self.ranks[place]

    def promoted(self, ndim: int) -> ProcessGrid:
        """The grid with axes of extent 1 appended, up to `ndim` axes."""
        shape = self.shape + (1,) * (ndim - self.ndim)
        if self.layout is not None:
            return ProcessGrid(shape=shape, layout=self.layout)
        return ProcessGrid(process_array=_nest(self.ranks, shape))

    def encode(self) -> tuple[Any, ...]:
        """Plain data that identifies the grid."""
        if self.layout is None:
            return (self.shape, None, self.process_array)
        return (self.shape, int(self.layout), None)

    def __repr__(self) -> str:
        if self.layout is None:
            return f"ProcessGrid(process_array={self.process_array})"
        if self._layout is None and max(self.shape) == self.size:
            return f"ProcessGrid(shape={self.shape})"
        return f"ProcessGrid(shape={self.shape}, layout=ProcessGrid.Layout.{self.layout.name})"


def _grid_shape(shape: Sequence[int]) -> tuple[int, ...]:
    extents = integers(shape, "shape", least=1)
    if not extents:
        raise ValueError("a process grid needs at least one axis")
    return extents


def _fill(shape: tuple[int, ...], layout: ProcessGrid.Layout | None) -> tuple[int, ...]:
    """The ranks by coordinate, the last one fastest, of a grid filled in the order of `layout`."""
    if layout is not ProcessGrid.Layout.COL_MAJOR:
        return tuple(range(prod(shape)))
    steps = [prod(shape[:axis]) for axis in range(len(shape))]
    return tuple(
        sum(c * step for c, step in zip(coordinate, steps, strict=True))
        for coordinate in itertools.product(*map(range, shape))
    )


def _read(array: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, ranks) of nested sequences, or of any array with `tolist`."""
    nested = array.tolist() if hasattr(array, "tolist") else array
    shape: list[int] = []
    level = nested
    while isinstance(level, Sequence) and not isinstance(level, (str, bytes)) and len(level):
        shape.append(len(level))
        level = level[0]
    flat = [nested]
    for extent in shape:
        if not all(isinstance(row, Sequence) and len(row) == extent for row in flat):
            raise ValueError("process_array is ragged: its rows must be of equal length")
        flat = [item for row in flat for item in row]
    if not shape:
        raise ValueError(f"process_array must be a nested sequence of ranks, not {array!r}")
    ranks = integers(flat, "process_array")
    if sorted(ranks) != list(range(len(ranks))):
        raise ValueError(
            f"process_array must hold each of the ranks 0 to {len(ranks) - 1} once, not {ranks}"
        )
    return tuple(shape), ranks


def _nest(flat: tuple[int, ...], shape: tuple[int, ...]) -> tuple[Any, ...]:
    rows: tuple[Any, ...] = flat
    for extent in reversed(shape[1:]):
        rows = tuple(rows[i : i + extent] for i in range(0, len(rows), extent))
    return rows
