"""How GPUs perform programs: what ranks tell each other about their arrays, and what they launch.

    read ──► prepare ──► agree ──► launch            a call like the last of its plan
                           └─► decide, prepare ──┘   any other

After the ranks have agreed no process waits for another: GPUs do, by barriers on the stream. Memory
is allocated before, so that a lack of it on one rank is an error on all, before an element is
written. How a program is performed may depend on how all ranks' arrays lie: that is the `decision`.
Each rank's note has the facts about its arrays, and the decision for which it has prepared, which
is that of the last such call. From all facts all ranks derive the same decision. If any rank has
prepared for another, all prepare once more, and exchange their notes again.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from shardmath.arrays import ArraySpec, Library, library_of
from shardmath.arrays.base import HostArray, host_array, share_memory
from shardmath.base.caller import caller_line
from shardmath.base.immutable import Immutable
from shardmath.base.lru_cache import LRUCache
from shardmath.call.agreement import Agreement
from shardmath.context.context import Context
from shardmath.cuda import stream as streams
from shardmath.cuda.copies import copier
from shardmath.cuda.driver import beside_captures, call
from shardmath.cuda.graph import Graph
from shardmath.errors import HeapExhausted
from shardmath.handles.allocation import block_of
from shardmath.handles.device_array import (
    Copy,
    Result,
    ResultTemplate,
    read,
    require_device,
    result_in,
    stream_of,
)
from shardmath.handles.operand import Exposed, Operand
from shardmath.operators.in_place import array_in_place
from shardmath.operators.lanes import NEW_RESULT, Lane
from shardmath.program.gpu_repeats import Replay, Replays
from shardmath.program.gpu_steps import GPUProgram, Launch, Memories
from shardmath.program.notes import (
    TAG_BYTES,
    UNPREPARED,
    Numbers,
    agree_on_numbers,
    numbers_bytes,
    pack_numbers,
    pack_parts,
    unpack_parts,
)
from shardmath.program.performing import Arguments, Copier, Direct, Names, Plan, Turn
from shardmath.program.steps import SplitArray


class GPUArrays(Immutable):
    """The user's arrays by name: `operands`, and the results that were given, as `targets`.

    `spec` is the first operand's. `places` are the targets as results, in the call that read them.
    """

    spec: ArraySpec
    operands: Mapping[str, Operand]
    targets: Mapping[str, Operand]
    places: Mapping[str, Result]
    on_heap: bool

    def without_memory(self) -> GPUArrays:
        """These arrays, without a reference to what keeps their memory."""
        operands = {name: x.without_memory() for name, x in self.operands.items()}
        targets = {name: x.without_memory() for name, x in self.targets.items()}
        return replace(self, operands=operands, targets=targets, places={})


def read_arrays(context: Context, names: Names, arguments: Arguments) -> GPUArrays:
    """Read the user's arrays; those in host memory are copied. Local.

    Raises ValueError if one lies on another GPU, or a result cannot be written to or overlaps an
    operand from which it has to be `separate`; UseAfterFree; HeapExhausted if there is no room for
    the copy of an operand.
    """
    given = {n: x for n, x in zip(names.operands, arguments.operands, strict=True) if x is not None}
    operands: dict[str, Operand] = {}
    on_heap = True
    for name, x in given.items():
        library = library_of(x, name)
        array = operands[name] = read(context, x, name, spec=library.spec(x))
        if name not in names.beside and array.block is None:
            lazy = library.is_lazy(x)  # if so, it was read into a copy
            on_heap = on_heap and lazy and block_of(context, x) is not None
    places = {}
    for name, out in zip(names.results, arguments.results, strict=True):
        if out is None:
            continue
        own = [other for other, x in given.items() if x is out and other in names.optional]
        label = own[0] if own else name
        result = places[name] = result_in(context, out, label)
        for other, x in given.items() if names.separate else ():
            near = library_of(x).spec(x).device == "cpu" or operands[other].overlaps(result.array)
            if near and other not in own and _share_memory(x, out):
                raise ValueError(f"{label} overlaps {names.separate}")
    first = arguments.operands[0]
    targets = {name: place.array for name, place in places.items()}
    return GPUArrays(library_of(first).spec(first), operands, targets, places, on_heap)


def _share_memory(operand: Any, out: Any) -> bool:
    """Whether an operand and a result that the user gave share memory."""
    library, other = library_of(operand), library_of(out, "out")
    specs = library.spec(operand), other.spec(out)
    if specs[0].space != specs[1].space:
        return False
    if specs[0].space == "cpu":
        return share_memory(library.host_view(operand), other.host_view(out))
    return share_memory(_address_range(library, operand), _address_range(other, out))


def _address_range(library: Library, x: Any) -> HostArray:
    """A NumPy array at the same addresses, whose elements nobody may read."""
    spec = library.spec(x)
    strides = [stride * spec.itemsize for stride in spec.strides]
    return host_array(library.pointer(x), spec.shape, strides, f"|V{spec.itemsize}", None)


_KEPT = 1024  # executions whose launches are kept
_PROGRAMS = 64  # of this rank, for arrays that lie differently
_PLACES = 32  # places of the results of one call, for which all is prepared
# In the order of `Facts`: operand, result, packed, order, lane; then the decision for which the
# rank has prepared, or 0; and the length of the form, which follows, before the places.
_HEAD = struct.Struct("<???cBBB")


class Facts(NamedTuple):
    """The facts about a rank's arrays in one execution, from which the ranks decide.

    Whether peers reach `operand` and `result`; whether the result is `packed`, from an aligned
    address on, and in which `order`: the first letter of C, F or both. `lane` is the number of the
    stream's lane, and `form` is whatever else the operation's performer adds.
    """

    operand: bool
    result: bool
    packed: bool
    order: str
    lane: int = 0
    form: bytes = b""


class Note(NamedTuple):
    """A rank's note of an execution: the tag of its plan, and the decision for which it has
    prepared; the facts about its arrays, and the places of those that peers reach.
    """

    tag: bytes
    decision: int
    facts: Facts
    places: tuple[Exposed | None, ...]

    @classmethod
    def unpack(cls, text: bytes) -> Note:
        """The note that a rank has packed, see `_pack`."""
        operand, result, packed, order, lane, decision, length = _HEAD.unpack_from(text, TAG_BYTES)
        start = TAG_BYTES + _HEAD.size
        form = text[start : start + length]
        facts = Facts(operand, result, packed, order.decode(), lane, form)
        places = [Exposed.unpack(x) if x else None for x in unpack_parts(text, start + length)]
        return cls(text[:TAG_BYTES], decision, facts, tuple(places))


class Given(NamedTuple):
    """One rank's arrays and numbers in one execution, by their names in programs.

    If it is `lasting` it can be launched again: no array was copied for this execution alone.
    """

    arrays: Mapping[str, Operand]
    numbers: Mapping[str, complex] = MappingProxyType({})
    lasting: bool = True


class Execution(NamedTuple):
    """One rank's arrays and numbers in one execution of a plan on a stream, by the user's names.

    With `new`, the call makes the first result.
    """

    plan: Plan
    stream: int
    lane: Lane
    operands: Mapping[str, Operand]
    results: Mapping[str, Result]
    numbers: Numbers
    new: bool

    @property
    def operand(self) -> Operand:
        """The first operand."""
        return next(iter(self.operands.values()))

    @property
    def result(self) -> Result:
        """The first result."""
        return next(iter(self.results.values()))


class Ready(Immutable, eq=False):
    """One rank's side of an execution.

    `places`, packed, tell peers where they find what they reach. `bind` makes the launches from
    what all ranks have told; these keep their tables, and no array. `check`, before each launch,
    raises if nothing more can be launched. If it is `lasting` it can be launched again.
    """

    places: tuple[bytes, ...]
    bind: Callable[[Sequence[Note]], Launch] = field(repr=False)
    check: Callable[[], None] | None = None
    lasting: bool = True


class _Prepared(Immutable, eq=False):
    """The note and the launches of executions with arrays in the same places.

    It holds as long as the lane's buffers are this `memory`. `ready` is None if that takes memory
    which is not there yet.
    """

    lane: Lane
    decision: int
    note: bytes
    ready: Ready | None
    memory: Mapping[str, object] = field(repr=False)


class GPUPerformer(ABC):
    """Performs the programs of an operation on GPUs; with `kept`, those of one object.

    With `carries_all`, new results in ordinary memory are copied from a block of the lane too if
    they lie where none has lain before.
    """

    carries_all: ClassVar[bool] = False

    def __init__(self, context: Context, names: Names, *, kept: bool) -> None:
        self._context = context
        self._names = names
        self._kept = kept
        self._start = numbers_bytes(names.numbers)
        self.number = 0
        self._decisions: LRUCache[Any, int] = LRUCache(_KEPT)  # the last ones, by call and by plan
        self._templates: LRUCache[Any, Mapping[str, ResultTemplate]] = LRUCache(_KEPT)
        self._launches: LRUCache[Any, Launching] = LRUCache(_KEPT)
        self._programs: LRUCache[Any, GPUProgram] = LRUCache(_PROGRAMS)

    # -- what depends on the operation -------------------------------------------------------------

    @property
    def replays(self) -> bool:
        """Whether a repeated execution is launched as one graph."""
        return True

    @abstractmethod
    def _lane(self, stream: int, decision: int) -> Lane:
        """The lane of an execution, the same on all ranks with this decision; 0: none yet."""

    @abstractmethod
    def _decide(self, plan: Plan, facts: Sequence[Facts]) -> int:
        """How all ranks perform the plan, given all ranks' facts: a number from 1 to 255. Pure."""

    @abstractmethod
    def _program(self, execution: Execution, given: Given, decision: int) -> GPUProgram:
        """This rank's program for arrays that lie so, kept in `_programs`. It holds no array."""

    def _given(self, execution: Execution) -> Given:
        """The arrays and numbers that the program works on. Local. Raises HeapExhausted."""
        return Given({"operand": execution.operand, "out": execution.result.array})

    def release(self) -> None:  # noqa: B027
        """See Performer. By default all workspace is the lanes', which other operations share."""

    def _ready(self, execution: Execution, decision: int, *, allocate: bool) -> Ready | None:
        """Prepare an execution. Local. None if that takes memory, and it may not `allocate`.

        Raises HeapExhausted.
        """
        lane, stream, result = execution.lane, execution.stream, execution.result.array
        with beside_captures():  # what the user captures has no part in memory and plans
            given = self._given(execution)
            gpu_program = self._program(execution, given, decision)
            own = {
                name: array.address - array.address % gpu_program.alignment
                for name, array in given.arrays.items()
            }
            for name, memory in gpu_program.memories.items():
                if not allocate and not lane.has(name, memory.nbytes):
                    return None
                take = lane.shared if memory.shared else lane.private
                own[name] = take(name, memory.nbytes)
            gpu_program.prepare(own, stream, result.span)
            shared = gpu_program.program.shared
            places = tuple(self._shared_place(lane, gpu_program, given, name) for name in shared)

        def bind(told: Sequence[Note]) -> Launch:
            lane.team.device.activate()
            peers = [rank.places for rank in told]
            return gpu_program.bind(Memories(own, peers, stream, given.numbers))

        return Ready(places, bind, gpu_program.check, given.lasting)

    def _shared_place(self, lane: Lane, gpu_program: GPUProgram, given: Given, name: str) -> bytes:
        """Where peers find what is shared under this name, packed; b"" if they cannot."""
        told = gpu_program.program.told
        view = told.get(name)
        if name in told and view is None:
            return b""
        memory = name if view is None else view.memory
        if memory not in given.arrays:
            block = lane.buffer(memory, 0).block
            start, strides = (0, ()) if view is None else (view.offset, view.strides)
            return Exposed(block.location, block.nbytes, start, strides).pack()
        array = given.arrays[memory]
        if array.block is not None:
            self._context.announce(array.block)
        return array.packed_place

    def _facts(self, execution: Execution) -> Facts:
        """The facts about this rank's arrays."""
        array = execution.result.array
        packed = array.address % 16 == 0 and array.order != "strided"
        return Facts(_is_reached(execution.operand), _is_reached(array), packed, array.order[0])

    def _foreseen(self, turn: Turn, stream: int) -> Facts:
        """The facts of a call whose plan is not known yet: new results are taken to be packed."""
        arrays: GPUArrays = turn.known.arrays
        on_heap = arrays.on_heap or arrays.spec.device == "cpu"
        for target in arrays.targets.values():
            on_heap = _is_reached(target)
        return Facts(_is_reached(next(iter(arrays.operands.values()))), on_heap, True, "b")

    def _meet(self, lane: Lane, decision: int) -> None:  # noqa: B027
        """Make what all ranks make together before a launch. Collective. Raises HeapExhausted."""

    def _end(self, execution: Execution) -> None:  # noqa: B027
        """Give back what is not kept, after an execution."""

    def most_copied(self, spec: ArraySpec) -> int:
        """See Performer. By default operands are not copied."""
        return 0

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """See Performer. On the default stream."""
        lane = self._lane(0, 0)
        lane.team.device.activate()
        lane.copy((target, source, nbytes), 0)

    @property
    def copier(self) -> Copier:
        """See Performer."""
        return copier(self._context.gpu_team.device, self.copy)

    # -- read --------------------------------------------------------------------------------------

    def inspect(self, arguments: Arguments) -> None:
        """See Performer."""
        context, first = self._context, arguments.operands[0]
        stream_of(context, library_of(first).spec(first), arguments.stream)
        for name, x in zip(self._names.operands, arguments.operands, strict=True):
            if x is not None:
                require_device(context, library_of(x, name).spec(x), name)
                block_of(context, x)  # raises UseAfterFree

    def read(self, arguments: Arguments) -> GPUArrays:
        """See Performer, and `read_arrays`."""
        return read_arrays(self._context, self._names, arguments)

    def without_memory(self, arrays: GPUArrays) -> GPUArrays:
        """See Performer."""
        return arrays.without_memory()

    # -- prepare -----------------------------------------------------------------------------------

    def _replay(self, turn: Turn, plan: Plan | None) -> Replay | None:
        """The launch that makes this call again, into new results if there are any; None where the
        call takes more than a launch. Local. Raises HeapExhausted.
        """
        known = turn.known
        replays: Replays | None = known.repeats
        if replays is None or plan is None:
            return None
        stream = stream_of(self._context, known.arrays.spec, turn.arguments.stream)
        if not replays.hold((plan, stream), stream):
            return None
        place = None
        if replays.results:
            into = partial(replays.into, agreement=known.last)
            results = self._new_results(replays.results, replays.lane, stream, into=into)
            place = _place(results)
            turn.held = self._execution_into(turn, plan, stream, replays.lane, results)
        return replays.places.find(place)

    def direct(self, turn: Turn, agreement: Agreement[Any]) -> Direct | None:
        """See Performer."""
        replays: Replays | None = turn.known.repeats
        if replays is None:
            return None
        templates: Mapping[str, ResultTemplate] = replays.results
        name = self._names.results[0]
        if any(other != name for other in templates):
            return None
        place = _place({name: turn.held.results[name]}) if templates else None
        turn.made = dict.fromkeys(templates)
        library = turn.known.arrays.spec.library
        return replays.direct(turn, agreement, place, templates.get(name), library, self.copier)

    def _resume(self, turn: Turn, launch: Replay) -> None:
        """Prepare a turn that was to be a launch, and is not: peers' arrays are others now. Where
        compiled code has begun it, no execution is held yet.
        """
        plan, stream, lane = launch.agreement.plan, launch.stream, launch.lane
        if turn.held is None:
            results = self._new_results(self._templates_of(turn, plan), lane, stream, turn.made)
            turn.held = self._execution_into(turn, plan, stream, lane, results)
        self._prepare(turn, plan, stream, launch.prepared.decision, allocate=False)

    def _execution_into(
        self, turn: Turn, plan: Plan, stream: int, lane: Lane, new: Mapping[str, Result]
    ) -> Execution:
        """The execution of a call with these new results, and with the given ones."""
        known, given = turn.known, {}
        for name, target in known.arrays.targets.items():
            out = turn.arguments.results[self._names.results.index(name)]
            place: Result | None = known.arrays.places.get(name)
            given[name] = place or Result(target.address, target, out)
        results, is_new = {**given, **new}, self._names.results[0] in new
        operands = known.arrays.operands
        # Preparations are found by places, where other blocks may lie by now: tell the peers.
        for array in (*operands.values(), *[result.array for result in results.values()]):
            if array.block is not None:
                self._context.announce(array.block)
        return Execution(plan, stream, lane, operands, results, known.numbers, is_new)

    def prepare(self, turn: Turn, plan: Plan | None) -> None:
        """See Performer. What is only expected may use memory that is there, and allocates none."""
        replay = self._replay(turn, plan)
        if replay is not None:
            turn.prepared, turn.note, turn.last = replay, replay.note, replay.agreement
            return
        stream = stream_of(self._context, turn.known.arrays.spec, turn.arguments.stream)
        if plan is not None:
            try:
                self._prepare(turn, plan, stream, None, allocate=False)
                return
            except HeapExhausted:
                if self._kept:
                    raise
        turn.held = None
        told = _pack(UNPREPARED, self._foreseen(turn, stream), 0, ())
        turn.note = pack_numbers(turn.known.numbers) + told

    def _prepare(
        self, turn: Turn, plan: Plan, stream: int, decision: int | None, *, allocate: bool
    ) -> None:
        """Prepare for a decision: None is that of the last such call."""
        known = turn.known
        if decision is None:
            of_call = self._decisions.find((known, plan, stream))
            decision = of_call or self._decisions.find(plan) or 0
        execution = self._execution_of(turn, plan, stream, self._lane(stream, decision))
        if known.prepared is None:
            known.prepared = LRUCache(_PLACES)
        key = plan, stream, tuple([result.place for result in execution.results.values()])
        prepared: _Prepared | None = known.prepared.find(key) if self.replays else None
        if (
            prepared is None
            or prepared.ready is None
            or decision not in (0, prepared.decision)
            or prepared.lane is not execution.lane
            or not prepared.lane.holds(prepared.memory)
        ):
            prepared = self._prepare_anew(execution, decision, allocate=allocate)
            lasting = prepared.ready is None or prepared.ready.lasting
            if lasting and known.lasting and self.replays:
                known.prepared.keep(key, prepared)
        turn.prepared, turn.note = prepared, pack_numbers(known.numbers) + prepared.note

    def _prepare_anew(self, execution: Execution, decision: int, *, allocate: bool) -> _Prepared:
        plan, lane, facts = execution.plan, execution.lane, self._facts(execution)
        decision = decision or self._decide(plan, [facts] * self._context.size)
        ready = self._ready(execution, decision, allocate=allocate)
        places = () if ready is None else ready.places
        note = _pack(plan.tag, facts, 0 if ready is None else decision, places)
        memory = lane.memory()
        memory.pop(NEW_RESULT, None)  # its address is part of the key that finds executions
        return _Prepared(lane, decision, note, ready, memory)

    def _execution_of(self, turn: Turn, plan: Plan, stream: int, lane: Lane) -> Execution:
        """The execution of a call, with places for its results. Raises HeapExhausted; RuntimeError
        if a result is to take the memory of an operand that is too small for it.
        """
        held: Execution | None = turn.held
        if held is not None and held.plan is plan and held.lane is lane:
            return held
        turn.held = held = None
        if plan.program.in_place:
            new = self._in_place(turn, plan)
        else:
            with beside_captures() if streams.capturing(stream) else nullcontext():
                new = self._new_results(self._templates_of(turn, plan), lane, stream, turn.made)
        turn.held = held = self._execution_into(turn, plan, stream, lane, new)
        return held

    def _in_place(self, turn: Turn, plan: Plan) -> dict[str, Result]:
        """The result in the operand's memory."""
        context, (operand,) = self._context, turn.arguments.operands
        ((name, look),) = plan.program.results.items()
        shape = look.local_shape(context.rank)
        place = array_in_place(context, operand, shape, look.dtype, look.order)
        return {name: result_in(context, place, "the operand")}

    def _new_results(
        self,
        templates: Mapping[str, ResultTemplate],
        lane: Lane,
        stream: int,
        made: Mapping[str, Any] = MappingProxyType({}),
        into: Callable[..., Any] = lambda address, carried: None,
    ) -> dict[str, Result]:
        """New results; all but the first are filled with zeros.

        The first is the array in `made`, if there is one. It is written to memory of the lane and
        copied from there where that is better, unless `into(address, carried=)` knows a launch that
        writes to its place; see `Replays.into`. Results on the heap that a stream captures stay as
        long as the lane: a graph writes them again after their last user has dropped them.
        """
        results: dict[str, Result] = {}
        captured = streams.capturing(stream)
        for name, template in templates.items():
            is_first = name == self._names.results[0]
            if is_first:
                block = None if captured else lane.room(template.carried)
                known = partial(into, carried=block is not None)
                results[name] = template.through(block, made.get(name), known)
            else:
                results[name] = template.make()
            result = results[name]
            if captured and template.on_heap:
                lane.keep(result.user)
            if not is_first and result.array.nbytes:
                lane.team.device.activate()  # this may be the first call of a thread
                call("cuMemsetD8Async", result.address, 0, result.array.nbytes, stream)
        return results

    def _templates_of(self, turn: Turn, plan: Plan) -> Mapping[str, ResultTemplate]:
        """Templates of the new results of such a call, by name."""
        context, arrays, operand = self._context, turn.known.arrays, turn.arguments.operands[0]
        looks = {
            name: (look, look.order_among(arrays.operands))
            for name, look in plan.program.results.items()
            if name not in arrays.targets
        }

        def templates() -> dict[str, ResultTemplate]:
            made = {}
            for name, (look, order) in looks.items():
                shape, on_heap = look.local_shape(context.rank), arrays.on_heap
                on_heap = on_heap and isinstance(look, SplitArray)
                form = operand, shape, look.dtype, order
                made[name] = ResultTemplate(
                    context, *form, on_heap=on_heap, carries_all=self.carries_all
                )
            return made

        orders = tuple([(name, order) for name, (_, order) in looks.items()])
        key = plan, arrays.spec.library, arrays.spec.space, arrays.on_heap, orders
        return self._templates.made(key, templates)

    # -- perform -----------------------------------------------------------------------------------

    def perform(self, turn: Turn, agreement: Agreement[Any], plan: Plan) -> tuple[Any, ...]:
        """See Performer. Returns when all is launched; for operands in host memory, and if the
        program is `blocking`, when all is done.
        """
        context, replay = self._context, turn.prepared
        if isinstance(replay, Replay):
            if replay.agreement is agreement:
                return self._launch_again(turn, replay)
            self._resume(turn, replay)
        launch = self._launches.find((turn.prepared, agreement))
        notes: list[bytes] = []
        if launch is None:
            notes = self.complete(turn, agreement.notes, plan)
        execution, ready = turn.held, turn.prepared.ready
        stream, lane = execution.stream, execution.lane
        with context.executing(self._names.operation):
            if launch is None:
                launch = self.launching(turn, notes)
                again = turn.known.lasting and self.replays and ready.lasting
                if notes is agreement.notes and again:
                    self._launches.keep((turn.prepared, agreement), launch)
            if ready.check is not None:
                ready.check()
            if launch(stream, execution.result.copy):
                lane.keep(launch)  # the user's graph reads its tables
            given = {name: x.give(context, stream) for name, x in execution.results.items()}
            if plan.program.blocking:
                lane.team.synchronize(stream)
            self._end(execution)
        self._keep_replay(turn, agreement, launch)
        return tuple([given.get(name) for name in self._names.results])

    def _launch_again(self, turn: Turn, replay: Replay) -> tuple[Any, ...]:
        """The results of a repeated call on which all ranks have agreed once more. An error here
        ends the wait of the peers at once.
        """
        try:
            if replay.check is not None:
                replay.check()
            results, copy = turn.arguments.results, None
            if turn.held is not None:  # some results are new
                places = turn.held.results
                results = tuple(
                    [places[n].user if n in places else None for n in self._names.results]
                )
                copy = places[self._names.results[0]].copy
            replay.lane.launch(replay.graph, copy, replay.stream)
            return results
        except BaseException as error:
            self._context.board.interrupted(error, caller_line())
            raise

    def _keep_replay(self, turn: Turn, agreement: Agreement[Any], launch: Launching) -> None:
        """Let the next such call be a launch of the graph, if there is one by now."""
        execution, known, ready = turn.held, turn.known, turn.prepared.ready
        plan, lane, stream = execution.plan, execution.lane, execution.stream
        if not (known.lasting and ready.lasting) or plan.program.blocking or plan.program.in_place:
            return
        templates, graph = self._templates_of(turn, plan), launch.graph
        first = templates.get(self._names.results[0])
        if first is not None and not streams.capturing(stream):
            lane.make_room(first.carried)
        if graph is None:
            return
        place = _place({name: execution.results[name] for name in templates}) or None
        elsewhere = None
        if first is not None and first.is_carried and len(execution.results) == 1:
            elsewhere = partial(self._replay_at, known.arrays.operands, known.numbers, first)
        replay = Replay(agreement, turn.note, turn.prepared, lane, graph, stream, ready.check)
        Replays.keep(known, (plan, stream), templates, place, replay, elsewhere)

    def _replay_at(
        self,
        operands: Mapping[str, Operand],
        numbers: Numbers,
        template: ResultTemplate,
        launch: Replay,
        address: int,
    ) -> Replay | None:
        """A launch like that one, for a new result at another address. Local. None if peers have to
        be told of the address, or if that takes memory which is not there.
        """
        plan, stream, lane = launch.agreement.plan, launch.stream, launch.lane
        results = {self._names.results[0]: template.at(address)}
        execution = Execution(plan, stream, lane, operands, results, numbers, new=True)
        prepared = self._prepare_anew(execution, launch.prepared.decision, allocate=False)
        ready = prepared.ready
        if (
            ready is None
            or not ready.lasting
            or pack_numbers(numbers) + prepared.note != launch.note
        ):
            return None
        run = ready.bind(self._told_in(launch.agreement.notes))
        graph = lane.graph(run)
        return replace(launch, prepared=prepared, graph=graph, check=ready.check)

    def complete(self, turn: Turn, notes: list[bytes], plan: Plan) -> list[bytes]:
        """All ranks' notes, once all have prepared for the same decision. Collective.

        If a rank cannot prepare, what the lane allocated for the call is freed again.
        """
        context, names, known = self._context, self._names, turn.known
        agree_on_numbers(context.board, names.numbers, plan.program.equal, notes)
        stream = stream_of(context, known.arrays.spec, turn.arguments.stream)
        while True:
            told = self._told_in(notes)
            decision = self._decide(plan, [note.facts for note in told])
            self._decisions.keep(plan, decision)
            if known.lasting and self._decisions.find((known, plan, stream)) != decision:
                self._decisions.keep((known, plan, stream), decision)
                known.repeats = None  # their notes tell of another decision
            if all((note.tag, note.decision) == (plan.tag, decision) for note in told):
                self._meet(turn.held.lane, decision)
                return notes

            def prepared(decision: int = decision) -> bytes:
                self._prepare(turn, plan, stream, decision, allocate=True)
                return turn.note

            lane = self._lane(stream, decision)
            before = lane.memory()
            try:
                notes = context.gather(f"{names.operation}, memory", prepared)
            except Exception:
                lane.drop(*(name for name in lane.memory() if name not in before))
                raise

    def launching(self, turn: Turn, notes: Sequence[bytes]) -> Launching:
        """The launches of an execution, which become one graph when it is repeated."""
        run = turn.prepared.ready.bind(self._told_in(notes))
        return Launching(turn.held.lane, run, replays=self.replays)

    def _told_in(self, notes: Sequence[bytes]) -> list[Note]:
        """What the ranks tell in these notes, which begin with their numbers."""
        return [Note.unpack(note[self._start :]) for note in notes]


