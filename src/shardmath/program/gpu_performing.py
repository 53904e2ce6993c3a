"""How GPUs perform programs: what the ranks tell each other of one, and what goes on the stream.

    read ──► prepare ──► agree ──► launch            a call like the last of its plan
                           └─► decide, prepare ──┘   any other

After the ranks have agreed, no process waits for another: GPUs do, by barriers on the stream. What
takes memory is made before, so want of it on one rank is an error on all before an element is
touched. How a program is performed may depend on where all ranks' arrays lie. So a rank tells that,
and for which decision it has prepared: that of the last call of the plan. From what all have told
all decide alike; those that had prepared for another prepare once more, and tell each other.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardmath.arrays import library_of
from shardmath.base.lru_cache import LRUCache
from shardmath.call.agreement import Agreement
from shardmath.context.context import Context
from shardmath.cuda import stream as streams
from shardmath.cuda.driver import beside_captures
from shardmath.cuda.graph import Graph
from shardmath.errors import HeapExhausted
from shardmath.handles.allocation import block_of
from shardmath.handles.device_array import (
    Copy,
    Result,
    ResultTemplate,
    require_device,
    result_in,
    stream_of,
)
from shardmath.handles.operand import Exposed, Operand
from shardmath.operators.in_place import array_in_place
from shardmath.operators.lanes import Lane
from shardmath.operators.replay import GraphCache
from shardmath.program.gpu_arrays import GPUArrays, read_arrays
from shardmath.program.gpu_repeats import Launch as Replay
from shardmath.program.gpu_repeats import Launches
from shardmath.program.gpu_steps import ExposedArrays, GPUProgram, Launch, Memories
from shardmath.program.performing import Arguments, Direct, Names, Plan, Turn
from shardmath.program.rank_program import USERS

__all__ = ["Execution", "Facts", "GPUPerformer", "Ready"]

_KEPT = 128  # executions that are launched as before
_PROGRAMS = 64  # of this rank, for arrays that lie differently
_PLACES = 32  # of results of one call, for which all is prepared
_TAG = 8  # bytes, of a plan
_NEW = "new"  # among what a turn has made
_UNPREPARED = bytes(_TAG)
# Whether peers reach the operand, and the result; whether this is packed; its order; the decision
# for which the places behind this have been prepared, or 0.
_HEAD = struct.Struct("<???cB")
_LENGTH = struct.Struct("<H")


class Facts(NamedTuple):
    """What a rank says of its arrays in one execution: whether peers reach operand and result, and
    whether the result is packed, from an address on that is aligned, and in which order: the first
    letter of C, F or both.
    """

    operand: bool
    result: bool
    packed: bool
    order: str


class Execution(NamedTuple):
    """One rank's arrays in one execution of a plan, on a stream."""

    plan: Plan
    stream: int
    operand: Operand
    result: Result


@dataclass(frozen=True, eq=False)
class Ready:
    """One rank's side of an execution: where peers find what they reach, packed, and what binds the
    launches to where all ranks' are. These keep their tables, and no array. `check` raises, before
    each launch, where nothing more can be launched.
    """

    places: tuple[bytes, ...]
    bind: Callable[[Sequence[ExposedArrays]], Launch] = field(repr=False)
    check: Callable[[], None] | None = None


@dataclass(frozen=True, eq=False)
class _Prepared:
    """What executions with arrays in the same places tell and launch, as long as the lane's buffers
    are this `memory`. `ready` is None where that needs memory which is not there.
    """

    stream: int
    note: bytes
    ready: Ready | None
    memory: Mapping[str, object] = field(repr=False)


