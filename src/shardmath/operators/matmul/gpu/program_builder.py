"""How the program of a product is put together on one rank: buffers, steps, and what peers reach.

What moves from rank to rank is published by its owner under a name, and reached by moves: in place
on one host; between hosts it is packed before peers read it, and fetched by them. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardmath.arrays import dtypes
from shardmath.geometry import Move
from shardmath.local.gpu import Matrix
from shardmath.operators.matmul.gpu.panels import Interval
from shardmath.operators.matmul.gpu.rank_plan import Lying, RankPlan
from shardmath.operators.matmul.gpu.steps import (
    Fetched,
    Gather,
    Name,
    Packed,
    Peer,
    Published,
    View,
)
from shardmath.operators.matmul.program import SCALES
from shardmath.program.steps import (
    Await,
    Memory,
    On,
    Reason,
    Record,
    Synchronise,
)
from shardmath.redistribution.parcels import room_for

READ = Synchronise((Reason.AFTER_WRITING, Reason.BEFORE_READING))
REUSE = Synchronise((Reason.BEFORE_REUSING,))

_SIDE = "side"  # the stream of what is gathered while something else is multiplied


class ProgramBuilder:
    """The program of one rank, as far as it has been put together."""

    def __init__(self, rank_plan: RankPlan, lying: Lying, addition_order: str = "") -> None:
        self.rank_plan = rank_plan
        self.strategy, self.rank = rank_plan.strategy, rank_plan.rank
        self.problem = rank_plan.strategy.problem
        self.lying = lying
        self.wide = dtypes.accumulator(self.problem.dtype).name
        self.steps: list[Any] = []
        self.buffers: dict[Name, View | Peer] = {n: View(n, x) for n, x in lying.arrays}
        self.memories: dict[str, Memory] = {}
        self.published: dict[str, Published] = {}
        self.factors = ["a", "b"]  # buffers of op(A) and op(B)
        self.out = self.matrix("d")
        self.order = "F" if self.out.by_columns else "C"
        self.addend = "c" if "c" in self.buffers and "beta" not in lying.zeros else ""
        self.own: dict[str, Name] = {}  # buffers of what this rank has itself of what is moved
        self.addition_order = addition_order
        scaling = self.problem.scaling
        self.quantizes = scaling is not None and scaling.d
        self.wants_amax = scaling is not None and scaling.amax and scaling.d
        self.sums = self._sums()  # this rank's product, to be added or moved; "" if that is D

    # -- buffers -----------------------------------------------------------------------------------

    def emit(self, *steps: Any, stream: str = "") -> None:
        """Steps that follow, on a stream of the lane's or the user's."""
        self.steps += [On(stream, step) for step in steps] if stream else steps

    def matrix(self, name: Name) -> Matrix:
        """The matrix of a buffer that lies in memory of this rank."""
        view = self.buffers[name]
        assert isinstance(view, View), name
        return view.matrix

    def take(self, memory: str, nbytes: int, *, shared: bool = False) -> None:
        """Memory of the lane of at least that size."""
        held = self.memories.get(memory, Memory(0))
        self.memories[memory] = Memory(max(held.nbytes, nbytes), shared or held.shared)

    def lay(self, name: Name, memory: str, x: Matrix) -> Name:
        """A buffer of that name at a place of a memory."""
        self.buffers[name] = View(memory, x)
        return name

    def new(
        self, name: Name, shape: tuple[int, ...], dtype: str, order: str, *, shared: bool = False
    ) -> Name:
        """A packed matrix in memory of the same name; one that peers reach is published."""
        rows, columns = shape
        x = Matrix.packed(0, (rows, columns), dtype, order)
        self.take(name, x.size * x.itemsize, shared=shared and not self.rank_plan.multi_host)
        if shared:
            self.own[name] = name
            if self.rank_plan.multi_host:
                self._make_outbox(name, x.itemsize)
            else:
                self.published[name] = Published(name)
        return self.lay(name, name, x)

    def part(self, name: Name, of: Name, rows: tuple[int, int], columns: tuple[int, int]) -> Name:
        """A buffer of that name that is a part of another."""
        self.buffers[name] = self.buffers[of].part(rows, columns)
        return name

    # -- what peers read ---------------------------------------------------------------------------

    def _make_outbox(self, name: str, itemsize: int) -> None:
        nbytes = self.rank_plan.routes.outbox(name, self.rank, itemsize).nbytes
        if nbytes:
            outbox = f"outbox {name}"
            self.take(outbox, nbytes, shared=True)
            self.lay(outbox, outbox, Matrix.packed(0, (1, nbytes), "uint8", "C"))
            self.published[name] = Published(outbox)

    def publish(self, name: str) -> None:
        """What peers take of this rank's matrix of that name is there for them, when all have
        synchronised.
        """
        if self.rank_plan.multi_host and name in self.published:
            own = self.own[name]
            outbox = self.rank_plan.routes.outbox(name, self.rank, self.matrix(own).itemsize)
            self.emit(Packed(outbox, own, self.published[name].buffer))

    def meet(self, name: str) -> None:
        """After writing what a peer will read, the matrix of that name, and before reading what it
        wrote.
        """
        self.publish(name)
        self.emit(READ)

    def reach(
        self, name: str, part: str, moves: Sequence[Move], *, stream: str = ""
    ) -> dict[int, Name]:
        """The buffers of the ranks' matrices of that name that `moves` read, by rank; between hosts
        a `part` of them is fetched, and what was fetched for another part is gone.
        """
        own = self.own[name]
        itemsize, dtype = self.matrix(own).itemsize, self.matrix(own).dtype
        starts: dict[int, int] = {}
        if self.rank_plan.multi_host:
            found = self.rank_plan.routes.fetches(name, moves, itemsize)
            starts = {each.src: each.at - each.offset for each in found}
            if found:
                room = f"room {name}"
                self.take(room, room_for(found), shared=True)
                self.lay(room, room, Matrix(0, 0, 0, 0, 0, "uint8"))
                self.emit(Fetched(found, name, room), stream=stream)
        sources: dict[int, Name] = {}
        for src in dict.fromkeys(move.src for move in moves if move.elements):
            buffer = sources[src] = own if src == self.rank else f"{name} of {src}"
            if src == self.rank:
                continue
            if not self.rank_plan.multi_host:
                self.buffers[buffer] = Peer(name, src, dtype)
                continue
            parcel = self.rank_plan.routes.parcel(name, src, itemsize)
            if src not in starts:
                place = parcel.offset, parcel.strides
                self.buffers[buffer] = Peer(name, src, dtype, parcel=place)
                continue
            sources[src] = buffer = f"{name} of {src}, {part}"
            (rows, columns), (one, two) = parcel.shape, parcel.strides
            start, strides = starts[src] + parcel.offset, (one // itemsize, two // itemsize)
            self.lay(buffer, f"room {name}", Matrix(start, rows, columns, *strides, dtype))
        return sources

    def gather(
        self, name: str, part: str, moves: Sequence[Move], target: Name, *, stream: str = ""
    ) -> None:
        """What moves bring of the ranks' matrices of that name."""
        moves = tuple(move for move in moves if move.elements)
        sources = self.reach(name, part, moves, stream=stream)
        if moves:
            step = Gather(f"{part} of {name}", moves, tuple(sources.items()), target)
            self.emit(step, stream=stream)

    # -- what is multiplied ------------------------------------------------------------------------

    def _sums(self) -> Name:
        """Memory for this rank's product, where it is added to others or moved."""
        if not (self.strategy.reduces or self.strategy.moves_result):
            return ""
        shape, dtype, order = self.strategy.sums.local_shape(self.rank), self.wide, self.order
        if self.addition_order:
            dtype, order = self.rank_plan.parts_dtype, self.addition_order
        return self.new("sums", shape, dtype, order, shared=True)

    def own_part(self, index: int) -> Name:
        """This rank's own part of an operand that needs no gathering."""
        operand_plan = self.rank_plan.operand_plans[index]
        assert operand_plan.place is not None, operand_plan
        row, column = operand_plan.place
        rows, columns = operand_plan.shape(0, operand_plan.extent)
        name = f"own {'ab'[index]}"
        return self.part(name, self.factors[index], (row, row + rows), (column, column + columns))

    def scales_as(self, index: int, shape: tuple[int, int]) -> Name:
        """The scales of a matrix, which are of that shape, an array or a number."""
        name = SCALES[index]
        if name in self.buffers:
            self.lay(name, name, self.matrix(name)._replace(rows=shape[0], columns=shape[1]))
        return name

    @property
    def words(self) -> int:
        """Greatest values of this rank's part of D: of each product that may make it, one."""
        return self.problem.size if self.rank_plan.rounds is not None else 1

    # -- order -------------------------------------------------------------------------------------

    def fork(self) -> None:
        """What is gathered from here on runs on a stream of its own."""
        self.emit(Record("fork"))
        self.emit(Await("fork"), stream=_SIDE)

    def beside(self, interval: Interval, *, overlaps: bool) -> str:
        """The stream on which an interval's panels are gathered, once their memory is free."""
        if overlaps and interval.after is not None:
            self.emit(Await(f"used {interval.after}"), stream=_SIDE)
        return _SIDE if overlaps else ""

    def await_panels(self, number: int, *, overlaps: bool) -> None:
        """The product of interval `number` comes after its panels."""
        if overlaps:
            self.emit(Record(f"come {number}"), stream=_SIDE)
            self.emit(Await(f"come {number}"))

    def release(self, number: int, *, overlaps: bool) -> None:
        """The product of interval `number` has been put on its stream."""
        if overlaps:
            self.emit(Record(f"used {number}"))
