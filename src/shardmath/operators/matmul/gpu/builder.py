"""Putting together one rank's program of a product: arrays, memories, steps, and what peers reach.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from shardmath.arrays import dtypes
from shardmath.geometry import Move
from shardmath.local.gpu import Matrix
from shardmath.operators.matmul.gpu.rank_plan import Placement, RankPlan
from shardmath.operators.matmul.gpu.steps import ByEngines, Name
from shardmath.operators.matmul.scaling import SCALES
from shardmath.program.rank_program import Peer, RankProgram, View
from shardmath.program.steps import READ, Await, Fused, Get, Memory, On, Pack, Record, Unpack
from shardmath.program.steps import Move as MoveStep
from shardmath.redistribution.delivery import Delivery
from shardmath.redistribution.plan import SomeMoves

# What peers may reach beside op(A) and op(B), in the order in which ranks tell each other.
_SHARED = (
    *("own c", "sums", "reduced", "vector", "scales a", "scales b", "amax"),
    *("lines", "line scales"),
)
Box = tuple[tuple[int, int], tuple[int, int]]


class ProgramBuilder:
    """The unfinished program of one rank. A matrix that passes from rank to rank is shared by its
    owner, and reached by moves.
    """

    def __init__(self, rank_plan: RankPlan, placement: Placement, addition_order: str = "") -> None:
        self.rank_plan = rank_plan
        self.strategy, self.rank = rank_plan.strategy, rank_plan.rank
        self.problem = rank_plan.strategy.problem
        self.intervals = rank_plan.schedule[0]
        self.k = rank_plan.operand_plans[0].extent  # of both operands, here
        self.placement = placement
        self.wide = dtypes.accumulator(self.problem.dtype).name
        self.steps: list[Any] = []
        self.arrays = {name: View.of(name, x) for name, x in placement.arrays}
        self.peers: dict[Name, Peer] = {}
        self.memories: dict[str, Memory] = {}
        self.told: dict[str, View] = {}
        self.factors = ["a", "b"]  # arrays of op(A) and op(B)
        self.out = self.matrix("d")
        self.order = "F" if self.out.by_columns else "C"
        self.addend = "c" if "c" in self.arrays and "beta" not in placement.zeros else ""
        self.addition_order = addition_order
        scaling = self.problem.scaling
        self.quantizes = scaling is not None and scaling.d
        self.wants_amax = scaling is not None and scaling.amax and scaling.d
        self.sums = self._sums()  # this rank's product, to be added or moved; "" if that is D

    def built(self, steps: tuple[Any, ...]) -> RankProgram:
        """The program of these steps."""
        shared = (*self.factors, *_SHARED)
        if self.rank_plan.multi_host:
            shared = tuple(map(_outbox, shared))
        outboxes = {name for name in shared if self.rank_plan.multi_host and name in self.memories}
        told = {name: self.told.get(name) for name in shared if name not in outboxes}
        arrays, memories = self.arrays, self.memories
        return RankProgram(steps, arrays, memories, shared, told=told, peers=self.peers)

    # -- arrays ------------------------------------------------------------------------------------

    def emit(self, *steps: Any, stream: str = "") -> None:
        """Add steps, on a stream of the lane's or, by default, the user's."""
        self.steps += [On(stream, step) for step in steps] if stream else steps

    @contextmanager
    def apart(self) -> Iterator[list[Any]]:
        """A list for the steps that are added within, in place of the program's."""
        before, self.steps = self.steps, []
        try:
            yield self.steps
        finally:
            self.steps = before

    def matrix(self, name: Name) -> Matrix:
        """The matrix of an array in memory of this rank."""
        return self.arrays[name].matrix

    def take(self, memory: str, nbytes: int, *, shared: bool = False) -> None:
        """Reserve memory of the lane, of at least that size."""
        held = self.memories.get(memory, Memory(0))
        self.memories[memory] = Memory(max(held.nbytes, nbytes), shared or held.shared)

    def lay(self, name: Name, memory: str, x: Matrix) -> Name:
        """Name an array: a matrix whose address counts from where the memory begins."""
        self.arrays[name] = View.of(memory, x)
        return name

    def new(
        self, name: Name, shape: tuple[int, ...], dtype: str, order: str, *, shared: bool = False
    ) -> Name:
        """A packed matrix in memory of the same name, which peers reach if it is `shared`."""
        rows, columns = shape
        x = Matrix.packed(0, (rows, columns), dtype, order)
        self.take(name, x.size * x.itemsize)
        self.lay(name, name, x)
        if shared:
            self.share(name)
        return name

    def part(self, name: Name, of: Name, rows: tuple[int, int], columns: tuple[int, int]) -> Name:
        """Name a part of another array."""
        return self.lay(name, self.arrays[of].memory, self.matrix(of).part(rows, columns))

    # -- what peers read ---------------------------------------------------------------------------

    def own(self, name: str) -> Name:
        """This rank's own array of the ranks' matrices of that name."""
        a, b = self.factors
        return {"a": a, "b": b, "c": "own c"}.get(name, name)

    def delivery(self, name: str) -> Delivery:
        """How the ranks' matrices of that name pass between hosts."""
        return self.rank_plan.delivery(name, self.matrix(self.own(name)).itemsize)

    def share(self, name: str, view: View | None = None) -> None:
        """Let peers reach this rank's matrix of that name, or `view` in place of it. Between hosts
        they reach an outbox, into which it is packed.
        """
        own = self.own(name)
        if not self.rank_plan.multi_host:
            self.told[own] = view = view or self.arrays[own]
            if view.memory in self.memories:
                self.take(view.memory, 0, shared=True)
        elif nbytes := self.delivery(name).outbox.nbytes:
            self.take(_outbox(own), nbytes, shared=True)

    def publish(self, name: str) -> None:
        """Put what peers take of a matrix where they find it after the next synchronisation:
        between hosts it is packed.
        """
        own = self.own(name)
        if self.rank_plan.multi_host and _outbox(own) in self.memories:
            self.emit(Pack(self.delivery(name), own, _outbox(own)))

    def synchronise(self, name: str) -> None:
        """Synchronise: after writing the matrix of that name, and before reading the peers'."""
        self.publish(name)
        self.emit(READ)

    def gather(self, name: str, moves: Sequence[Move], target: Name, *, stream: str = "") -> None:
        """Move parts of the ranks' matrices of that name into `target`."""
        moves, own = tuple(move for move in moves if move.elements), self.own(name)
        if not moves:
            return
        step: Any = MoveStep(SomeMoves(moves, self.matrix(own).itemsize), own, target)
        if self.rank_plan.multi_host:
            delivery = self.delivery(name).only(moves)
            room = self._fetched(delivery, own, f"room {name}", stream)
            step = Unpack(delivery, own, _outbox(own), room, target)
        self.emit(Fused(ByEngines(), (step,)) if stream else step, stream=stream)

    def read(self, name: str, array: Name, move: Move, box: Box | None = None) -> Name:
        """Name the dense box that a move reads of a rank's matrix, or another box of that matrix.
        On one host it is read in place; between hosts it is fetched.
        """
        own, src = self.own(name), move.src
        rows, columns = box or [(run.src_start, run.src_start + run.length) for run in move.runs]
        if src == self.rank:
            return self.part(array, own, rows, columns)
        dtype, parcel = self.matrix(own).dtype, None
        if self.rank_plan.multi_host:
            delivery = self.delivery(name).only([move])
            start, (one, two) = parcel = delivery.place(src)
            if delivery.is_far(src):
                room = self._fetched(delivery, own, f"room of {array}", "")
                item = delivery.transfer.itemsize
                x = Matrix(start, 0, 0, one // item, two // item, dtype)
                return self.lay(array, room, x.part(rows, columns))
            own = _outbox(own)
        self.peers[array] = Peer(own, src, dtype, (rows, columns), parcel)
        return array

    def _fetched(self, delivery: Delivery, own: Name, room: str, stream: str) -> str:
        """Fetch from other hosts into memory `room`, which is overwritten."""
        self.take(room, delivery.room, shared=True)
        if delivery.fetches:
            self.emit(Get(delivery, _outbox(own), room), stream=stream)
        return room

    # -- what is multiplied ------------------------------------------------------------------------

    def _sums(self) -> Name:
        """Memory for this rank's product if it is added to others or moved, else ""."""
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
        """The name of a matrix's scales, as an array of that shape or a number."""
        name = SCALES[index]
        if name in self.arrays:
            self.lay(name, name, self.matrix(name)._replace(rows=shape[0], columns=shape[1]))
        return name

    @property
    def words(self) -> int:
        """How many greatest values this rank has of its part of D: one for each of its products."""
        return 1

    # -- order -------------------------------------------------------------------------------------

    def follow(self, stream: str, other: str, event: str) -> None:
        """Let a stream wait for everything that is on another."""
        self.emit(Record(event), stream=other)
        self.emit(Await(event), stream=stream)


def _outbox(own: Name) -> str:
    """The memory into which an array is packed for peers."""
    return f"outbox {own}"
