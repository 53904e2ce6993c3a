"""Executing a matrix product on GPUs: gather from peers, multiply, add, move, finish.

The phases are those of the host, on the user's stream: this process waits for nobody after
`prepare` has been agreed on. Each barrier on the stream is one of three patterns: before reading
what a peer wrote, after writing what a peer will read, before reusing what a peer may still read.
Products never read a peer's memory themselves: what lies there is gathered first, on a second
stream while the last panel is multiplied. Sums of several ranks are added in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from shardmath.arrays import dtypes
from shardmath.context import DistributedContext
from shardmath.cuda.driver import call
from shardmath.geometry import Layout, Move
from shardmath.local.epilog import MatmulEpilog
from shardmath.local.gpu import Matrix
from shardmath.local.gpu.blaslt import WORKSPACE
from shardmath.local.gpu.epilog import finish, row_sums
from shardmath.local.gpu.gemm import fits, multiply, takes_result
from shardmath.operators.lanes import Lane
from shardmath.operators.matmul import host
from shardmath.operators.matmul.feeding import Feed, Interval, feeds, intervals
from shardmath.operators.matmul.gathering import Gathering
from shardmath.operators.showing import Showcase, matrix_of
from shardmath.symmetric.device_array import DeviceArray

__all__ = ["Execution", "Operands", "Share"]

_SHOWN = ("a", "b", "c", "sums", "reduced", "vector")  # what peers may read


@dataclass(frozen=True)
class Operands:
    """One execution's arrays on this rank's GPU: op(A), op(B), C, D to be filled, what an epilog
    reads (`inputs`) and makes (`outputs`), and how.
    """

    a: DeviceArray
    b: DeviceArray
    c: DeviceArray | None
    out: DeviceArray
    alpha: complex
    beta: complex
    inputs: Mapping[str, DeviceArray] = field(repr=False)
    outputs: Mapping[str, DeviceArray] = field(repr=False)
    stream: int
    compute: int | None = None  # a MatmulComputeType that is faster, and less exact

    @property
    def factors(self) -> tuple[DeviceArray, DeviceArray]:
        """op(A) and op(B)."""
        return self.a, self.b


@dataclass(frozen=True)
class Share(host.Share):
    """What `rank` does for `strategy` on its GPU."""

    @cached_property
    def feeds(self) -> tuple[Feed, Feed]:
        """How this rank reads op(A) and op(B)."""
        return feeds(self.strategy, self.rank)

    @cached_property
    def schedule(self) -> tuple[list[Interval], int]:
        """The intervals of k, and how many indices the panels' memory has."""
        itemsize = dtypes.of(self.strategy.problem.dtype).itemsize
        rotate = self.strategy.sums.disjoint()
        return intervals(*self.feeds, itemsize, rotate=rotate)

    @property
    def multiplies(self) -> bool:
        """Whether this rank has a product to compute: it may have no elements, or none of k."""
        strategy, rank = self.strategy, self.rank
        return 0 not in strategy.sums.local_shape(rank) and strategy.depth[rank].length > 0

    @cached_property
    def reads_peers(self) -> bool:
        """Whether any rank reads another's operand."""
        return any(transfer.crosses for transfer in self.strategy.transfers)


