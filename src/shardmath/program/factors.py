"""How one rank reads a factor of a product along k: where it lies, or gathered into panels.

The part of an operand that a rank needs arrives as moves. Where each move is one dense box across
the whole other axis, BLAS reads it in the peer's memory and nothing is copied. Otherwise the moves
are gathered into a buffer, a panel of k at a time, so that the buffer stays small. `intervals` cuts
k at every bound of both operands: within an interval each operand is one dense matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from shardmath.arrays.base import HostArray, raw_view
from shardmath.base.immutable import Immutable
from shardmath.geometry import Move
from shardmath.redistribution import Transfer
from shardmath.redistribution.bound_copies import Calls, bind_moves

# Below this many indices of k per piece, gathering costs less than many thin products.
_THIN = 128
_KEPT_PANEL = 64 << 10  # bytes of a panel that stays for the next call

ArrayOf = Callable[[int], HostArray]  # the array of a rank, in memory that can be read here


class Piece(Immutable):
    """Indices lo to hi of the needed part's k axis, read in rank `src`'s local array.

    `k` and `other` are where the piece starts along the two axes of that array.
    """

    lo: int
    hi: int
    src: int
    k: int
    other: int


class AlongK(Immutable):
    """The part of an operand that a rank needs. Its k axis is `axis`, and `moves` bring what is
    gathered of it. Pure.
    """

    axis: int
    extent: int  # of k
    width: int  # of the other axis
    moves: tuple[Move, ...]

    def shape(self, lo: int, hi: int) -> tuple[int, int]:
        """The shape of a panel with indices lo to hi of k."""
        return (hi - lo, self.width) if self.axis == 0 else (self.width, hi - lo)

    def gather_moves(self, lo: int, hi: int) -> list[Move]:
        """The moves that fill that panel."""
        return [part for move in self.moves for part in move.clipped(self.axis, lo, hi)]


class Source(AlongK):
    """How one rank reads an operand on cores. There are either `pieces`, which cover k in order, or
    moves to gather, `panel` indices of k at a time.
    """

    pieces: tuple[Piece, ...] = ()
    panel: int = 0

    @classmethod
    def plan(cls, transfer: Transfer, rank: int, *, axis: int, panel_elements: int) -> Source:
        """How `rank` reads what `transfer` brings it."""
        shape = transfer.result_shape(rank)
        extent, width = shape[axis], shape[1 - axis]
        if not extent or not width:
            return cls(axis, extent, width, ())
        moves = transfer.into(rank)
        pieces = _pieces(moves, axis, width)
        if len(pieces) == 1 or (pieces and extent >= _THIN * len(pieces)):
            return cls(axis, extent, width, (), pieces)
        panel = min(extent, max(_THIN, panel_elements // width))
        return cls(axis, extent, width, moves, panel=panel)

    @classmethod
    def own(cls, shape: tuple[int, int], rank: int, *, axis: int) -> Source:
        """How `rank` reads a matrix of its own, of this shape, as it lies."""
        extent, width = shape[axis], shape[1 - axis]
        pieces = (Piece(0, extent, rank, 0, 0),) if extent and width else ()
        return cls(axis, extent, width, (), pieces)

    @property
    def bounds(self) -> set[int]:
        """Where this operand's dense matrices end along k."""
        if self.pieces:
            return {piece.hi for piece in self.pieces}
        return {self.extent, *range(self.panel, self.extent, self.panel)} if self.panel else set()


