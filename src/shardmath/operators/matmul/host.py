"""Executing a matrix product on the cores: read peers' memory, multiply, add, move, finish.

Each phase is separated by an exchange or a barrier, and each is one of three patterns: before
reading what a peer wrote, after writing what a peer will read, before reusing what a peer may still
read. The plan is the same data on every rank; only `Share`, what one rank does, differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shardmath.arrays import dtypes
from shardmath.arrays.base import HostArray
from shardmath.context import DistributedContext
from shardmath.geometry import Layout, Move, bytes_moved, moves
from shardmath.local import epilog as epilogs
from shardmath.local.epilog import MatmulEpilog
from shardmath.local.gemm import multiply
from shardmath.operators.exposure import Exposure, Workspace
from shardmath.operators.matmul.panels import Piece, Source, intervals
from shardmath.operators.matmul.strategy import Strategy
from shardmath.redistribution.host import copy_moves
from shardmath.symmetric.heap import Block

__all__ = ["Operands", "Share", "execute"]

_PANEL_ELEMENTS = 4 << 20  # of one gathered panel: 32 MiB in float64


@dataclass(frozen=True)
class Operands:
    """One execution's arrays: op(A) and op(B) as views, C, D to be filled, the epilog's inputs."""

    a: HostArray
    b: HostArray
    c: HostArray | None
    out: HostArray
    alpha: complex
    beta: complex
    blocks: tuple[Block | None, Block | None]  # of a and b, where they lie on the heap
    inputs: Mapping[str, HostArray]


@dataclass(frozen=True)
class Share:
    """What `rank` does for `strategy`."""

    strategy: Strategy
    rank: int

    @cached_property
    def sources(self) -> tuple[Source, Source]:
        """How this rank reads op(A), along its axis 1, and op(B), along its axis 0."""
        s, problem = self.strategy, self.strategy.problem
        plan = Source.plan
        return (
            plan(problem.a, s.a, self.rank, axis=1, panel_elements=_PANEL_ELEMENTS),
            plan(problem.b, s.b, self.rank, axis=0, panel_elements=_PANEL_ELEMENTS),
        )

    @cached_property
    def read_by_peers(self) -> tuple[bool, bool]:
        """Whether peers read this rank's part of A, of B."""
        s, problem = self.strategy, self.strategy.problem
        return (
            bool(bytes_moved(problem.a, s.a, 1).sent[self.rank]),
            bool(bytes_moved(problem.b, s.b, 1).sent[self.rank]),
        )

    @cached_property
    def additions(self) -> tuple[tuple[Move, ...], ...]:
        """By source rank in order: its products that this rank adds to complete its sums."""
        s = self.strategy
        return tuple(
            shared_part(s.sums, s.reduced, src=src, dst=self.rank) if s.depth[src].length else ()
            for src in range(s.problem.size)
        )

    @cached_property
    def last_moves(self) -> tuple[Move, ...]:
        """What brings the complete sums to where the caller wants them."""
        return moves(self.strategy.reduced, self.strategy.problem.d, dst_rank=self.rank)


def shared_part(held: Layout, need: Layout, *, src: int, dst: int) -> tuple[Move, ...]:
    """All that `dst` needs and `src` holds, whoever else may hold it too."""
    found: list[Move] = [Move(src, dst, ())]
    for one, two in zip(held.spans(src), need.spans(dst), strict=True):
        found = [Move(src, dst, (*m.runs, run)) for m in found for run in one.intersect(two)]
    return tuple(found)


def execute(
    context: DistributedContext, share: Share, operands: Operands, operation: str
) -> dict[str, HostArray]:
    """Fill `operands.out` with this rank's part of D; return the epilog's outputs. Collective."""
    work = _Execution(context, share, operands, operation)
    sums = work.multiply()
    if share.strategy.reduces:
        sums = work.add(sums)
    if share.strategy.moves_result:
        sums = work.move(sums)
    aux = work.finish(sums)
    context.board.barrier(operation)  # before reusing what a peer may still read
    return aux


