"""Products on GPUs behind the driver: what ranks tell each other of one, and what goes on streams.

A call like an earlier one makes its results, sends the note of that one, and launches a CUDA graph.
Any other reads its operands, takes memory, and tells the peers by which kernel or in which phases
it can be done. What a rank tells is all that decides, so all ranks decide alike. With operands on
GPUs a call returns when all is on the stream; operands in host memory are carried there and back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from shardmath.arrays import library_of
from shardmath.arrays.base import share_memory
from shardmath.base.lru_cache import LRUCache
from shardmath.call.agreement import Agreement
from shardmath.context.context import Context
from shardmath.cuda import stream as streams
from shardmath.handles import device_array
from shardmath.handles.allocation import block_of
from shardmath.handles.device_array import Copy, ResultTemplate
from shardmath.handles.operand import Operand
from shardmath.local.gpu.blaslt import bindings
from shardmath.local.gpu.gemm import Algorithms
from shardmath.machine import Machine
from shardmath.operators.lanes import LANES, NEW_RESULT, Lane
from shardmath.operators.matmul.gpu import tuning
from shardmath.operators.matmul.gpu.fused import Fused, have_addresses
from shardmath.operators.matmul.gpu.operands import Results, blanks_of, made_results, operands_of
from shardmath.operators.matmul.gpu.phases import Phases
from shardmath.operators.matmul.gpu.rank_plan import Operands, RankPlan
from shardmath.operators.matmul.gpu.scale_moves import choose_strategy
from shardmath.operators.published import matrix_of
from shardmath.operators.replay import GraphCache
from shardmath.program.gpu_repeats import Launch, Launches
from shardmath.program.numbers import agree_on_numbers, numbers_bytes, pack_numbers
from shardmath.program.performing import Arguments, Direct, Names, Plan, Turn

__all__ = ["Products", "tuned"]

_TAG = 8  # bytes, of a plan
_PHASES, _KERNEL = 0, 1  # what a note says
_ORDERS = ("", "C", "F")
_KEPT = 16  # of the same arrays: plans and streams, and what peers have told


@dataclass(frozen=True)
class _Arrays:
    """A call's operands by name, on this rank's GPU, and what earlier calls on them have prepared,
    by plan and stream. `first` is the library of a, and its device.
    """

    operands: Mapping[str, Operand]
    inplace: bool
    first: tuple[str, str]
    prepared: LRUCache[Any, _Prepared] = field(default_factory=lambda: LRUCache(_KEPT), repr=False)

    def without_memory(self) -> _Arrays:
        """These arrays, without a reference to what keeps their memory."""
        operands = {name: x.without_memory() for name, x in self.operands.items()}
        return replace(self, operands=operands)


@dataclass(frozen=True)
class _Prepared:
    """What a call like an earlier one tells, while its lane's `memory` is what it was then, how its
    results look, and how all ranks performed it, by what all told.
    """

    note: bytes
    lane: Lane
    memory: Mapping[str, object]
    templates: Mapping[str, ResultTemplate]
    replays: LRUCache[Any, _Replay] = field(default_factory=lambda: LRUCache(_KEPT), repr=False)


@dataclass
class _Replay(GraphCache):
    """An execution that can be performed again: by one kernel or in phases, of which one collective
    adds up the products in an order, and what each rank has `messages` for it. It holds no array.
    """

    rank_plan: RankPlan
    operands: Operands
    is_fused: bool
    addition_order: str
    messages: tuple[bytes, ...]

    def enqueue(self, context: Context, results: Results, stream: int) -> None:
        """Put it on a stream that may be capturing."""
        operands = results.operands(self.operands, stream)
        if self.is_fused:
            assert self.rank_plan.pattern is not None
            device = self.lane.team.device
            fused = Fused(self.rank_plan.pattern, self.rank_plan, operands, device)
            fused.run(context, self.messages)
            return
        order = self.addition_order
        phases = Phases(context, self.rank_plan, operands, self.lane, addition_order=order)
        phases.prepare()
        phases.meet()  # they have, when this was executed first
        phases.run(self.messages)


class _Held:
    """One call: its stream and results, and what an earlier one prepared, or what is new."""

    __slots__ = ("lasting", "new", "prepared", "results", "stream")

    def __init__(self, stream: int, results: Results, prepared: _Prepared | None) -> None:
        self.stream, self.results, self.prepared = stream, results, prepared
        self.new: _New | None = None
        self.lasting = True


class Products:
    """Performs products on GPUs. Workspace is the lanes', whether for an object or not."""

    def __init__(self, context: Context, names: Names, *, kept: bool) -> None:
        self._context = context
        self._names = names
        self._start = numbers_bytes(names.numbers)
        self.number = 0

    def inspect(self, arguments: Arguments) -> None:
        """See Performer."""
        context = self._context
        for name, x in zip(self._names.operands, arguments.operands, strict=True):
            if x is not None:
                device_array.require_device(context, library_of(x, name).spec(x), name)
                block_of(context, x)  # raises UseAfterFree
        first = arguments.operands[0]
        device_array.stream_of(context, library_of(first).spec(first), arguments.stream)

    def read(self, arguments: Arguments) -> _Arrays:
        """See Performer. Raises ValueError where c, to be overwritten, overlaps a or b."""
        found = {
            name: device_array.read(self._context, x, name)
            for name, x in zip(self._names.operands, arguments.operands, strict=True)
            if x is not None
        }
        a, b, c, *_ = arguments.operands
        inplace = arguments.results[0] is not None
        if inplace:
            library = library_of(c)
            if library.spec(c).device == "cpu":
                target = library.host_view(c)
                shared = any(share_memory(target, library.host_view(x)) for x in (a, b))
            else:
                shared = any(found["c"].overlaps(found[name]) for name in "ab")
            if shared:
                raise ValueError(f"c overlaps {self._names.separate}")
        spec = library_of(a).spec(a)
        return _Arrays(found, inplace, (spec.library, spec.device))

    def without_memory(self, arrays: _Arrays) -> _Arrays:
        """See Performer."""
        return arrays.without_memory()

    # -- prepare -----------------------------------------------------------------------------------

    def repeat(self, turn: Turn) -> Launch | None:
        """See Performer."""
        known = turn.known
        launches: Launches | None = known.repeats
        if launches is None:
            return None
        stream, prepared = self._stream(turn), launches.results
        if not launches.hold((known.expected, stream), stream):
            return None
        self._hold(turn, stream, prepared)
        return launches.places.find(turn.held.results.place)

    def _hold(self, turn: Turn, stream: int, prepared: _Prepared) -> None:
        """Make the results, and the note, of a call for which that has been prepared."""
        c, lane = turn.arguments.operands[2], prepared.lane
        results = made_results(self._context, prepared.templates, c, stream, lane)
        turn.held, turn.note = _Held(stream, results, prepared), prepared.note

    def direct(self, turn: Turn, agreement: Agreement[Any]) -> Direct | None:
        """See Performer."""
        launches: Launches | None = turn.known.repeats
        held = turn.held
        if launches is None or held.results.extras:
            return None
        templates = tuple(held.results.templates.values())
        library, _ = turn.known.arrays.first
        place = held.results.place
        return launches.direct(turn, agreement, place, templates[0] if templates else None, library)

    def prepare(self, turn: Turn, plan: Plan | None) -> None:
        """See Performer."""
        held = turn.held
        held_for = b"" if held is None or held.prepared is None else held.prepared.note
        if plan is not None and held_for.startswith(plan.tag, self._start):
            return  # as has been told
        turn.held = None
        if plan is None:
            turn.note = pack_numbers(turn.known.numbers) + bytes(_TAG)
            return
        stream = self._stream(turn)
        prepared: _Prepared | None = turn.known.arrays.prepared.find((plan, stream))
        if prepared is not None and not self._is_ready(prepared, stream):
            prepared = None
        if prepared is not None:
            self._hold(turn, stream, prepared)
            return
        turn.note = pack_numbers(turn.known.numbers) + plan.tag + self._prepare_new(turn, plan)

    def prepare_timed(self, turn: Turn, plan: Plan, timed: Algorithms) -> bytes:
        """Prepare an execution that times the algorithms of its products. Local.

        Returns what to tell the peers. Raises as `prepare`, and RuntimeError during a capture.
        """
        if streams.capturing(self._stream(turn)):
            raise RuntimeError(
                "plan(autotune=True) waits for its stream, which is being captured into a CUDA "
                "graph; plan before the capture"
            )
        return self._prepare_new(turn, plan, timed)

    def _is_ready(self, prepared: _Prepared, stream: int) -> bool:
        """Whether it can be performed again; what is captured is not launched now."""
        return prepared.lane.holds(prepared.memory) and not streams.capturing(stream)

    def _stream(self, turn: Turn) -> int:
        """The stream of a call; that of operands in host memory is the default one."""
        library, device = turn.known.arrays.first
        if device == "cpu":
            return 0
        assert self._context.team is not None, "a context of GPUs"
        return streams.resolve_stream(turn.arguments.stream, library, self._context.team.device)

    def _prepare_new(self, turn: Turn, plan: Plan, timed: Algorithms | None = None) -> bytes:
        """Prepare an execution that repeats none; what to tell the peers of it."""
        context, arrays, stream = self._context, turn.known.arrays, self._stream(turn)
        a, _, c, *_ = turn.arguments.operands
        templates = blanks_of(context, plan.problem, a, arrays.operands, inplace=arrays.inplace)
        held = turn.held = _Held(stream, made_results(context, templates, c, stream), None)
        held.lasting = turn.known.lasting and not streams.capturing(stream)
        self._start_new(turn, plan, timed)
        assert held.new is not None
        return held.new.message()

    def _start_new(self, turn: Turn, plan: Plan, timed: Algorithms | None = None) -> None:
        """What an execution that is not performed as before needs."""
        rank_plan, held = rank_plan_of(self._context, plan), turn.held
        operands = operands_of(
            self._context,
            plan.problem,
            turn.known.arrays.operands,
            turn.known.numbers,
            held.results,
            held.stream,
            timed or rank_plan.algorithms,
        )
        held.new = _New(self._context, rank_plan, operands)
        scales = operands.scales  # one that was copied from the host lives as long as this call
        carried = scales is not None and any(x and x.keep is not None for x in scales.arrays)
        held.lasting = held.lasting and not carried

    # -- perform -----------------------------------------------------------------------------------

    def perform(self, turn: Turn, agreement: Agreement[Any], plan: Plan) -> tuple[Any, ...]:
        """See Performer."""
        if isinstance(turn.prepared, Launch):  # compiled code has begun the turn
            self._hold(turn, turn.prepared.stream, turn.prepared.prepared)
        context, operation, held = self._context, self._names.operation, turn.held
        replay = None
        if held is not None and held.prepared is not None:
            replay = held.prepared.replays.find(agreement)
        if replay is None:
            replay = self._receive(turn, agreement, plan)
            held = turn.held
        with context.executing(operation):
            if replay is None:
                held.new.launch(held.results.d.copy)
            else:
                results, stream = held.results, held.stream
                enqueue = partial(replay.enqueue, context, results)
                replay.launch(results.place, stream, enqueue, results.d.copy)
                self._remember(turn, agreement, plan, replay)
            if plan.program.blocking:
                assert context.team is not None, "a context of GPUs"
                context.team.synchronize(held.stream)
            return self._given(held.results.give(context, held.stream))

    def _remember(self, turn: Turn, agreement: Agreement[Any], plan: Plan, replay: _Replay) -> None:
        """Let the next such call be a launch of the graph, where there is one by now."""
        held, known = turn.held, turn.known
        if held.prepared is not None:
            replay.lane.make_room(held.results.carried)
        graph = replay.graphs.find(held.results.place)
        if graph is None or not known.lasting or plan.program.blocking:
            return
        if held.prepared is None:
            return
        call = self._context, agreement, turn.note, held.prepared, replay.lane, graph, held.stream
        launch = Launch(*call, give=self._results)
        facts = known.expected, held.stream
        Launches.keep(known, facts, held.prepared, held.results.place, launch)

    def _results(self, turn: Turn) -> tuple[tuple[Any, ...], Copy | None]:
        """What a repeat gives, and the copy that it takes."""
        held = turn.held
        results = held.results
        return self._given(results.give(self._context, held.stream)), results.d.copy

    def _given(self, result: Any) -> tuple[Any, ...]:
        """The results by the operation's names for them."""
        d, extras = result if isinstance(result, tuple) else (result, {})
        return d, *(extras.get(name.split()[-1]) for name in self._names.results[1:])

    def _receive(self, turn: Turn, agreement: Agreement[Any], plan: Plan) -> _Replay | None:
        """What all ranks have told: an earlier execution, or None for what is to be launched anew.

        Collective: ranks tell each other once more where one had not prepared for this plan, or
        could not perform it as all others.
        """
        context, start, told = self._context, self._start, agreement.notes
        agree_on_numbers(context.board, self._names.numbers, plan.program.equal, told)
        if not all(note.startswith(plan.tag, start) for note in told):

            def prepare() -> bytes:
                self.prepare(turn, plan)
                return turn.note

            told = context.gather(f"{self._names.operation}, memory", prepare)
        held, key = turn.held, tuple(told)
        if held.prepared is not None:
            found: _Replay | None = held.prepared.replays.find(key)
            if found is not None:
                return self._keep(held.prepared, found, key, agreement)
        if held.new is None:
            self._start_new(turn, plan)
        start += _TAG
        heads, messages = [note[:start] for note in told], [note[start:] for note in told]
        messages = held.new.receive(self._names.operation, messages)
        if held.lasting and held.new.can_be_replayed:
            told = [head + message for head, message in zip(heads, messages, strict=True)]
            prepared = held.prepared
            if prepared is None or prepared.note != told[context.rank]:
                prepared = held.new.prepared(told[context.rank], held.results.templates)
                turn.known.arrays.prepared.keep((plan, held.stream), prepared)
            self._keep(prepared, held.new.replay(), tuple(told), agreement)
        return None

    def _keep(
        self,
        prepared: _Prepared,
        replay: _Replay,
        key: tuple[bytes, ...],
        agreement: Agreement[Any],
    ) -> _Replay:
        """Let it be found by what all ranks told, and by their agreement if that is the same."""
        prepared.replays.keep(key, replay)
        if tuple(agreement.notes) == key:
            prepared.replays.keep(agreement, replay)
        return replay

    def release(self) -> None:
        """See Performer. Workspace is the lanes', which all operations share."""


