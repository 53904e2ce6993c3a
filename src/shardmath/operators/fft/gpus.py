"""Transforms on the ranks' GPUs: what performs their programs there, launched on the user's stream.

After the ranks have agreed, no process waits for another: GPUs do, by barriers on the stream. What
takes memory or time is made before, so want of it on one rank is an error on all before an element
is touched. Which buffers peers reach depends on where all ranks' results lie; a rank prepares for
what was so in the last call of its plan, and tells its peers for what it has prepared. Transforms
of a context have one lane, and follow each other on any streams.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from shardmath.arrays import library_of
from shardmath.call.agreement import Agreement
from shardmath.context import Context
from shardmath.cuda import stream as streams
from shardmath.cuda.driver import beside_captures
from shardmath.lru_cache import LRUCache
from shardmath.operators.fft import rank_plan
from shardmath.operators.fft.launching import Launch
from shardmath.operators.fft.preparation import prepare
from shardmath.operators.fft.push_stream import PushStream
from shardmath.operators.fft.rank_plan import DevicePlan, Results
from shardmath.operators.in_place import array_in_place
from shardmath.operators.lanes import LANES, Lane
from shardmath.operators.replay import GraphCache
from shardmath.operators.workspace import give_back
from shardmath.program.gpu_arrays import GPUArrays, read_arrays
from shardmath.program.performing import Arguments, Names, Plan, Turn
from shardmath.symmetric.allocation import block_of
from shardmath.symmetric.device_array import Blank, Result, require_device, result_in, stream_of
from shardmath.symmetric.exposed import Exposed
from shardmath.symmetric.operand import Operand

__all__ = ["GPUTransforms"]

_KEPT = 128  # executions that are launched as before
_PLACES = 32  # of results of one call, for which all is prepared
_TAG = 8  # bytes, of a plan
_UNPREPARED = bytes(_TAG)
# Whether peers reach the result, whether it is packed, its order; for which results of all ranks
# the buffers after this have been prepared, if they have.
_HEAD = struct.Struct("<??cB")
_LENGTH = struct.Struct("<H")


@dataclass(frozen=True, eq=False)
class _Prepared:
    """One rank's side of executions of `plan` with arrays in the same places, on one stream.

    `launch` is None as long as it is not known where the peers' results lie. It holds while the
    lane's buffers are this `memory`.
    """

    plan: Plan
    stream: int
    note: bytes
    launch: Launch | None = None
    memory: Mapping[str, object] = field(default_factory=dict, repr=False)


class GPUTransforms:
    """Performs programs of transforms on GPUs. It keeps launches, and no workspace of its own."""

    def __init__(self, context: Context, names: Names, *, kept: bool) -> None:
        self._context = context
        self._names = names
        self.number = 0
        self._results: LRUCache[Plan, Results] = LRUCache(_KEPT)  # those of the last call
        self._blanks: LRUCache[Any, Blank] = LRUCache(_KEPT)
        self._launches: LRUCache[Any, Callable[[int], bool]] = LRUCache(_KEPT)

    @property
    def _lane(self) -> Lane:
        return Lane.numbered(self._context, LANES - 1)

    def inspect(self, arguments: Arguments) -> None:
        """See Performer."""
        (operand,), context = arguments.operands, self._context
        spec = library_of(operand).spec(operand)
        stream_of(context, spec, arguments.stream)
        require_device(context, spec, "the operand")
        block_of(context, operand)  # raises UseAfterFree

    def read(self, arguments: Arguments) -> GPUArrays:
        """See Performer, and `read_arrays`."""
        (operand,), (out,) = arguments.operands, arguments.results
        return read_arrays(self._context, operand, out, self._names.separate)

    def without_memory(self, arrays: GPUArrays) -> GPUArrays:
        """See Performer."""
        return arrays.without_memory()

    # -- prepare -----------------------------------------------------------------------------------

    def prepare(self, turn: Turn, plan: Plan | None) -> None:
        """See Performer."""
        known = turn.known
        stream = stream_of(self._context, known.arrays.spec, turn.arguments.stream)
        if plan is None:
            turn.note = _UNPREPARED
            return
        result = self._result(turn, plan, stream)
        results = self._results.find(plan)
        if not (known.lasting and rank_plan.USE_GRAPHS):
            prepared = self._prepare(turn, plan, stream, result, results)
        else:
            if known.prepared is None:
                known.prepared = LRUCache(_PLACES)
            key = plan, stream, results, result.place
            found: _Prepared | None = known.prepared.find(key)
            if found is None or not self._lane.holds(found.memory):
                found = self._prepare(turn, plan, stream, result, results)
                known.prepared.keep(key, found)
            prepared = found
        turn.prepared, turn.note = prepared, prepared.note

    def _result(self, turn: Turn, plan: Plan, stream: int) -> Result:
        """Where this rank's result goes. Raises HeapExhausted; RuntimeError when it is to take the
        memory of an operand that is too small for it.
        """
        result: Result
        if turn.held is not None and turn.held[0] is plan:
            _, result = turn.held
            return result
        turn.held = None
        arrays, (out,) = turn.known.arrays, turn.arguments.results
        if arrays.result is not None:
            result = arrays.result
        elif arrays.target is not None:
            result = Result(arrays.target.address, arrays.target, out)
        else:
            aside = beside_captures() if streams.capturing(stream) else nullcontext()
            with aside:
                result = self._new_result(turn, plan) or self._in_place(turn, plan)
        turn.held = plan, result
        return result

    def _new_result(self, turn: Turn, plan: Plan) -> Result | None:
        """A new one, where it takes no operand's memory."""
        if plan.program.in_place:
            return None
        arrays = turn.known.arrays
        key = plan, arrays.spec.library, arrays.spec.space, arrays.on_heap
        return self._blanks.made(key, lambda: self._blank(turn, plan)).make()

    def _blank(self, turn: Turn, plan: Plan) -> Blank:
        result, (operand,) = plan.program.results["out"], turn.arguments.operands
        shape = result.local_shape(self._context.rank)
        on_heap = turn.known.arrays.on_heap
        return Blank(self._context, operand, shape, result.dtype, result.order, on_heap=on_heap)

    def _in_place(self, turn: Turn, plan: Plan) -> Result:
        result, (operand,) = plan.program.results["out"], turn.arguments.operands
        shape = result.local_shape(self._context.rank)
        place = array_in_place(self._context, operand, shape, result.dtype, result.order)
        return result_in(self._context, place, "the operand")

    def _prepare(
        self, turn: Turn, plan: Plan, stream: int, result: Result, results: Results | None
    ) -> _Prepared:
        """Make all memory and plans, for these `results` of all ranks, if they are known."""
        context, array, lane = self._context, result.array, self._lane
        head = _reached(array), array.address % 16 == 0 and array.order != "strided"
        order = array.order[0].encode()
        if results is None:
            return _Prepared(plan, stream, plan.tag + _HEAD.pack(*head, order, 0))
        with beside_captures():  # memory and plans are no part of what is captured
            ready = prepare(
                context,
                lane,
                stream,
                _device_plan(plan),
                turn.known.arrays.operand,
                result,
                results,
            )
            places = b"".join(_LENGTH.pack(len(each)) + each for each in ready.exposed())
        note = plan.tag + _HEAD.pack(*head, order, _code(results)) + places
        return _Prepared(plan, stream, note, ready.launch, lane.memory())

    # -- perform -----------------------------------------------------------------------------------

    def perform(self, turn: Turn, agreement: Agreement[Any], plan: Plan) -> tuple[Any, ...]:
        """See Performer. Returns when all is launched; for an operand in host memory, or where the
        user wants it, when all is done.
        """
        context, prepared = self._context, turn.prepared
        launch = self._launches.find((prepared, agreement)) if prepared is not None else None
        if launch is None:
            notes = self._complete(turn, agreement.notes, plan)
            prepared = turn.prepared
            launch = self._launching(prepared, notes)
            if notes is agreement.notes and turn.known.lasting and rank_plan.USE_GRAPHS:
                self._launches.keep((prepared, agreement), launch)
        stream, (_, result) = prepared.stream, turn.held
        with context.executing(self._names.operation):
            if prepared.launch.plan.tables is not None:
                PushStream.of(context).require_usable()
            if launch(stream):  # what the user captures reads the tables
                self._lane.keep(prepared.launch.plan)
            given = result.give(context, stream)
            if plan.program.blocking:
                self._lane.team.synchronize(stream)
        return (given,)

    def _complete(self, turn: Turn, notes: list[bytes], plan: Plan) -> list[bytes]:
        """All ranks' notes, when all have prepared for this plan and where results lie. Collective.

        They tell each other once more where some have not.
        """

        def prepare_now() -> bytes:
            self.prepare(turn, plan)
            return turn.note

        def told() -> list[bytes]:
            return self._context.gather(f"{self._names.operation}, memory", prepare_now)

        if not all(note.startswith(plan.tag) for note in notes):
            notes = told()
        results = _results(notes, plan.program.results["out"].order)
        self._results.keep(plan, results)
        if any(_HEAD.unpack_from(note, _TAG)[3] != _code(results) for note in notes):
            notes = told()
        return notes

    def _launching(self, prepared: _Prepared, notes: Sequence[bytes]) -> Callable[[int], bool]:
        """What launches it, one graph when it is repeated; whether the user captures it."""
        launch, lane = prepared.launch, self._lane
        assert launch is not None, "agreed on"
        exposed = [_places(note) for note in notes]
        team = lane.team
        team.device.activate()

        def run(stream: int) -> None:
            launch.run(stream, exposed)

        def once(stream: int) -> bool:
            team.check()
            with lane.section(stream) as section:
                run(stream)
            return bool(section.captured)

        if not rank_plan.USE_GRAPHS:
            return once
        graphs = GraphCache(lane)
        return lambda stream: graphs.launch((), stream, run)

    def release(self) -> None:
        """Give back the workspace, which is that of all operations of the context. Local."""
        give_back(self._context)


def _device_plan(plan: Plan) -> DevicePlan:
    (step,) = plan.program.steps
    found: DevicePlan = step.plan  # type: ignore[union-attr]
    return found


def _reached(array: Operand) -> bool:
    """Whether peers reach a result."""
    return array.block is not None or not array.size


def _code(results: Results) -> int:
    """A number that says for which results something has been prepared; 0 says for none."""
    return 1 + results.reachable + 2 * results.packed


def _results(notes: Sequence[bytes], order: str) -> Results:
    """What all ranks say of their results."""
    heads = [_HEAD.unpack_from(note, _TAG) for note in notes]
    wanted = (b"b", order.encode())  # both, where the array has no other
    reachable = all(reached for reached, *_ in heads)
    packed = all(dense and each in wanted for _, dense, each, _ in heads)
    return Results(reachable, reachable and packed)


def _places(note: bytes) -> list[Exposed]:
    """Where the shared buffers of a rank lie."""
    found, at = [], _TAG + _HEAD.size
    while at < len(note):
        (length,) = _LENGTH.unpack_from(note, at)
        at += _LENGTH.size + length
        found.append(Exposed.unpack(note[at - length : at]))
    return found
