"""Executing a matrix product on the cores: read peers' memory, multiply, add, move, finish.

Each phase is separated by an exchange or a barrier, and each is one of three patterns: before
reading what a peer wrote, after writing what a peer will read, before reusing what a peer may still
read. The strategy is the same on every rank; a `RankPlan` is what one rank does for it. All heap
memory is allocated in `prepare`, while ranks can still refuse together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from shardmath.arrays import Library, dtypes
from shardmath.arrays.base import HostArray, raw_view
from shardmath.context import Context
from shardmath.geometry import Layout, Move, moves, shared_part
from shardmath.local import epilog as epilogs
from shardmath.local.epilog import MatmulEpilog
from shardmath.local.float8 import quantize
from shardmath.local.gemm import multiply
from shardmath.operators.matmul.problem import gradient_layouts
from shardmath.operators.matmul.strategy import Strategy
from shardmath.operators.workspace import Workspace
from shardmath.program.panels import Piece, Source, intervals
from shardmath.redistribution import Exposed, copy_moves, expose, stage, window_on
from shardmath.redistribution.exposure import staged_bytes
from shardmath.symmetric.heap import Block

__all__ = ["Execution", "Operands", "RankPlan"]

_PANEL_ELEMENTS = 4 << 20  # of one gathered panel: 32 MiB in float64
_WHOLE_ELEMENTS = 128 << 20  # of all that is brought together for a library's product

_ArrayOf = Callable[[int], HostArray]  # the array of a rank, in memory that can be read here


@dataclass(frozen=True)
class Operands:
    """One execution's arrays: op(A) and op(B) as views, C, D to be filled, the epilog's inputs.

    Of a product of eight-bit floats, op(A) and op(B) are the numbers that these stand for.
    """

    a: HostArray
    b: HostArray
    c: HostArray | None
    out: HostArray
    alpha: complex
    beta: complex
    blocks: tuple[Block | None, Block | None]  # of a and b, where they lie on the heap
    inputs: Mapping[str, HostArray]
    scales: tuple[float | None, ...] = ()  # of a, b, c and D, where they are numbers
    library: Library | None = None  # of the user's arrays, where they are what is multiplied


@dataclass(frozen=True)
class RankPlan:
    """What `rank` does for `strategy`."""

    strategy: Strategy
    rank: int

    @cached_property
    def sources(self) -> tuple[Source, Source]:
        """How this rank reads op(A), along its axis 1, and op(B), along its axis 0."""
        a, b = self.strategy.transfers
        return (
            Source.plan(a, self.rank, axis=1, panel_elements=_PANEL_ELEMENTS),
            Source.plan(b, self.rank, axis=0, panel_elements=_PANEL_ELEMENTS),
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What executions have found out, for `explain`."""
        return ()

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