class _New:
    """An execution that repeats none: ranks exchange a full `message`, `receive`, and `launch`."""

    can_be_replayed: bool

    def __init__(self, context: Context, rank_plan: RankPlan, operands: Operands) -> None:
        bindings()  # raises where there is no cuBLASLt
        self._context, self._rank_plan, self._operands = context, rank_plan, operands
        self._lane = Lane.of(context, operands.stream)
        self._fused: Fused | None = None
        self._phases: Phases | None = None
        self._is_fused = False

    def message(self) -> bytes:
        """Whether one kernel could do it, the lane, the order, and what either needs."""
        rank_plan, out = self._rank_plan, matrix_of(self._operands.out)
        self._order = rank_plan.addition_order("F" if out.by_columns else "C")
        if rank_plan.pattern is None or not rank_plan.one_kernel:
            return self._head(_PHASES) + self._prepare_phases()
        return self._head(_KERNEL) + self._prepare_kernel()

    def _head(self, how: int) -> bytes:
        return bytes([how, self._lane.number, _ORDERS.index(self._order)])

    def _prepare_kernel(self) -> bytes:
        """What to tell the peers of one kernel; b"" where there is none for these arrays."""
        rank_plan, device = self._rank_plan, self._lane.team.device
        assert rank_plan.pattern is not None, "a kernel is for a pattern"
        self._fused = Fused(rank_plan.pattern, rank_plan, self._operands, device)
        message: bytes = self._fused.message
        return message

    def _prepare_phases(self) -> bytes:
        """Take memory for a product in phases; what to tell the peers. Raises HeapExhausted."""
        context, rank_plan = self._context, self._rank_plan
        self._phases = Phases(
            context, rank_plan, self._operands, self._lane, addition_order=self._order
        )
        return self._phases.prepare()

    def receive(self, operation: str, told: Sequence[bytes]) -> list[bytes]:
        """Decide with what all ranks have told; return what they would tell to decide it so at
        once. Collective.
        """
        how, _, order = told[self._context.rank][:3]
        messages, kinds = [text[3:] for text in told], {text[0] for text in told}
        in_different_lanes = len({text[1] for text in told}) > 1  # streams are numbered differently
        orders_differ = len({text[2] for text in told}) > 1  # results lie in different orders
        self._order = "" if orders_differ else _ORDERS[order]
        if how == _KERNEL and self._fused is None:
            self._prepare_kernel()
        self._is_fused = False
        if kinds == {_KERNEL}:
            assert self._fused is not None
            self._is_fused = self._fused.is_chosen(messages)
        if in_different_lanes:
            self._lane = Lane.numbered(self._context, LANES - 1)
        if not self._is_fused:
            if kinds != {_PHASES} or in_different_lanes or orders_differ:
                messages = self._context.gather(operation, self._prepare_phases)
            elif self._phases is None:
                self._prepare_phases()
            assert self._phases is not None
            self._phases.meet()
        self._messages = tuple(messages)
        writes_peers_results = self._is_fused and have_addresses(messages)  # elsewhere each time
        self.can_be_replayed = not (in_different_lanes or writes_peers_results)
        head = self._head(_KERNEL if self._is_fused else _PHASES)
        return [head + message for message in messages]

    def prepared(self, note: bytes, templates: Mapping[str, ResultTemplate]) -> _Prepared:
        """What an execution like this one needs before its ranks agree."""
        memory = self._lane.memory()
        memory.pop(NEW_RESULT, None)  # graphs are found by its address, of which no peer is told
        return _Prepared(note, self._lane, memory, templates)

    def replay(self) -> _Replay:
        """A replay of this execution."""
        operands = self._operands.without_memory()
        how = self._is_fused, self._order, self._messages
        return _Replay(self._lane, self._rank_plan, operands, *how)

    def launch(self, copy: Copy | None = None) -> None:
        """Put all of it on the stream, as it was agreed on, and then the copy."""
        if self._is_fused:
            assert self._fused is not None
            self._fused.run(self._context, self._messages)
        else:
            assert self._phases is not None
            self._phases.run(self._messages)
        if copy is not None:
            stream = self._operands.stream
            with self._lane.section(stream):
                self._lane.copy(copy, stream)