class Factor:
    """Dense matrices of one factor of a product, interval by interval of k."""

    def __init__(self, rank: int, source: Source, array: ArrayOf, dtype: np.dtype[Any]) -> None:
        self._rank = rank
        self.source = source
        self.dtype = dtype
        self._array = array
        self._filled = (0, 0)
        self._panel = np.empty((0, 0), dtype)
        self.copies: Calls = []  # they fill the one panel that stays

    @property
    def copied(self) -> int:
        """Elements that `whole` copies."""
        return 0 if len(self.source.bounds) <= 1 else self.source.extent * self.source.width

    def whole(self) -> HostArray:
        """All of k: where it lies if that is one matrix, or in one panel, or else in a copy."""
        ends = sorted(self.source.bounds)
        first = self.matrix(0, ends[0])
        if len(ends) == 1:
            return first
        order: Literal["C", "F"] = "F" if abs(first.strides[0]) < abs(first.strides[1]) else "C"
        made = np.empty(self.source.shape(0, ends[-1]), first.dtype, order)
        for lo, hi in zip([0, *ends], ends, strict=False):
            part = self._cut(lo, hi, slice(None))
            raw_view(made)[part] = raw_view(self.matrix(lo, hi))
        return made

    def matrix(self, lo: int, hi: int) -> HostArray:
        """Indices lo to hi of k: in a peer's memory, or in the panel that holds them."""
        for piece in self.source.pieces:
            if piece.lo <= lo < piece.hi:
                return self._piece(piece, lo, hi)
        if not self._filled[0] <= lo < self._filled[1]:
            self._fill(lo // self.source.panel * self.source.panel)
        return self._panel[self._cut(lo - self._filled[0], hi - self._filled[0], slice(None))]

    def read(self, lo: int, hi: int) -> dict[int, int]:
        """The bytes of `matrix(lo, hi)` that are read where another rank has them, by that rank."""
        nbytes = (hi - lo) * self.source.width * self.dtype.itemsize
        own = self._rank
        return {x.src: nbytes for x in self.source.pieces if x.lo <= lo < x.hi and x.src != own}

    @property
    def gathers(self) -> bool:
        """Whether panels are gathered anew in each call, into memory of that call."""
        return bool(self.source.panel) and not self.copies

    def keep_small(self) -> None:
        """Keep the panel of a factor that is small; `copies` are then to be run in each call."""
        source = self.source
        nbytes = source.extent * source.width * self.dtype.itemsize
        if self.gathers and source.panel >= source.extent and nbytes <= _KEPT_PANEL:
            self._filled, self._panel = (0, source.extent), self._room(source.extent)
            moves = source.gather_moves(0, source.extent)
            self.copies = bind_moves(moves, self._array, self._panel, rank=self._rank)

    def forget(self) -> None:
        """Drop the panel: what it was gathered from has changed."""
        if not self.copies:
            self._filled, self._panel = (0, 0), self._panel[:0, :0].copy()

    def _room(self, extent: int) -> HostArray:
        return np.empty(self.source.shape(0, extent), self.dtype)

    def _piece(self, piece: Piece, lo: int, hi: int) -> HostArray:
        start = piece.k + lo - piece.lo
        across = slice(piece.other, piece.other + self.source.width)
        return self._array(piece.src)[self._cut(start, start + hi - lo, across)]

    def _fill(self, lo: int) -> None:
        source = self.source
        hi = min(lo + source.panel, source.extent)
        if self._panel.shape[source.axis] != hi - lo:
            self._panel = self._room(hi - lo)
        moves = source.gather_moves(lo, hi)
        for copy in bind_moves(moves, self._array, self._panel, rank=self._rank):
            copy()
        self._filled = (lo, hi)

    def _cut(self, lo: int, hi: int, across: slice) -> tuple[slice, slice]:
        return (slice(lo, hi), across) if self.source.axis == 0 else (across, slice(lo, hi))


def intervals(a: Source, b: Source) -> list[tuple[int, int]]:
    """The intervals of k within which both operands are dense."""
    ends = sorted(a.bounds | b.bounds)
    return list(zip([0, *ends], ends, strict=False))


def _pieces(moves: Sequence[Move], axis: int, width: int) -> tuple[Piece, ...]:
    """The moves as pieces in the order of k; none when one of them is not a dense box across."""
    pieces = []
    for move in moves:
        k, other = move.runs[axis], move.runs[1 - axis]
        if k.count != 1 or other.count != 1 or other.length != width:
            return ()
        pieces.append(
            Piece(k.dst_start, k.dst_start + k.length, move.src, k.src_start, other.src_start)
        )
    return tuple(sorted(pieces, key=lambda piece: piece.lo))
