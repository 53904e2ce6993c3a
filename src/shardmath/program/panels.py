"""How one rank reads a factor of a product along k: where it lies, or gathered into panels.

The part of an operand that a rank needs arrives as moves. Where each move is one dense box across
the whole other axis, BLAS reads it in the peer's memory and nothing is copied. Otherwise the moves
are gathered into a buffer, a panel of k at a time, so that the buffer stays small. `intervals` cuts
k at every bound of both operands: within an interval each operand is one dense matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from shardmath.base.immutable import Immutable
from shardmath.geometry import Move, Run
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
        return [part for move in self.moves for part in clip(move, self.axis, lo, hi)]


def intervals(a: Source, b: Source) -> list[tuple[int, int]]:
    """The intervals of k within which both operands are dense."""
    ends = sorted(a.bounds | b.bounds)
    return list(zip([0, *ends], ends, strict=False))


def clip(move: Move, axis: int, lo: int, hi: int) -> list[Move]:
    """The part of a move that lands between lo and hi of the destination's `axis`, from lo on."""
    return [
        replace(move, runs=(*move.runs[:axis], run, *move.runs[axis + 1 :]))
        for run in _clip(move.runs[axis], lo, hi)
    ]


def _clip(run: Run, lo: int, hi: int) -> Iterable[Run]:
    """The blocks of `run` between lo and hi: a cut one, the whole ones together, a cut one."""
    if run.count == 1:
        start, stop = max(run.dst_start, lo), min(run.dst_start + run.length, hi)
        if start < stop:
            yield Run(1, stop - start, run.src_start + start - run.dst_start, 0, start - lo, 0)
        return
    step = run.dst_step
    first = max(0, -((run.dst_start - lo) // step)) if lo > run.dst_start else 0
    last = min(run.count, (hi - run.dst_start - run.length) // step + 1)
    whole = max(0, last - first)
    for cut in (first - 1, last) if last >= first else (first - 1,):
        if 0 <= cut < run.count:
            yield from _clip(_block(run, cut), lo, hi)
    if whole:
        head = _block(run, first)
        yield Run(
            whole,
            run.length,
            head.src_start,
            run.src_step if whole > 1 else 0,
            head.dst_start - lo,
            step if whole > 1 else 0,
        )


def _block(run: Run, index: int) -> Run:
    return Run(
        1,
        run.length,
        run.src_start + index * run.src_step,
        0,
        run.dst_start + index * run.dst_step,
        0,
    )


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