class GPUPerformer(ABC):
    """Performs programs of one operand and one result on GPUs.

    `kept`: for an object, whose `number` is the same on all ranks.
    """

    def __init__(self, context: Context, names: Names, *, kept: bool) -> None:
        self._context = context
        self._names = names
        self._kept = kept
        self.number = 0
        self._decisions: LRUCache[Plan, int] = LRUCache(_KEPT)  # those of the last calls
        self._templates: LRUCache[Any, ResultTemplate] = LRUCache(_KEPT)
        self._decided = 0  # how often they have changed
        self._launches: LRUCache[Any, Launching] = LRUCache(_KEPT)
        self._programs: LRUCache[Any, GPUProgram] = LRUCache(_PROGRAMS)

    # -- what depends on the operation -------------------------------------------------------------

    @property
    def replays(self) -> bool:
        """Whether an execution that comes again is launched as it was, as one graph."""
        return True

    @property
    @abstractmethod
    def _lane(self) -> Lane:
        """The lane of its executions: the same on all ranks."""

    @abstractmethod
    def _decide(self, plan: Plan, facts: Sequence[Facts]) -> int:
        """How all ranks perform it, from what all have told: a number from 1 to 255. Pure."""

    @abstractmethod
    def _program(self, execution: Execution, decision: int) -> GPUProgram:
        """What this rank does where its arrays lie so, kept in `_programs`. It holds no array."""

    @abstractmethod
    def release(self) -> None:
        """See Performer."""

    def _end(self, execution: Execution) -> None:  # noqa: B027
        """Give back what is not to be kept, after an execution."""

    def _ready(self, execution: Execution, decision: int, *, allocate: bool) -> Ready | None:
        """Prepare an execution. Local. None where it would have to `allocate`, and may not.

        Raises HeapExhausted.
        """
        lane, stream, result = self._lane, execution.stream, execution.result.array
        with beside_captures():  # memory and plans are no part of what is captured
            gpu_program = self._program(execution, decision)
            program = gpu_program.program
            own = {"operand": execution.operand.address, "out": result.address}
            for name, memory in program.memories.items():
                if not allocate and not lane.has(name, memory.nbytes):
                    return None
                take = lane.shared if memory.shared else lane.private
                own[name] = take(name, memory.nbytes)
            gpu_program.prepare(own, stream, result.span)
            places = tuple(self._told(execution, name) for name in program.shared)

        def bind(peers: Sequence[ExposedArrays]) -> Launch:
            lane.team.device.activate()
            return gpu_program.bind(Memories(own, peers, stream))

        return Ready(places, bind, gpu_program.check)

    def _told(self, execution: Execution, memory: str) -> bytes:
        """Where peers find memory that is shared, packed; b"" for ordinary memory."""
        if memory not in USERS:
            block = self._lane.buffer(memory, 0).block
            return Exposed(block.location, block.nbytes, 0, ()).pack()
        array = execution.operand if memory == "operand" else execution.result.array
        if array.block is not None:
            self._context.announce(array.block)
        return array.told

    # -- read --------------------------------------------------------------------------------------

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

    def repeat(self, turn: Turn) -> Replay | None:
        """See Performer."""
        known = turn.known
        launches: Launches | None = known.repeats
        if launches is None:
            return None
        plan, arrays = known.expected, known.arrays
        stream = stream_of(self._context, arrays.spec, turn.arguments.stream)
        if plan is None or not launches.hold((plan, stream, self._decided), stream):
            return None
        template: ResultTemplate | None = launches.results
        place = None
        if template is not None:
            result = self._new(template, stream)
            place = (result.address,)
            turn.held = Execution(plan, stream, arrays.operand, result)
        found = launches.places.find(place)
        if found is not None:
            turn.note = found.note
        return found

    def direct(self, turn: Turn, agreement: Agreement[Any]) -> Direct | None:
        """See Performer."""
        launches: Launches | None = turn.known.repeats
        if launches is None:
            return None
        template: ResultTemplate | None = launches.results
        place = None if template is None else (turn.held.result.address,)
        turn.made = {} if template is None else {_NEW: None}
        library = turn.known.arrays.spec.library
        return launches.direct(turn, agreement, place, template, library, lambda: self._decided)

    def _resume(self, turn: Turn, launch: Replay) -> None:
        """Take a turn up that compiled code has begun, and which is no launch after all."""
        plan, stream, arrays = launch.agreement.plan, launch.stream, turn.known.arrays
        if arrays.target is None:
            result = self._new(self._template(turn, plan), stream, turn.made.get(_NEW))
        else:
            (out,) = turn.arguments.results
            result = Result(arrays.target.address, arrays.target, out)
        turn.held = Execution(plan, stream, arrays.operand, result)
        self._prepare(turn, plan, stream, self._decisions.find(plan) or 0, allocate=False)

    def prepare(self, turn: Turn, plan: Plan | None) -> None:
        """See Performer. Only memory that is there is used for what is but expected."""
        stream = stream_of(self._context, turn.known.arrays.spec, turn.arguments.stream)
        if plan is not None:
            try:
                self._prepare(turn, plan, stream, self._decisions.find(plan) or 0, allocate=False)
                return
            except HeapExhausted:
                if self._kept:
                    raise
                turn.held = None
        turn.note = _UNPREPARED + _HEAD.pack(*self._foreseen(turn), 0)

    def _prepare(
        self, turn: Turn, plan: Plan, stream: int, decision: int, *, allocate: bool
    ) -> None:
        known = turn.known
        result = self._result(turn, plan, stream)
        execution = turn.held = Execution(plan, stream, known.arrays.operand, result)
        if not (known.lasting and self.replays):
            turn.prepared = self._prepared(execution, decision, allocate=allocate)
        else:
            if known.prepared is None:
                known.prepared = LRUCache(_PLACES)
            key = plan, stream, decision, result.place
            found: _Prepared | None = known.prepared.find(key)
            if found is None or found.ready is None or not self._lane.holds(found.memory):
                found = self._prepared(execution, decision, allocate=allocate)
                known.prepared.keep(key, found)
            turn.prepared = found
        turn.note = turn.prepared.note

    def _prepared(self, execution: Execution, decision: int, *, allocate: bool) -> _Prepared:
        plan, stream, operand, result = execution
        array = result.array
        facts = (
            _is_reached(operand),
            _is_reached(array),
            array.address % 16 == 0 and array.order != "strided",
            array.order[0].encode(),
        )
        ready = self._ready(execution, decision, allocate=allocate) if decision else None
        head = _HEAD.pack(*facts, 0 if ready is None else decision)
        places = () if ready is None else ready.places
        told = b"".join(_LENGTH.pack(len(place)) + place for place in places)
        return _Prepared(stream, plan.tag + head + told, ready, self._lane.memory())

    def _foreseen(self, turn: Turn) -> tuple[bool, bool, bool, bytes]:
        """The facts of a call of which the plan is not known: a new result is packed."""
        arrays = turn.known.arrays
        on_heap = arrays.on_heap or arrays.spec.device == "cpu"
        target = arrays.target
        if target is not None:
            on_heap = _is_reached(target)
        return _is_reached(arrays.operand), on_heap, True, b"b"

    def _result(self, turn: Turn, plan: Plan, stream: int) -> Result:
        """Where this rank's result goes. Raises HeapExhausted; RuntimeError when it is to take the
        memory of an operand that is too small for it.
        """
        result: Result
        if turn.held is not None and turn.held.plan is plan:
            result = turn.held.result
            return result
        turn.held = None
        arrays, (out,) = turn.known.arrays, turn.arguments.results
        if arrays.result is not None:
            result = arrays.result
        elif arrays.target is not None:
            result = Result(arrays.target.address, arrays.target, out)
        else:
            with beside_captures() if streams.capturing(stream) else nullcontext():
                result = self._new_result(turn, plan, stream)
        return result

    def _new_result(self, turn: Turn, plan: Plan, stream: int) -> Result:
        """One that was not given: a new one, or one in the operand's memory."""
        context, (operand,) = self._context, turn.arguments.operands
        (look,) = plan.program.results.values()
        if plan.program.in_place:
            shape = look.local_shape(context.rank)
            place = array_in_place(context, operand, shape, look.dtype, look.order)
            return result_in(context, place, "the operand")
        return self._new(self._template(turn, plan), stream, turn.made.get(_NEW))

    def _new(self, template: ResultTemplate, stream: int, array: Any = None) -> Result:
        """A new result: written to memory of the lane, and copied, where that is better; then to
        that array if it has been made.
        """
        block = self._lane.room(template.carried)
        return template.make() if streams.capturing(stream) else template.through(block, array)

    def _template(self, turn: Turn, plan: Plan) -> ResultTemplate:
        """How new results of a call like this look."""
        context, arrays, (operand,) = self._context, turn.known.arrays, turn.arguments.operands
        (look,) = plan.program.results.values()
        on_heap, spec = arrays.on_heap, arrays.spec

        def template() -> ResultTemplate:
            shape = look.local_shape(context.rank)
            return ResultTemplate(context, operand, shape, look.dtype, look.order, on_heap=on_heap)

        return self._templates.made((plan, spec.library, spec.space, on_heap), template)

    # -- perform -----------------------------------------------------------------------------------

    def perform(self, turn: Turn, agreement: Agreement[Any], plan: Plan) -> tuple[Any, ...]:
        """See Performer. Returns when all is launched; for an operand in host memory, or where the
        program blocks, when all is done.
        """
        context, lane = self._context, self._lane
        if isinstance(turn.prepared, Replay):
            self._resume(turn, turn.prepared)
        launch = self._launches.find((turn.prepared, agreement))
        notes: list[bytes] = []
        if launch is None:
            notes = self._complete(turn, agreement.notes, plan)
        execution, prepared = turn.held, turn.prepared
        stream, result = execution.stream, execution.result
        with context.executing(self._names.operation):
            if launch is None:
                launch = self._launching(prepared.ready, notes)
                if notes is agreement.notes and turn.known.lasting and self.replays:
                    self._launches.keep((prepared, agreement), launch)
            if prepared.ready.check is not None:
                prepared.ready.check()
            if launch(stream, result.copy):
                lane.keep(launch)  # the user's graph reads its tables
            given = result.give(context, stream)
            if plan.program.blocking:
                lane.team.synchronize(stream)
            self._end(execution)
        self._remember(turn, agreement, launch)
        return (given,)

    def _remember(self, turn: Turn, agreement: Agreement[Any], launch: Launching) -> None:
        """Let the next such call be a launch of the graph, where there is one by now."""
        execution, known = turn.held, turn.known
        plan, graph = execution.plan, launch.graph
        if not known.lasting or plan.program.blocking or plan.program.in_place:
            return
        template = None if known.arrays.target is not None else self._template(turn, plan)
        if template is not None and not streams.capturing(execution.stream):
            self._lane.make_room(template.carried)
        if graph is None:
            return
        place = None if template is None else (execution.result.address,)
        Launches.keep(
            known,
            (plan, execution.stream, self._decided),
            template,
            place,
            Replay(
                *(self._context, agreement, turn.note, turn.prepared),
                *(self._lane, graph, execution.stream),
                give=_out if template is None else _given,
                check=turn.prepared.ready.check,
            ),
        )

    def _complete(self, turn: Turn, notes: list[bytes], plan: Plan) -> list[bytes]:
        """All ranks' notes, when all have prepared for one decision. Collective.

        What had to be allocated for a call that is refused goes again.
        """
        stream = stream_of(self._context, turn.known.arrays.spec, turn.arguments.stream)
        while True:
            heads = [_HEAD.unpack_from(note, _TAG) for note in notes]
            facts = [Facts._make((*told, order.decode())) for *told, order, _ in heads]
            decision = self._decide(plan, facts)
            self._decided += self._decisions.find(plan) != decision
            self._decisions.keep(plan, decision)
            if all(
                note.startswith(plan.tag) and head[4] == decision
                for note, head in zip(notes, heads, strict=True)
            ):
                return notes

            def prepared(decision: int = decision) -> bytes:
                self._prepare(turn, plan, stream, decision, allocate=True)
                return turn.note

            before = self._lane.memory()
            try:
                notes = self._context.gather(f"{self._names.operation}, memory", prepared)
            except Exception:
                now = self._lane.memory()
                self._lane.drop(*(name for name in now if name not in before))
                raise

    def _launching(self, ready: Ready, notes: Sequence[bytes]) -> Launching:
        """What launches it, as one graph when it comes again."""
        run = ready.bind([_places(note) for note in notes])
        return Launching(GraphCache(self._lane), run, replays=self.replays)