class Launching:
    """One execution on a stream; with `replays` one CUDA graph, from the second time on.

    It may be called only when the ranks have agreed that all repeat what they did before.
    """

    def __init__(self, lane: Lane, run: Launch, *, replays: bool) -> None:
        self.lane, self.run, self.replays = lane, run, replays
        self.graph: Graph | None = None
        self._launched = False  # on a stream that was not being captured

    def __call__(self, stream: int, copy: Copy | None) -> bool:
        """Launch on the stream, then `copy` a result; whether the user captures the stream."""
        lane = self.lane
        lane.team.check()
        with lane.section(stream) as section:
            if self.replays and not section.captured:
                if self._launched and self.graph is None:
                    self.graph = lane.graph(self.run)
                self._launched = True
            if section.captured or self.graph is None:
                self.run(stream)
            else:
                self.graph.launch(stream)
            lane.copy(copy, stream)
        return bool(section.captured)


def _place(results: Mapping[str, Result]) -> tuple[int, ...]:
    """Where results lie."""
    return tuple([result.address for result in results.values()])


def _is_reached(array: Operand) -> bool:
    """Whether peers reach an array; trivially if it is empty."""
    return array.block is not None or not array.size


def _pack(tag: bytes, facts: Facts, decision: int, places: Sequence[bytes]) -> bytes:
    """A rank's note of an execution."""
    *reached, order, lane, form = facts
    head = _HEAD.pack(*reached, order.encode(), lane, decision, len(form))
    return tag + head + form + pack_parts(places)
