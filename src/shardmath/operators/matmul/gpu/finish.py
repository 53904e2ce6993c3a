"""What follows the products of all ranks: sums added and moved, alpha, beta C, epilog, gradients.

Sums of several ranks are added in rank order, so that the bits are the same every time. Each
barrier here is two patterns at once: after writing what a peer will read, and before reading what
it wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from shardmath.arrays import dtypes
from shardmath.context.context import Context
from shardmath.cuda.driver import call
from shardmath.geometry import Layout, Move
from shardmath.local.epilog import MatmulEpilog
from shardmath.local.gpu import Matrix
from shardmath.local.gpu.epilog import copy, finish, row_sums
from shardmath.operators.lanes import Lane
from shardmath.operators.matmul.gpu.float8_conversion import QuantizedResult
from shardmath.operators.matmul.gpu.gather import Gather
from shardmath.operators.matmul.gpu.line_exchange import LINE_SCALES, LINES
from shardmath.operators.matmul.gpu.rank_plan import AFTERWARDS, Operands, RankPlan
from shardmath.operators.matmul.gpu.separate_reduction import SeparateReduction
from shardmath.operators.matmul.problem import gradient_layouts
from shardmath.operators.published import Places, PublishedMatrices, matrix_of

__all__ = ["PUBLISHED", "FinishPhase"]

# What peers may read, and what they write.
PUBLISHED = (
    *("a", "b", "c", "sums", "reduced", "vector", "scales a", "scales b", "amax"),
    *(LINES, LINE_SCALES),
)


class FinishPhase:
    """The end of one execution on one rank."""

    def __init__(
        self,
        context: Context,
        rank_plan: RankPlan,
        operands: Operands,
        lane: Lane,
        published: PublishedMatrices,
        reduction: SeparateReduction | None,
    ) -> None:
        self.context = context
        self.rank_plan = rank_plan
        self.strategy = rank_plan.strategy
        self.problem = rank_plan.strategy.problem
        self.operands = operands
        self.rank = context.rank
        self.lane = lane
        self.device = lane.team.device
        self.stream = operands.stream
        self.wide = dtypes.accumulator(self.problem.dtype).name
        self.out = matrix_of(operands.out)
        self.order = "F" if self.out.by_columns else "C"
        self.published = published
        self.sums: Matrix | None = None  # this rank's product, to be added or moved
        self._reduction = reduction
        self._own_c: Matrix | None = None
        scaling = self.problem.scaling
        self.quantized_result: QuantizedResult | None = None
        if scaling is not None and scaling.d:
            self.quantized_result = QuantizedResult(
                rank_plan, operands, lane, published, context.size
            )

    def prepare(self) -> None:
        """Take memory for sums that peers read, for what is read of theirs, and for vectors."""
        strategy, problem, rank = self.strategy, self.problem, self.rank
        if self.quantized_result is not None:
            self.quantized_result.prepare()
        if self._reduction is not None:
            self.sums = self._reduction.prepare()
        elif strategy.reduces or strategy.moves_result:
            shape = strategy.sums.local_shape(rank)
            self.sums = self.published.made("sums", shape, self.wide, self.order)
            self._make_room("sums", self.rank_plan.additions if strategy.reduces else self._last)
        if self._reduction is None:
            self._prepare_to_read()
        if problem.sums_c and self.operands.c is not None:
            c = self.operands.c
            rows, columns = c.shape
            self._own_c = self.published.made("c", (rows, columns), c.dtype, self.order)
            self.published.make_room("c", lambda: [("", self.rank_plan.all_c)], c.itemsize)
            self._private("all c", c.size)
        if problem.epilog.makes_bgrad:
            _, held, need = gradient_layouts(problem)
            self.published.made("vector", held.local_shape(self.rank), self.wide, "C")
            self._make_room("vector", self.rank_plan.vectors)
            self._private("vectors", self.context.size * need.local_shape(self.rank)[0])
            self._private("kept", self.operands.out.size)

    def _prepare_to_read(self) -> None:
        """Take memory for the peers' sums, and for those that move at the end."""
        strategy, rank = self.strategy, self.rank
        if strategy.reduces and strategy.moves_result:
            self.published.made(
                "reduced", strategy.reduced.local_shape(rank), self.wide, self.order
            )
            self._make_room("reduced", self._last)
        if strategy.reduces:
            self._private("pieces", _pieces(self.rank_plan.additions, strategy.reduced, rank))
        if strategy.moves_result:
            self._private("final", prod(self.problem.d.local_shape(rank)))

    def _private(self, name: str, elements: int) -> None:
        """Memory for elements of the accumulator's type, which no peer reads."""
        self.lane.private(name, elements * dtypes.of(self.wide).itemsize)

    def _make_room(self, name: str, groups: Sequence[tuple[Move, ...]]) -> None:
        """Memory for what is reached of the ranks' matrices of that name, all groups at once."""
        moves = tuple(move for found in groups for move in found)
        self.published.make_room(name, lambda: [("", moves)], dtypes.of(self.wide).itemsize)

    @property
    def _last(self) -> tuple[tuple[Move, ...], ...]:
        return (self.rank_plan.last_moves,)

    def show_c(self) -> bool:
        """Copy C to where peers read it, if each rank has one: true on all ranks if so."""
        if self._own_c is None:
            return False
        assert self.operands.c is not None
        copy(self.device, self.stream, self._own_c, matrix_of(self.operands.c))
        self.published.publish("c", self.stream)
        return True

    def run(self, parts: list[Matrix] | None) -> bool:
        """Put all that follows on the stream; whether peers may still read when it is done.

        `parts` are what this rank has computed of the sums, None if that is D already.
        """
        strategy, epilog = self.strategy, self.problem.epilog
        reads_peers = bool(epilog.makes_bgrad)
        if self._reduction is not None:
            parts = self._reduction.run()
        else:
            reads_peers |= strategy.reduces or strategy.moves_result
            if strategy.reduces:
                parts = self._reduce()
            if strategy.moves_result:
                parts = self._move()
        if parts is not None:
            self._finish(parts)
        if epilog.makes_bgrad:
            self._complete()
        if self.quantized_result is not None and self.quantized_result.finds_amax:
            self._meet("amax")
            self.quantized_result.complete()
            reads_peers = True
        return reads_peers

    def _meet(self, name: str) -> None:
        """After writing what a peer will read, the matrix of that name, and before reading what it
        wrote.
        """
        self.published.publish(name, self.stream)
        self.lane.barrier(self.stream)

    # -- sums of several ranks ---------------------------------------------------------------------

    def _reduce(self) -> list[Matrix]:
        """The ranks' products of this rank's part, to be added in rank order."""
        self._meet("sums")
        shape = self.strategy.reduced.local_shape(self.rank)
        parts = self._collected(self.rank_plan.additions, "sums", shape, "pieces")
        if not self.strategy.moves_result:
            return parts
        total = self.published.own("reduced")
        finish(self.device, self.stream, total, parts)
        return [total]

    def _move(self) -> list[Matrix]:
        """The complete sums, brought to where the caller wants them."""
        name = "reduced" if self.strategy.reduces else "sums"
        self._meet(name)
        shape = self.problem.d.local_shape(self.rank)
        return self._collected(self._last, name, shape, "final")

    def _collected(
        self, groups: Sequence[tuple[Move, ...]], name: str, shape: tuple[int, ...], room: str
    ) -> list[Matrix]:
        """What each group of moves brings of the ranks' matrices of that name, as one matrix each.

        What is one dense box is read in place; the rest is gathered in buffer `room`.
        """
        parts: list[Matrix] = []
        if 0 in shape:
            return parts
        used = 0
        every = tuple(move for found in groups for move in found)
        places = self.published.reach(name, "", every, self.stream)
        gather = Gather(self.lane, self.stream, self.rank_plan.cache)
        for number, found in enumerate(groups):
            if not found:
                continue
            if _is_whole(found, shape):
                parts.append(self._lying(found[0], places, shape))
                continue
            order = "C" if name == "vector" else self.order
            rows, columns = shape
            piece = Matrix.packed(self.lane.address(room) + used, (rows, columns), self.wide, order)
            used += piece.size * piece.itemsize
            if sum(move.elements for move in found) < piece.size:
                call("cuMemsetD8Async", piece.address, 0, piece.size * piece.itemsize, self.stream)
            gather.copy(f"{room} {number}", found, places, piece)
            parts.append(piece)
        return parts

    def _lying(self, move: Move, places: Places, shape: tuple[int, ...]) -> Matrix:
        """A dense box of a rank's matrix."""
        address, strides = places(move.src)
        item = dtypes.of(self.wide).itemsize
        rows, columns = shape
        whole = Matrix(address, rows, columns, strides[0] // item, strides[1] // item, self.wide)
        top, left = (run.src_start for run in move.runs)
        return whole.part((top, top + rows), (left, left + columns))

    # -- the end -----------------------------------------------------------------------------------

    def _finish(self, parts: list[Matrix]) -> None:
        """Add the parts, apply alpha, beta C and the epilog; D is rounded once."""
        operands, epilog = self.operands, self.problem.epilog
        aux, unrounded = operands.aux(epilog), None
        if epilog.makes_bgrad and epilog.gradient:
            shape = self.out.rows, self.out.columns
            unrounded = Matrix.packed(self.lane.address("kept"), shape, self.wide, self.order)
        numbers = self.out if self.quantized_result is None else self.quantized_result.numbers
        finish(
            self.device,
            self.stream,
            numbers,
            parts,
            alpha=complex(operands.alpha),
            beta=complex(operands.beta),
            c=self._addend(),
            epilog=MatmulEpilog.DEFAULT if epilog in AFTERWARDS else epilog,
            bias=operands.bias,
            aux=None if aux is None else matrix_of(aux),
            unrounded=unrounded,
            extra="" if self.quantized_result is None else self.problem.extras,
        )
        if self.quantized_result is not None:
            self.quantized_result.finish(numbers)

    def _addend(self) -> Matrix | None:
        """C; where each rank has one, their sum."""
        c = self.operands.c
        if c is None or self.operands.beta == 0:
            return None
        if self._own_c is None:
            return matrix_of(c)
        own = self._own_c
        shape = own.rows, own.columns
        total = Matrix.packed(self.lane.address("all c"), shape, self.wide, self.order)
        item = own.itemsize
        place = self.published.reach("c", "", self.rank_plan.all_c, self.stream)
        places = [place(rank) for rank in range(self.context.size)] if total.size else []
        each = [
            Matrix(address, *shape, steps[0] // item, steps[1] // item, own.dtype)
            for address, steps in places
        ]
        finish(self.device, self.stream, total, each if total.size else [])
        return total

    def _complete(self) -> None:
        """Bias gradients: each rank sums what it holds, and all ranks' sums add up."""
        epilog, problem, conjugate = self.problem.epilog, self.problem, False
        own = self.published.own("vector")
        if epilog.gradient:
            shape = self.out.rows, self.out.columns
            x = Matrix.packed(self.lane.address("kept"), shape, self.wide, self.order)
        else:
            index = 0 if epilog is MatmulEpilog.BGRADA else 1
            x = matrix_of(self.operands.ab[index])
            x = x if index == 0 else x.transposed()
            conjugate = problem.conjugate[index]
        row_sums(self.device, self.stream, x, own.address, conjugate=conjugate)
        self._meet("vector")
        assert epilog.makes_bgrad is not None
        total = matrix_of(self.operands.outputs[epilog.makes_bgrad])
        _, _, need = gradient_layouts(problem)
        lines = need.local_shape(self.rank)
        parts = self._collected(self.rank_plan.vectors, "vector", lines, "vectors")
        finish(self.device, self.stream, total, parts)


def _is_whole(found: Sequence[Move], shape: tuple[int, ...]) -> bool:
    """Whether moves are one dense box that covers the destination."""
    if len(found) != 1 or found[0].shape != shape:
        return False
    return all(run.count == 1 for run in found[0].runs)


def _pieces(groups: Sequence[tuple[Move, ...]], layout: Layout, rank: int) -> int:
    """Elements of memory for what `_collected` gathers."""
    shape = layout.local_shape(rank)
    return sum(bool(found) and not _is_whole(found, shape) for found in groups) * prod(shape)