class Execution:
    """One execution on one rank: `prepare`, tell the peers, `run`."""

    def __init__(
        self, context: Context, rank_plan: RankPlan, operands: Operands, operation: str
    ) -> None:
        self.context = context
        self.rank_plan = rank_plan
        self.strategy = rank_plan.strategy
        self.problem = rank_plan.strategy.problem
        self.operands = operands
        self.operation = operation
        self.rank = context.rank
        self.narrow = operands.a.dtype
        self.wide = dtypes.to_numpy(dtypes.accumulator(self.narrow))
        self.workspace = Workspace.of(context)

    # -- prepare -----------------------------------------------------------------------------------

    def prepare(self) -> bytes:
        """Take all heap memory, and show what peers read of op(A) and op(B). Local.

        Returns what to tell the peers. Raises HeapExhausted; no peer has been told anything then.
        """
        strategy, problem, rank = self.strategy, self.problem, self.rank
        if strategy.reduces or strategy.moves_result:
            self.workspace.array("sums", strategy.sums.local_shape(rank), self.wide)
        if strategy.reduces and strategy.moves_result:
            self.workspace.array("reduced", strategy.reduced.local_shape(rank), self.wide)
        if problem.sums_c and problem.has_c:
            self.workspace.array("c", problem.d.local_shape(rank), self.wide)
        if problem.epilog.makes_bgrad:
            longest = max(*self.operands.a.shape, *self.operands.b.shape, *self.operands.out.shape)
            self.workspace.array("vector", (longest,), self.wide)
        a, b = self._show(0), self._show(1)
        return bytes([len(a)]) + a + b

    def _show(self, index: int) -> bytes:
        """Show what peers read of an operand, in place if it is on the heap; nothing if nothing."""
        ranges = self.strategy.transfers[index].read_by_peers(self.rank)
        if ranges is None:
            return b""
        array = (self.operands.a, self.operands.b)[index]
        block = self.operands.blocks[index]
        if block is not None:
            return expose(self.context, array, block).pack()
        buffer = self.workspace.buffer("ab"[index], staged_bytes(ranges, array.itemsize))
        return stage(self.context, array, ranges, buffer).pack()

    # -- run ---------------------------------------------------------------------------------------

    def run(self, shown: Sequence[bytes]) -> dict[str, HostArray]:
        """Fill `operands.out` with this rank's part of D; return the epilog's outputs. Collective.

        `shown` is what all ranks have told: the exchange that carried it is the barrier before
        reading what a peer wrote.
        """
        a, b = self.rank_plan.sources
        of_a = [text[1 : 1 + text[0]] for text in shown]
        of_b = [text[1 + text[0] :] for text in shown]
        left = _Reader(
            self.rank, a, self._arrays(of_a, self.problem.a, self.operands.a), self.narrow
        )
        right = _Reader(
            self.rank, b, self._arrays(of_b, self.problem.b, self.operands.b), self.narrow
        )
        aux: dict[str, HostArray] = {}
        if not self._done_by_library(left, right):
            sums = self._multiply(left, right)
            if self.strategy.reduces:
                sums = self._add(sums)
            if self.strategy.moves_result:
                sums = self._move(sums)
            aux = self._finish(sums)
        self.context.board.barrier(self.operation)  # before reusing what a peer may still read
        return aux

    def _done_by_library(self, left: _Reader, right: _Reader) -> bool:
        """Whether D is done, by a product of the user's library that rounds: nothing follows it."""
        library, operands, strategy = self.operands.library, self.operands, self.strategy
        follows = strategy.reduces or strategy.moves_result or operands.c is not None
        follows = follows or operands.alpha != 1 or self.problem.epilog is not MatmulEpilog.DEFAULT
        if library is None or follows or operands.out.dtype != self.narrow:
            return False
        if self.narrow == self.wide or not (operands.out.size and left.extent):
            return False
        if left.copied + right.copied > _WHOLE_ELEMENTS:
            return False
        return library.matmul(left.whole(), right.whole(), operands.out)

    def _multiply(self, left: _Reader, right: _Reader) -> HostArray:
        """The product of the work's rows and columns, in the accumulator's type."""
        a, b = self.rank_plan.sources
        out = self._product_memory()
        if a.extent == 0 or out.size == 0:
            out[...] = 0
            return out
        conj_a, conj_b = self.problem.conjugate
        for index, (lo, hi) in enumerate(intervals(a, b)):
            multiply(
                left.matrix(lo, hi),
                right.matrix(lo, hi),
                out,
                accumulate=index > 0,
                conj_a=conj_a,
                conj_b=conj_b,
            )
        return out

    def _product_memory(self) -> HostArray:
        """Where the product goes: D itself where nothing follows, the heap where peers read it."""
        shape = self.strategy.sums.local_shape(self.rank)
        if self.strategy.reduces or self.strategy.moves_result:
            return self.workspace.array("sums", shape, self.wide)
        out = self.operands.out
        plain = self.operands.c is None and out.dtype == self.wide
        return out if plain else np.empty_like(out, self.wide)

    def _arrays(self, shown: Sequence[bytes], layout: Layout, mine: HostArray) -> _ArrayOf:
        """How to get the array that each rank has shown, of its part of `layout`."""
        found = {self.rank: mine}

        def array(rank: int) -> HostArray:
            if rank not in found:
                shape = layout.local_shape(rank)
                if 0 in shape:
                    return np.empty(shape, mine.dtype)
                window = window_on(self.context, rank, Exposed.unpack(shown[rank]))
                found[rank] = window.array(shape, mine.dtype)
            return found[rank]

        return array

    def _publish_buffer(self, mine: HostArray, name: str, layout: Layout) -> _ArrayOf:
        """Show an array in buffer `name` of the workspace; return how to get every rank's."""
        exposed = expose(self.context, mine, self.workspace.block(name))
        # After writing what a peer will read, and before reading what a peer wrote.
        shown = self.context.board.exchange(self.operation, exposed.pack())
        return self._arrays(shown, layout, mine)

    def _add(self, sums: HostArray) -> HostArray:
        """The complete sums of this rank's part, added in rank order: the same bits every time."""
        shape = self.strategy.reduced.local_shape(self.rank)
        if self.strategy.moves_result:
            total = self.workspace.array("reduced", shape, self.wide)
        else:
            total = np.empty_like(self.operands.out, self.wide)
        total[...] = 0
        array = self._publish_buffer(sums, "sums", self.strategy.sums)
        for found in self.rank_plan.additions:
            copy_moves(found, array, total, add=True)
        return total

    def _move(self, sums: HostArray) -> HostArray:
        """The complete sums, brought to where the caller wants them."""
        final = np.empty_like(self.operands.out, self.wide)
        name = "reduced" if self.strategy.reduces else "sums"
        array = self._publish_buffer(sums, name, self.strategy.reduced)
        copy_moves(self.rank_plan.last_moves, array, final, rank=self.rank)
        return final

    def _finish(self, sums: HostArray) -> dict[str, HostArray]:
        """Apply alpha, beta C and the epilog; D is rounded once."""
        problem, out, c = self.problem, self.operands.out, self.operands.c
        if self.operands.alpha != 1:
            sums *= np.asarray(self.operands.alpha, self.wide)
        if c is not None:
            self._add_c(sums, c)
        extras = dtypes.to_numpy(problem.extras)
        quantizes = problem.scaling is not None and problem.scaling.d
        last = sums if quantizes else out
        _, aux = epilogs.apply(problem.epilog, sums, self.operands.inputs, dtype=extras, out=last)
        aux = self._complete(dict(aux), extras)
        return {**aux, **self._quantize(sums)} if quantizes else aux

    def _quantize(self, numbers: HostArray) -> dict[str, HostArray]:
        """Round to an eight-bit D; the greatest absolute value of all ranks' if that is wanted."""
        scaling, scale = self.problem.scaling, self.operands.scales[3]
        assert scaling is not None and scale is not None
        quantize(numbers, scale, self.operands.out)
        if not scaling.amax:
            return {}
        most = np.abs(numbers).max(initial=0.0)
        notes = self.context.board.exchange(self.operation, np.float32(most).tobytes())
        every = np.frombuffer(b"".join(notes), np.float32)
        return {"result_amax": every.max(keepdims=True)}

    def _add_c(self, sums: HostArray, c: HostArray) -> None:
        beta = np.asarray(self.operands.beta, self.wide)
        if beta == 0:  # as BLAS: C is not read
            return
        scaling = self.problem.scaling
        if scaling is not None and scaling.c:
            c = c.astype(self.wide) * np.float32(self.operands.scales[2])
        if not self.problem.sums_c:
            sums += beta * c
            return
        shared = self.workspace.array("c", c.shape, self.wide)
        shared[...] = c
        array = self._publish_buffer(shared, "c", self.problem.d)
        for rank in range(self.context.size):
            sums += beta * array(rank)

    def _complete(self, aux: dict[str, HostArray], result: np.dtype[Any]) -> dict[str, HostArray]:
        """Bias gradients: each rank has the sums of what it holds, all ranks' add up."""
        name = self.problem.epilog.makes_bgrad
        if name is None:
            return aux
        if self.problem.epilog is MatmulEpilog.BGRADA:
            partial = epilogs.row_sums(self._op(0))
        elif self.problem.epilog is MatmulEpilog.BGRADB:
            partial = epilogs.column_sums(self._op(1))
        else:
            partial = aux[name]
        layout, held, need = gradient_layouts(self.problem)
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
        array = self._publish_buffer(vector, "vector", held)
        total = np.zeros((need.local_shape(self.rank)[0], 1), partial.dtype)
        for src in [self.rank] if once else range(self.context.size):
            found = shared_part(held, need, src=src, dst=self.rank)
            copy_moves(found, array, total, add=True)
        return total[:, 0]