class _Execution:
    """The state of one execution on one rank."""

    def __init__(
        self, context: DistributedContext, share: Share, operands: Operands, operation: str
    ) -> None:
        self.context = context
        self.share = share
        self.strategy = share.strategy
        self.problem = share.strategy.problem
        self.operands = operands
        self.operation = operation
        self.rank = context.rank
        self.narrow = operands.a.dtype
        self.wide = dtypes.to_numpy(dtypes.accumulator(self.narrow))
        self.workspace = Workspace.of(context)

    # -- multiply ----------------------------------------------------------------------------------

    def multiply(self) -> HostArray:
        """The product of the work's rows and columns, in the accumulator's type."""
        exposure = Exposure(self.context)
        for array, needed, block in zip(
            (self.operands.a, self.operands.b),
            self.share.read_by_peers,
            self.operands.blocks,
            strict=True,
        ):
            exposure.offer(array, needed=needed, block=block)
        # Before reading what a peer wrote: its operands are in place once it has said where.
        exposure.read(self.context.board.exchange(self.operation, exposure.note()))
        a, b = self.share.sources
        out = self._product_memory()
        if a.extent == 0 or out.size == 0:
            out[...] = 0
            return out
        readers = (
            _Reader(self, exposure, 0, a, self.problem.a),
            _Reader(self, exposure, 1, b, self.problem.b),
        )
        conj_a, conj_b = self.problem.conjugate
        for index, (lo, hi) in enumerate(intervals(a, b)):
            left, right = (reader.matrix(lo, hi) for reader in readers)
            multiply(left, right, out, accumulate=index > 0, conj_a=conj_a, conj_b=conj_b)
        return out

    def _product_memory(self) -> HostArray:
        """Where the product goes: D itself where nothing follows, the heap where peers read it."""
        shape = self.strategy.sums.local_shape(self.rank)
        if self.strategy.reduces or self.strategy.moves_result:
            return self.workspace.array("sums", shape, self.wide)
        out = self.operands.out
        plain = self.operands.c is None and out.dtype == self.wide and out.shape == shape
        return out if plain else np.empty_like(out, self.wide)

    # -- add ---------------------------------------------------------------------------------------

    def add(self, sums: HostArray) -> HostArray:
        """The complete sums of this rank's part, added in rank order: the same bits every time."""
        shape = self.strategy.reduced.local_shape(self.rank)
        name = "reduced"
        if self.strategy.moves_result:
            total = self.workspace.array(name, shape, self.wide)
        else:
            total = np.empty_like(self.operands.out, self.wide)
        total[...] = 0
        array = self._shared(sums, "sums", self.strategy.sums)
        for found in self.share.additions:
            copy_moves(found, array, total, add=True)
        return total

    # -- move --------------------------------------------------------------------------------------

    def move(self, sums: HostArray) -> HostArray:
        """The complete sums, brought to where the caller wants them."""
        final = np.empty_like(self.operands.out, self.wide)
        name = "reduced" if self.strategy.reduces else "sums"
        array = self._shared(sums, name, self.strategy.reduced)
        copy_moves(self.share.last_moves, array, final, rank=self.rank)
        return final

    def _shared(self, mine: HostArray, name: str, layout: Layout) -> Callable[[int], HostArray]:
        """Expose an array of the workspace; return how to get every rank's."""
        exposure = Exposure(self.context)
        exposure.offer(mine, needed=True, block=self.workspace.block(name))
        # After writing what a peer will read, and before reading what a peer wrote.
        exposure.read(self.context.board.exchange(self.operation, exposure.note()))

        def array(rank: int) -> HostArray:
            return exposure.array(0, rank, _matrix_shape(layout, rank), self.wide)

        return array

    # -- finish ------------------------------------------------------------------------------------

    def finish(self, sums: HostArray) -> dict[str, HostArray]:
        """Apply alpha, beta C and the epilog; D is rounded once."""
        problem, out, c = self.problem, self.operands.out, self.operands.c
        if self.operands.alpha != 1:
            sums *= np.asarray(self.operands.alpha, self.wide)
        if c is not None:
            self._add_c(sums, c)
        result = dtypes.to_numpy(problem.result)
        _, aux = epilogs.apply(problem.epilog, sums, self.operands.inputs, dtype=result, out=out)
        return self._complete(aux, result)

    def _add_c(self, sums: HostArray, c: HostArray) -> None:
        beta = np.asarray(self.operands.beta, self.wide)
        if beta == 0:  # as BLAS: C is not read
            return
        if not self.problem.sums_c:
            sums += beta * c
            return
        shared = self.workspace.array("c", c.shape, self.wide)
        shared[...] = c
        array = self._shared(shared, "c", self.problem.d)
        for rank in range(self.context.size):
            sums += beta * array(rank)

    def _complete(self, aux: dict[str, HostArray], result: np.dtype[Any]) -> dict[str, HostArray]:
        """Bias gradients: each rank has the sums of what it holds, all ranks' add up."""
        name = self.problem.epilog.makes_bgrad
        if name is None:
            return aux
        if self.problem.epilog is MatmulEpilog.BGRADA:
            partial, layout, axis = epilogs.row_sums(self._op(0)), self.problem.a, 0
        elif self.problem.epilog is MatmulEpilog.BGRADB:
            partial, layout, axis = epilogs.column_sums(self._op(1)), self.problem.b, 1
        else:
            partial, layout, axis = aux[name], self.problem.d, 0
        extent = layout.global_shape[axis]
        held = Layout.product((extent, 1), [layout.column(axis), None], size=layout.size)
        everywhere = Layout.replicated((extent, 1), layout.size)
        need = held if name.startswith("d") else everywhere
        total = self._added_vectors(partial, held, need, once=not layout.disjoint())
        return {**aux, name: total.astype(result)}

    def _op(self, index: int) -> HostArray:
        array = (self.operands.a, self.operands.b)[index]
        return array.conj() if self.problem.conjugate[index] else array

    def _added_vectors(
        self, partial: HostArray, held: Layout, need: Layout, *, once: bool
    ) -> HostArray:
        """The ranks' vectors added where they overlap; with `once`, replicas count once."""
        vector = self.workspace.array("vector", (len(partial), 1), partial.dtype)
        vector[:, 0] = partial
        exposure = Exposure(self.context)
        exposure.offer(vector, needed=True, block=self.workspace.block("vector"))
        exposure.read(self.context.board.exchange(self.operation, exposure.note()))
        total = np.zeros((need.local_shape(self.rank)[0], 1), partial.dtype)

        def array(src: int) -> HostArray:
            return exposure.array(0, src, _matrix_shape(held, src), partial.dtype)

        for src in [self.rank] if once else range(self.context.size):
            found = shared_part(held, need, src=src, dst=self.rank)
            copy_moves(found, array, total, add=True)
        return total[:, 0]


