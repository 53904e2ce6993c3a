"""What follows the products of all ranks: sums added and moved, alpha, beta C, epilog, gradients.

Sums of several ranks are added in rank order, so that the bits are the same every time. Each
barrier here is two patterns at once: after writing what a peer will read, and before reading what
it wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from shardmath.arrays import dtypes
from shardmath.context import DistributedContext
from shardmath.cuda.driver import call
from shardmath.geometry import Layout, Move
from shardmath.local.epilog import MatmulEpilog
from shardmath.local.gpu import Matrix
from shardmath.local.gpu.epilog import copy, finish, row_sums
from shardmath.operators.lanes import Lane
from shardmath.operators.matmul import host
from shardmath.operators.matmul.gpu.addition import Addition
from shardmath.operators.matmul.gpu.gathering import Gathering
from shardmath.operators.matmul.gpu.share import AFTERWARDS, Operands, Share
from shardmath.operators.showing import Showcase, matrix_of

__all__ = ["SHOWN", "Ending"]

SHOWN = ("a", "b", "c", "sums", "reduced", "vector")  # what peers may read


class Ending:
    """The end of one execution on one rank."""

    def __init__(
        self,
        context: DistributedContext,
        share: Share,
        operands: Operands,
        lane: Lane,
        shown: Showcase,
        addition: Addition | None,
    ) -> None:
        self.context = context
        self.share = share
        self.strategy = share.strategy
        self.problem = share.strategy.problem
        self.operands = operands
        self.rank = context.rank
        self.lane = lane
        self.device = lane.team.device
        self.stream = operands.stream
        self.wide = dtypes.accumulator(self.problem.dtype).name
        self.out = matrix_of(operands.out)
        self.order = "F" if self.out.by_columns else "C"
        self.shown = shown
        self.sums: Matrix | None = None  # this rank's product, to be added or moved
        self._addition = addition
        self._own_c: Matrix | None = None

    def prepare(self) -> None:
        """Take memory for sums that peers read, for what is read of theirs, and for vectors."""
        strategy, problem, rank = self.strategy, self.problem, self.rank
        if self._addition is not None:
            self.sums = self._addition.prepare()
        elif strategy.reduces or strategy.moves_result:
            shape = strategy.sums.local_shape(rank)
            self.sums = self.shown.made("sums", shape, self.wide, self.order)
        if self._addition is None:
            self._prepare_to_read()
        if problem.sums_c and self.operands.c is not None:
            c = self.operands.c
            rows, columns = c.shape
            self._own_c = self.shown.made("c", (rows, columns), c.dtype, self.order)
            self._private("all c", c.size)
        if problem.epilog.makes_bgrad:
            held, need = self._gradient()
            self.shown.made("vector", held.local_shape(self.rank), self.wide, "C")
            self._private("vectors", self.context.size * need.local_shape(self.rank)[0])
            self._private("kept", self.operands.out.size)

    def _prepare_to_read(self) -> None:
        """Take memory for the peers' sums, and for those that move at the end."""
        strategy, rank = self.strategy, self.rank
        if strategy.reduces and strategy.moves_result:
            self.shown.made("reduced", strategy.reduced.local_shape(rank), self.wide, self.order)
        if strategy.reduces:
            self._private("pieces", _pieces(self.share.additions, strategy.reduced, rank))
        if strategy.moves_result:
            self._private("final", prod(self.problem.d.local_shape(rank)))

    def _private(self, name: str, elements: int) -> None:
        """Memory for elements of the accumulator's type, which no peer reads."""
        self.lane.buffer(name, elements * dtypes.of(self.wide).itemsize)

    def show_c(self) -> bool:
        """Copy C to where peers read it, if each rank has one: true on all ranks if so."""
        if self._own_c is None:
            return False
        assert self.operands.c is not None
        copy(self.device, self.stream, self._own_c, matrix_of(self.operands.c))
        return True

    def run(self, parts: list[Matrix] | None) -> bool:
        """Put all that follows on the stream; whether peers may still read when it is done.

        `parts` are what this rank has computed of the sums, None if that is D already.
        """
        strategy, epilog = self.strategy, self.problem.epilog
        reads_peers = bool(epilog.makes_bgrad)
        if self._addition is not None:
            parts = self._addition.run()
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
        return reads_peers

    def _barrier(self) -> None:
        self.lane.barrier(self.stream)

    # -- sums of several ranks ---------------------------------------------------------------------

    def _reduce(self) -> list[Matrix]:
        """The ranks' products of this rank's part, to be added in rank order."""
        self._barrier()  # after writing what a peer will read, before reading what it wrote
        shape = self.strategy.reduced.local_shape(self.rank)
        parts = self._collected(self.share.additions, "sums", shape, "pieces")
        if not self.strategy.moves_result:
            return parts
        total = self.shown.own("reduced")
        finish(self.device, self.stream, total, parts)
        return [total]

    def _move(self) -> list[Matrix]:
        """The complete sums, brought to where the caller wants them."""
        self._barrier()  # as in `_reduce`
        name = "reduced" if self.strategy.reduces else "sums"
        shape = self.problem.d.local_shape(self.rank)
        return self._collected((self.share.last_moves,), name, shape, "final")

    def _collected(
        self, groups: Sequence[tuple[Move, ...]], name: str, shape: tuple[int, ...], room: str
    ) -> list[Matrix]:
        """What each group of moves brings of the ranks' matrices of that name, as one matrix each.

        What is one dense box is read where it lies; the rest is gathered in buffer `room`.
        """
        parts: list[Matrix] = []
        if 0 in shape:
            return parts
        used = 0
        gathering = Gathering(self.lane, self.stream, self.share.kept)
        for number, found in enumerate(groups):
            if not found:
                continue
            if _is_whole(found, shape):
                parts.append(self._lying(found[0], name, shape))
                continue
            order = "C" if name == "vector" else self.order
            rows, columns = shape
            piece = Matrix.packed(self.lane.address(room) + used, (rows, columns), self.wide, order)
            used += piece.size * piece.itemsize
            if sum(move.elements for move in found) < piece.size:
                call("cuMemsetD8Async", piece.address, 0, piece.size * piece.itemsize, self.stream)
            gathering.copy(f"{room} {number}", found, self._sharer(name), piece)
            parts.append(piece)
        return parts

    def _sharer(self, name: str) -> Callable[[int], tuple[int, tuple[int, ...]]]:
        return lambda rank: self.shown.place(name, rank)

    def _lying(self, move: Move, name: str, shape: tuple[int, ...]) -> Matrix:
        """A dense box of a rank's matrix."""
        address, strides = self.shown.place(name, move.src)
        item = dtypes.of(self.wide).itemsize
        rows, columns = shape
        whole = Matrix(address, rows, columns, strides[0] // item, strides[1] // item, self.wide)
        top, left = (run.src_start for run in move.runs)
        return whole.part((top, top + rows), (left, left + columns))

    # -- the end -----------------------------------------------------------------------------------

    def _finish(self, parts: list[Matrix]) -> None:
        """Add the parts, apply alpha, beta C and the epilog; D is rounded once."""
        operands, epilog = self.operands, self.problem.epilog
        aux, kept = operands.aux(epilog), None
        if epilog.makes_bgrad and epilog.gradient:
            shape = self.out.rows, self.out.columns
            kept = Matrix.packed(self.lane.address("kept"), shape, self.wide, self.order)
        finish(
            self.device,
            self.stream,
            self.out,
            parts,
            alpha=complex(operands.alpha),
            beta=complex(operands.beta),
            c=self._addend(),
            epilog=MatmulEpilog.DEFAULT if epilog in AFTERWARDS else epilog,
            bias=operands.bias,
            aux=None if aux is None else matrix_of(aux),
            kept=kept,
        )

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
        places = [self.shown.place("c", rank) for rank in range(self.context.size)]
        each = [
            Matrix(address, *shape, steps[0] // item, steps[1] // item, own.dtype)
            for address, steps in places
        ]
        finish(self.device, self.stream, total, each if total.size else [])
        return total

    def _gradient(self) -> tuple[Layout, Layout]:
        """Of the gradient of a bias: which elements each rank has partial sums of, and which it is
        to get.
        """
        epilog, problem = self.problem.epilog, self.problem
        layout, axis = {
            MatmulEpilog.BGRADA: (problem.a, 0),
            MatmulEpilog.BGRADB: (problem.b, 1),
        }.get(epilog, (problem.d, 0))
        extent = layout.global_shape[axis]
        held = Layout.product((extent, 1), [layout.column(axis), None], size=layout.size)
        everywhere = Layout.replicated((extent, 1), layout.size)
        return held, held if epilog.gradient else everywhere

    def _complete(self) -> None:
        """Bias gradients: each rank sums what it holds, and all ranks' sums add up."""
        epilog, problem, size = self.problem.epilog, self.problem, self.context.size
        held, need = self._gradient()
        own = self.shown.own("vector")
        if epilog.gradient:
            shape = self.out.rows, self.out.columns
            x = Matrix.packed(self.lane.address("kept"), shape, self.wide, self.order)
            layout, conjugate = problem.d, False
        else:
            index = 0 if epilog is MatmulEpilog.BGRADA else 1
            x = matrix_of(self.operands.factors[index])
            x = x if index == 0 else x.transposed()
            layout, conjugate = (problem.a, problem.b)[index], problem.conjugate[index]
        row_sums(self.device, self.stream, x, own.address, conjugate=conjugate)
        self._barrier()  # after writing what a peer will read, before reading what it wrote
        sources = range(size) if layout.disjoint() else [self.rank]  # replicas count once
        groups = [host.shared_part(held, need, src=src, dst=self.rank) for src in sources]
        assert epilog.makes_bgrad is not None
        total = matrix_of(self.operands.outputs[epilog.makes_bgrad])
        parts = self._collected(groups, "vector", need.local_shape(self.rank), "vectors")
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