class Execution:
    """One execution on one rank: `prepare`, tell the peers, `run`."""

    def __init__(
        self, context: DistributedContext, share: Share, operands: Operands, lane: Lane
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
        self.shown = Showcase(context, lane, _SHOWN)
        self._copies: list[tuple[Matrix, Matrix]] = []  # (to, from): operands that peers read
        self._own_c: Matrix | None = None

    # -- prepare -----------------------------------------------------------------------------------

    def prepare(self) -> bytes:
        """Take all heap memory. Local.

        Returns what to tell the peers. Raises HeapExhausted; nothing has been written then.
        """
        strategy, problem, rank = self.strategy, self.problem, self.rank
        for name, array, transfer in zip(
            "ab", self.operands.factors, strategy.transfers, strict=True
        ):
            ranges = transfer.read_by_peers(rank)
            if ranges is not None:
                copy = self.shown.operand(name, array, (ranges[0], ranges[1]))
                if copy is not None:
                    self._copies.append((copy, matrix_of(array).part(ranges[0], ranges[1])))
        if strategy.reduces or strategy.moves_result:
            self.shown.made("sums", strategy.sums.local_shape(rank), self.wide, self.order)
        if strategy.reduces and strategy.moves_result:
            self.shown.made("reduced", strategy.reduced.local_shape(rank), self.wide, self.order)
        if problem.sums_c and self.operands.c is not None:
            c = self.operands.c
            self._own_c = self.shown.made("c", c.shape, c.dtype, self.order)
            self._copies.append((self._own_c, matrix_of(c)))
            self._private("all c", c.size)
        self._prepare_sums()
        if self.share.multiplies:
            self._prepare_product()
        return self.shown.pack()

    def _prepare_sums(self) -> None:
        """Memory for what is read of peers' sums, and for sums of vectors."""
        strategy, problem = self.strategy, self.problem
        if strategy.reduces:
            self._private("pieces", _pieces(self.share.additions, strategy.reduced, self.rank))
        if strategy.moves_result:
            self._private("final", prod(problem.d.local_shape(self.rank)))
        if problem.epilog.makes_bgrad:
            _, held, need = self._gradient()
            self.shown.made("vector", held.local_shape(self.rank), self.wide, "C")
            self._private("vectors", self.context.size * need.local_shape(self.rank)[0])
            self._private("kept", self.operands.out.size)

    def _prepare_product(self) -> None:
        """Memory for panels, for factors that BLAS cannot take as they lie, and for the product."""
        target, (_, room) = self._target(), self.share.schedule
        self.lane.buffer("blas", WORKSPACE)
        if not self._shares_sums and target.address != self.out.address:
            self._private("product", self.out.size)
        itemsize = dtypes.of(self.problem.dtype).itemsize
        for index, feed in enumerate(self.share.feeds):
            if feed.gathers:
                self.lane.buffer(f"panel {'ab'[index]}", room * feed.width * itemsize)
            elif not self._fits(index, self._own(index), target):
                self.lane.buffer(f"packed {'ab'[index]}", feed.extent * feed.width * itemsize)

    def _private(self, name: str, elements: int) -> None:
        """Memory for elements of the accumulator's type, which no peer reads."""
        self.lane.buffer(name, elements * dtypes.of(self.wide).itemsize)

    # -- run ---------------------------------------------------------------------------------------

    def run(self, told: Sequence[bytes]) -> None:
        """Put everything on the stream: D and the epilog's outputs are there after it. Collective.

        `told` is what all ranks have told.
        """
        self.shown.learn(told)
        with self.lane.entered(self.stream):
            for copy, original in self._copies:
                finish(self.device, self.stream, copy, [original])
            together = self.share.reads_peers or self._own_c is not None
            if together:
                self._barrier()  # after writing what a peer will read, before reading what it wrote
            parts = self._multiply()
            if self.strategy.reduces:
                parts, together = self._reduce(), True
            if self.strategy.moves_result:
                parts, together = self._move(parts), True
            if parts is not None:
                self._finish(parts)
            if self.problem.epilog.makes_bgrad:
                self._complete()
                together = True
            if together:
                self._barrier()  # before reusing what a peer may still read

    def _barrier(self) -> None:
        self.lane.barrier(self.stream)

    # -- the product -------------------------------------------------------------------------------

    @property
    def _shares_sums(self) -> bool:
        return self.strategy.reduces or self.strategy.moves_result

    @cached_property
    def _fused(self) -> bool:
        """Whether products give D itself: nothing follows that cuBLASLt could not do."""
        operands, c = self.operands, self.operands.c
        several = len(self.share.schedule[0]) > 1
        return not (
            self._shares_sums
            or self.problem.sums_c
            or self.problem.epilog not in _FUSED
            or operands.alpha == 0  # NaN times 0 is NaN, which BLAS does not look for
            or not takes_result(self.out)
            or (several and self.out.dtype != self.wide)
            or (c is not None and operands.beta != 0 and not self._takes_c(matrix_of(c)))
        )

    def _takes_c(self, c: Matrix) -> bool:
        if c.dtype != self.out.dtype:
            return False
        if self.out.leading is None:
            c = c.transposed()
        return c.leading is not None

    def _target(self) -> Matrix:
        """Where the product goes."""
        if self._shares_sums:
            return self.shown.own("sums")
        if self._fused:
            return self.out
        shape = self.out.rows, self.out.columns
        held = self.lane.buffer("product", self.out.size * dtypes.of(self.wide).itemsize)
        return Matrix.packed(held.block.address, shape, self.wide, self.order)

    def _multiply(self) -> list[Matrix] | None:
        """The product of the work's rows and columns as what is to be finished; None if it is."""
        if not self.share.multiplies:
            if self._shares_sums:
                self._zero(self.shown.own("sums"))
            return []
        target = self._target()
        for number, (a, b) in enumerate(self._factors(target)):
            self._product(a, b, target, number)
        return None if self._fused else [target]

    def _product(self, a: Matrix, b: Matrix, target: Matrix, number: int) -> None:
        """One interval's product, added to those before it."""
        operands = self.operands
        alpha, beta, c = 1.0 + 0.0j, float(number > 0) + 0.0j, None
        if self._fused:
            alpha = complex(operands.alpha)
            if number == 0 and operands.c is not None and operands.beta != 0:
                beta, c = complex(operands.beta), matrix_of(operands.c)
        conj_a, conj_b = self.problem.conjugate
        multiply(
            self.device,
            a,
            b,
            target,
            stream=self.stream,
            workspace=self.lane.address("blas"),
            c=c,
            alpha=alpha,
            beta=beta,
            conj_a=conj_a,
            conj_b=conj_b,
            compute=operands.compute,
        )

    def _factors(self, target: Matrix) -> Any:
        """The dense factors of each interval, in order; those that are gathered will have come."""
        plan, _ = self.share.schedule
        own = [
            None if feed.gathers else self._dense(index, target)
            for index, feed in enumerate(self.share.feeds)
        ]
        gathering = Gathering(self.lane, self.stream)
        with gathering.beside(len(plan) > 1):
            for number, interval in enumerate(plan):
                pair = []
                for index, feed in enumerate(self.share.feeds):
                    dense = own[index]
                    if dense is not None:
                        pair.append(_along(dense, feed.axis, interval.lo, interval.hi))
                    else:
                        panel = self._panel(index, feed, interval, target)
                        moves = feed.gathering(interval.lo, interval.hi)
                        gathering.fetch(number, interval.after, moves, self._source(index), panel)
                        pair.append(panel)
                gathering.arrive(number)
                yield tuple(pair)
                gathering.used(number)

    def _own(self, index: int) -> Matrix:
        """This rank's own part of a factor that needs no gathering."""
        feed, array = self.share.feeds[index], matrix_of(self.operands.factors[index])
        assert feed.place is not None, feed
        (row, column), (rows, columns) = feed.place, feed.shape(0, feed.extent)
        return array.part((row, row + rows), (column, column + columns))

    def _fits(self, index: int, x: Matrix, target: Matrix) -> bool:
        return fits(x, target, conjugate=self.problem.conjugate[index])

    def _dense(self, index: int, target: Matrix) -> Matrix:
        """The same in a form that BLAS takes."""
        own = self._own(index)
        if self._fits(index, own, target):
            return own
        packed = self._oriented(index, f"packed {'ab'[index]}", own, target)
        finish(self.device, self.stream, packed, [own])
        return packed

    def _panel(self, index: int, feed: Feed, interval: Interval, target: Matrix) -> Matrix:
        """Memory for an interval of a factor, in the order of the operand where BLAS takes that."""
        like = matrix_of(self.operands.factors[index])
        rows, columns = feed.shape(interval.lo, interval.hi)
        like = like._replace(rows=rows, columns=columns)
        panel = self._oriented(index, f"panel {'ab'[index]}", like, target)
        return panel._replace(address=panel.address + interval.offset * feed.width * panel.itemsize)

    def _oriented(self, index: int, name: str, like: Matrix, target: Matrix) -> Matrix:
        orders = ("F", "C") if like.by_columns else ("C", "F")
        address, shape = self.lane.address(name), (like.rows, like.columns)
        packed = [Matrix.packed(address, shape, like.dtype, order) for order in orders]
        return next(x for x in packed if self._fits(index, x, target))

    def _source(self, index: int) -> Callable[[int], tuple[int, tuple[int, ...]]]:
        """Where each rank's local part of a factor lies."""
        array = self.operands.factors[index]

        def place(rank: int) -> tuple[int, tuple[int, ...]]:
            if rank == self.rank:
                return array.address, array.strides
            return self.shown.place("ab"[index], rank)

        return place

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

    def _move(self, parts: list[Matrix] | None) -> list[Matrix]:
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
        gathering = Gathering(self.lane, self.stream)
        for found in groups:
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
                self._zero(piece)
            gathering.copy(found, self._sharer(name), piece)
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

    def _zero(self, x: Matrix) -> None:
        """Set a packed matrix to zero."""
        if x.size:
            call("cuMemsetD8Async", x.address, 0, x.size * x.itemsize, self.stream)

    # -- the end -----------------------------------------------------------------------------------

    def _finish(self, parts: list[Matrix]) -> None:
        """Add the parts, apply alpha, beta C and the epilog; D is rounded once."""
        operands, epilog = self.operands, self.problem.epilog
        name = epilog.needs_aux or epilog.makes_aux
        arrays = operands.inputs if epilog.needs_aux else operands.outputs
        bias = operands.inputs.get("bias")
        kept = None
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
            epilog=MatmulEpilog.DEFAULT if epilog in _AFTERWARDS else epilog,
            bias=None if bias is None else (bias.address, bias.strides[0] // bias.itemsize),
            aux=None if name is None else matrix_of(arrays[name]),
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

    def _gradient(self) -> tuple[int, Layout, Layout]:
        """Of the gradient of a bias: the axis that it runs along, which indices each rank has
        partial sums of, and which it is to get.
        """
        epilog, problem = self.problem.epilog, self.problem
        layout, axis = {
            MatmulEpilog.BGRADA: (problem.a, 0),
            MatmulEpilog.BGRADB: (problem.b, 1),
        }.get(epilog, (problem.d, 0))
        extent = layout.global_shape[axis]
        held = Layout.product((extent, 1), [layout.column(axis), None], size=layout.size)
        everywhere = Layout.replicated((extent, 1), layout.size)
        return axis, held, held if epilog.gradient else everywhere

    def _complete(self) -> None:
        """Bias gradients: each rank sums what it holds, and all ranks' sums add up."""
        epilog, problem, size = self.problem.epilog, self.problem, self.context.size
        _, held, need = self._gradient()
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


_AFTERWARDS = (MatmulEpilog.ALLREDUCE, MatmulEpilog.BGRADA, MatmulEpilog.BGRADB)
_FUSED = (MatmulEpilog.DEFAULT, *_AFTERWARDS)


def _along(x: Matrix, axis: int, lo: int, hi: int) -> Matrix:
    """Indices lo to hi of an axis."""
    if axis == 0:
        return x.part((lo, hi), (0, x.columns))
    return x.part((0, x.rows), (lo, hi))


def _is_whole(found: Sequence[Move], shape: tuple[int, ...]) -> bool:
    """Whether moves are one dense box that covers the destination."""
    if len(found) != 1 or found[0].shape != shape:
        return False
    return all(run.count == 1 for run in found[0].runs)


def _pieces(groups: Sequence[tuple[Move, ...]], layout: Layout, rank: int) -> int:
    """Elements of memory for what `_collected` gathers."""
    shape = layout.local_shape(rank)
    return sum(bool(found) and not _is_whole(found, shape) for found in groups) * prod(shape)