def rank_plan_of(context: Context, plan: Plan) -> RankPlan:
    """What this rank does for a plan; it is kept with the plan."""
    if "rank plan" not in plan.kept:
        strategy, _ = choose_strategy(plan.problem, Machine("cuda", context.hosts))
        plan.kept["rank plan"] = RankPlan(strategy, context.rank, context.hosts)
    found: RankPlan = plan.kept["rank plan"]
    return found


def tuned(
    context: Context,
    products: Products,
    operation: str,
    ready: Callable[[], Turn],
    plan: Plan,
) -> list[str]:
    """Time the algorithms of the products of a plan, and choose for all its executions. Collective.

    `ready()` is the call to time. Returns what was found out. Operands stay as they are. Waits for
    the stream. Raises RuntimeError on all ranks while one rank's is being captured.
    """
    timed, turns = Algorithms(timings={}), []

    def prepare() -> bytes:
        turns.append(ready())
        return products.prepare_timed(turns[0], plan, timed)

    told = context.gather(operation, prepare)
    held = turns[0].held
    held.new.receive(operation, told)
    assert context.team is not None and timed.timings is not None
    timings = timed.timings
    with context.executing(operation):
        held.new.launch()
        context.team.synchronize(held.stream)
    texts = context.gather(operation, lambda: tuning.packed(timings))
    chosen = tuning.fastest([tuning.unpacked(text) for text in texts])
    rank_plan_of(context, plan).algorithms.chosen.update(chosen)
    return tuning.notes(timings, chosen)