@dataclass(frozen=True, eq=False)
class Launching:
    """What puts one execution on a stream, from the second time on as a graph where it `replays`.

    Returns whether the user captures it.
    """

    graphs: GraphCache
    run: Launch
    replays: bool

    def __call__(self, stream: int, copy: Copy | None) -> bool:
        if self.replays:
            return self.graphs.launch((), stream, self.run, copy)
        lane = self.graphs.lane
        lane.team.check()
        with lane.section(stream) as section:
            self.run(stream)
            lane.copy(copy, stream)
        return bool(section.captured)

    @property
    def graph(self) -> Graph | None:
        """The graph, once there is one."""
        return self.graphs.graphs.find(())


def _out(turn: Turn) -> tuple[tuple[Any, ...], Copy | None]:
    """The user's array for the result, which is written where it lies."""
    return turn.arguments.results, None


def _given(turn: Turn) -> tuple[tuple[Any, ...], Copy | None]:
    """A new array for the result, and the copy that it takes."""
    result = turn.held.result
    return (result.user,), result.copy


def _is_reached(array: Operand) -> bool:
    """Whether peers reach an array."""
    return array.block is not None or not array.size


def _places(note: bytes) -> list[Exposed | None]:
    """Where a rank's arrays lie that peers reach."""
    found: list[Exposed | None] = []
    at = _TAG + _HEAD.size
    while at < len(note):
        (length,) = _LENGTH.unpack_from(note, at)
        at += _LENGTH.size + length
        found.append(Exposed.unpack(note[at - length : at]) if length else None)
    return found