class _Reader:
    """Dense matrices of one operand, interval by interval of k."""

    def __init__(self, rank: int, source: Source, array: _ArrayOf, dtype: np.dtype[Any]) -> None:
        self._rank = rank
        self._source = source
        self._array = array
        self._filled = (0, 0)
        self._panel = np.empty((0, 0), dtype)

    @property
    def extent(self) -> int:
        """Of k."""
        return self._source.extent

    @property
    def copied(self) -> int:
        """Elements that `whole` copies."""
        return 0 if len(self._source.bounds) <= 1 else self._source.extent * self._source.width

    def whole(self) -> HostArray:
        """All of k: where it lies, if it is one matrix there, or in one panel; else copied."""
        ends = sorted(self._source.bounds)
        first = self.matrix(0, ends[0])
        if len(ends) == 1:
            return first
        across = first.shape[1 - self._source.axis]
        shape = (ends[-1], across) if self._source.axis == 0 else (across, ends[-1])
        order: Literal["C", "F"] = "F" if abs(first.strides[0]) < abs(first.strides[1]) else "C"
        made = np.empty(shape, first.dtype, order)
        for lo, hi in zip([0, *ends], ends, strict=False):
            part = self._cut(lo, hi, slice(None))
            raw_view(made)[part] = raw_view(self.matrix(lo, hi))
        return made

    def matrix(self, lo: int, hi: int) -> HostArray:
        """Indices lo to hi of k: in a peer's memory, or in the panel that holds them."""
        for piece in self._source.pieces:
            if piece.lo <= lo < piece.hi:
                return self._piece(piece, lo, hi)
        if not self._filled[0] <= lo < self._filled[1]:
            self._fill(lo // self._source.panel * self._source.panel)
        return self._panel[self._cut(lo - self._filled[0], hi - self._filled[0], slice(None))]

    def _piece(self, piece: Piece, lo: int, hi: int) -> HostArray:
        start = piece.k + lo - piece.lo
        across = slice(piece.other, piece.other + self._source.width)
        return self._array(piece.src)[self._cut(start, start + hi - lo, across)]

    def _fill(self, lo: int) -> None:
        source = self._source
        hi = min(lo + source.panel, source.extent)
        shape = (hi - lo, source.width) if source.axis == 0 else (source.width, hi - lo)
        if self._panel.shape != shape:
            self._panel = np.empty(shape, self._panel.dtype)
        copy_moves(source.gather_moves(lo, hi), self._array, self._panel, rank=self._rank)
        self._filled = (lo, hi)

    def _cut(self, lo: int, hi: int, across: slice) -> tuple[slice, slice]:
        return (slice(lo, hi), across) if self._source.axis == 0 else (across, slice(lo, hi))