class _Reader:
    """Dense matrices of one operand, interval by interval of k."""

    def __init__(
        self, work: _Execution, exposure: Exposure, slot: int, source: Source, held: Layout
    ) -> None:
        self._work = work
        self._exposure = exposure
        self._slot = slot
        self._source = source
        self._held = held
        self._filled = (0, 0)
        self._panel = np.empty((0, 0), work.narrow)

    def matrix(self, lo: int, hi: int) -> HostArray:
        """Indices lo to hi of k: in a peer's memory, or in the panel that holds them."""
        for piece in self._source.pieces:
            if piece.lo <= lo < piece.hi:
                return self._piece(piece, lo, hi)
        if not self._filled[0] <= lo < self._filled[1]:
            self._fill(lo // self._source.panel * self._source.panel)
        return self._panel[self._cut(lo - self._filled[0], hi - self._filled[0])]

    def _piece(self, piece: Piece, lo: int, hi: int) -> HostArray:
        start = piece.k + lo - piece.lo
        along, across = (
            slice(start, start + hi - lo),
            slice(piece.other, piece.other + self._source.width),
        )
        array = self._array(piece.src)
        return array[along, across] if self._source.axis == 0 else array[across, along]

    def _fill(self, lo: int) -> None:
        source = self._source
        hi = min(lo + source.panel, source.extent)
        shape = (hi - lo, source.width) if source.axis == 0 else (source.width, hi - lo)
        if self._panel.shape != shape:
            self._panel = np.empty(shape, self._work.narrow)
        moved = source.gathering(lo, hi)
        copy_moves(moved, self._array, self._panel, rank=self._work.rank)
        self._filled = (lo, hi)

    def _array(self, rank: int) -> HostArray:
        shape = _matrix_shape(self._held, rank)
        return self._exposure.array(self._slot, rank, shape, self._work.narrow)

    def _cut(self, lo: int, hi: int) -> tuple[slice, slice]:
        if self._source.axis == 0:
            return slice(lo, hi), slice(None)
        return slice(None), slice(lo, hi)


def _matrix_shape(layout: Layout, rank: int) -> tuple[int, int]:
    rows, columns = layout.local_shape(rank)
    return rows, columns
