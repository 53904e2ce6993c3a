"""How one rank reads a factor of a product along k: where it lies, or gathered into panels.

The part of an operand that a rank needs arrives as moves. Where each move is one dense box across
the whole other axis, BLAS reads it in the peer's memory and nothing is copied. Otherwise the moves
are gathered into a buffer, a panel of k at a time, so that the buffer stays small. `intervals` cuts
k at every bound of both operands: within an interval each operand is one dense matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardmath.base.immutable import Immutable
from shardmath.geometry import Move
from shardmath.redistribution import Transfer

# Below this many indices of k per piece, gathering costs less than many thin products.
_THIN = 128


class Piece(Immutable):
    """Indices lo to hi of the needed part's k axis, read in rank `src`'s local array.

    `k` and `other` are where the piece starts along the two axes of that array.
    """

    lo: int
    hi: int
    src: int
    k: int
    other: int


class Source(Immutable):
    """One rank's reading of one operand, whose k axis is `axis`.

    Either `pieces`, which cover k in order, or `moves` to gather, `panel` indices of k at a time.
    """

    axis: int
    extent: int  # of k, in the needed part
    width: int  # of the other axis
    pieces: tuple[Piece, ...]
    moves: tuple[Move, ...]
    panel: int

    @classmethod
    def plan(cls, transfer: Transfer, rank: int, *, axis: int, panel_elements: int) -> Source:
        """How `rank` reads what `transfer` brings it."""
        shape = transfer.result_shape(rank)
        extent, width = shape[axis], shape[1 - axis]
        if not extent or not width:
            return cls(axis, extent, width, (), (), 0)
        moves = transfer.into(rank)
        pieces = _pieces(moves, axis, width)
        if len(pieces) == 1 or (pieces and extent >= _THIN * len(pieces)):
            return cls(axis, extent, width, pieces, (), 0)
        panel = min(extent, max(_THIN, panel_elements // width))
        return cls(axis, extent, width, (), moves, panel)

    @classmethod
    def own(cls, shape: tuple[int, int], rank: int, *, axis: int) -> Source:
        """How `rank` reads a matrix of its own, of this shape, as it lies."""
        extent, width = shape[axis], shape[1 - axis]
        pieces = (Piece(0, extent, rank, 0, 0),) if extent and width else ()
        return cls(axis, extent, width, pieces, (), 0)

    @property
    def bounds(self) -> set[int]:
        """Where this operand's dense matrices end along k."""
        if self.pieces:
            return {piece.hi for piece in self.pieces}
        return {self.extent, *range(self.panel, self.extent, self.panel)} if self.panel else set()

    @property
    def peers(self) -> set[int]:
        """The ranks that are read."""
        return {piece.src for piece in self.pieces} | {move.src for move in self.moves}

    def gather_moves(self, lo: int, hi: int) -> list[Move]:
        """The moves that fill a buffer with indices lo to hi of k."""
        return [part for move in self.moves for part in move.clipped(self.axis, lo, hi)]


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
