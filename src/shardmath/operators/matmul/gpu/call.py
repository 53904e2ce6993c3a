"""A call of a product on GPUs: what ranks exchange about it, and what they put on the stream.

A call like an earlier one takes the fingerprint of its arrays, makes its results, sends the number
of the execution that it replays, and launches a CUDA graph: see `operators/replay.py`. Any other
reads its operands and sends a full message. With
operands on GPUs a call returns when all is on the stream; operands in host memory are carried there
and back.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from shardmath.agreement import checked
from shardmath.arrays import library_of
from shardmath.call.agreement import HashedSpec
from shardmath.context import Context
from shardmath.cuda import stream as streams
from shardmath.local.epilog import MatmulEpilog
from shardmath.local.gpu.blaslt import bindings
from shardmath.local.gpu.gemm import Algorithms
from shardmath.operators.lanes import LANES, Lane
from shardmath.operators.matmul.arguments import (
    Arguments,
    agreed_scalars,
    packed_scalars,
    scalar,
)
from shardmath.operators.matmul.gpu import tuning
from shardmath.operators.matmul.gpu.execution import Execution
from shardmath.operators.matmul.gpu.fused import Fused, have_addresses, is_faster
from shardmath.operators.matmul.gpu.operands import Results, made_results, read_operands
from shardmath.operators.matmul.gpu.rank_plan import Operands, RankPlan
from shardmath.operators.matmul.options import MatmulOptions
from shardmath.operators.matmul.problem import Call, describe
from shardmath.operators.matmul.scaling import scales_in_order
from shardmath.operators.published import matrix_of
from shardmath.operators.replay import Replay, ReplayCache
from shardmath.symmetric.device_array import Blank
from shardmath.symmetric.fingerprint import fingerprint

__all__ = ["Invocation", "tune", "was_executed"]

_NEW, _REPLAY = b"\0", b"\1"
_ORDERS = ("", "C", "F")
_PLAIN_TYPES = frozenset([int, float, complex, MatmulEpilog, type(None)])


@dataclass(frozen=True)
class _Agreement:
    """How all ranks perform an execution, by one kernel or in phases, of which one collective adds
    up the products in an order, and what each has `messages` for it; and this rank's part in it:
    what it said of alpha and beta (`scalars`) and of all else (`said`), and how new results look.
    It holds no array.
    """

    is_fused: bool
    addition_order: str
    messages: tuple[bytes, ...]
    rank_plan: RankPlan
    operands: Operands
    blanks: Mapping[str, Blank]
    blocking: bool
    scalars: bytes
    said: HashedSpec


def tune(
    context: Context,
    operation: str,
    arguments: Arguments,
    ready: Callable[[], Any],
    read: Callable[[], Call],
) -> None:
    """Time the algorithms of the products of a plan, and choose for all its executions. Collective.

    Operands stay as they are. Waits for the stream. Raises RuntimeError on all ranks while one
    rank's is being captured.
    """
    timed = Algorithms(timings={})
    invocation = Invocation(context, operation, arguments, timed)
    invocation.agree(ready, read)
    assert timed.timings is not None
    with context.executing(operation):
        invocation.launch()
        invocation.lane.team.synchronize(invocation.stream)
    texts = context.gather(operation, lambda: tuning.packed(timed.timings or {}))
    chosen = tuning.fastest([tuning.unpacked(text) for text in texts])
    invocation.rank_plan.algorithms.chosen.update(chosen)
    invocation.rank_plan.cache["notes"] = tuning.notes(timed.timings, chosen)


def was_executed(context: Context, rank_plan: RankPlan, given: Arguments) -> bool:
    """Whether a call with these arguments has been executed on this rank, and can be replayed."""
    key = _key(context, rank_plan, given)
    return key is not None and _replays(context).find(key) is not None


def _replays(context: Context) -> ReplayCache[_Agreement]:
    found: ReplayCache[_Agreement] = context.cache("matmul replays", ReplayCache)
    return found


def _key(context: Context, rank_plan: RankPlan | None, given: Arguments) -> Hashable | None:
    """What makes two calls the same on this rank; None for one that cannot come again.

    Without a share all that a plan depends on is a part of it. Arrays in host memory are carried to
    another place each time, and what is captured is not launched now.
    """
    team, inputs = context.team, {} if given.inputs is None else given.inputs
    assert team is not None, "a context of GPUs"
    plan = id(rank_plan) if rank_plan is not None else _function_key(given)
    if plan is None or not isinstance(inputs, Mapping):
        return None
    try:
        numbers, laid = _scales(rank_plan, given)
        alpha, beta = _python_number(given.alpha), _python_number(given.beta)
        stream = streams.given(given.stream, library_of(given.a).name, team.device)
    except (TypeError, ValueError):  # it is said where the call is read
        return None
    seen = fingerprint(context, given.a, given.b, given.c, *inputs.values(), *laid)
    if seen is None or streams.capturing(stream):
        return None
    kinds = type(alpha), type(beta)  # True, 1 and 1.0 are equal
    return plan, seen, tuple(inputs), numbers, alpha, beta, kinds, stream


def _function_key(given: Arguments) -> Hashable | None:
    """What makes two calls of the function the same, apart from arrays and scalars; None where that
    takes a closer look.
    """
    options, qualifiers, epilog = given.options, given.qualifiers, given.epilog
    if (
        given.scales is not None
        or given.preferences is not None
        or type(epilog) not in _PLAIN_TYPES
    ):
        return None
    if type(given.distributions) not in (list, tuple):
        return None
    fields: tuple[Any, ...] = ()
    if options is not None:
        named = vars(options) if type(options) is MatmulOptions else options
        if type(named) is not dict or named.get("logger") is not None:
            return None
        fields = (*named.items(), *map(type, named.values()))  # True and 1 are equal
    if qualifiers is not None:
        if type(qualifiers) is not np.ndarray:
            return None
        qualifiers = qualifiers.dtype, qualifiers.shape, qualifiers.tobytes()
    found = (*given.distributions, fields, qualifiers, epilog)
    try:
        hash(found)
    except TypeError:
        return None
    return found


def _scales(
    rank_plan: RankPlan | None, given: Arguments
) -> tuple[tuple[float | None, ...], list[Any]]:
    """The numbers among the scales, and the arrays among them, None elsewhere."""
    scaling = None if rank_plan is None else rank_plan.strategy.problem.scaling
    if scaling is None:
        return (), [given.scales]  # which are to be None
    numbers, scales = given.numbers(scaling), scales_in_order(given.scales)
    both = zip(numbers, scales, strict=True)
    return numbers, [None if number is not None else scale for number, scale in both]


def _python_number(value: Any) -> complex | None:
    """Alpha or beta as given, if it is a number of Python's or nothing; else as such a number."""
    return value if type(value) in _PLAIN_TYPES else scalar("alpha or beta", value)


class Invocation:
    """One rank's part in one execution: `agree`, then `launch`; `results` are there in between."""

    results: Results
    rank_plan: RankPlan
    stream: int
    lane: Lane

    def __init__(
        self,
        context: Context,
        operation: str,
        given: Arguments,
        timed: Algorithms | None = None,
    ) -> None:
        self._context, self._operation, self._given = context, operation, given
        self._timed = timed
        self._key: Hashable | None = None
        self._replay: Replay[_Agreement] | None = None
        self._new: _NewInvocation | None = None

    def try_replay(self) -> tuple[HashedSpec, bytes] | None:
        """The plan's hash and the replay message, if a call like this was executed before; else
        None.

        Raises HeapExhausted.
        """
        self._key = _key(self._context, None, self._given)
        replay = None if self._key is None else _replays(self._context).find(self._key)
        return None if replay is None else (replay.agreed.said, self._replay_message(replay))

    def is_replay(self, said: Sequence[bytes]) -> bool:
        """Whether all ranks, who sent these messages, replay the same execution."""
        if self._replay is not None and said.count(said[0]) == len(said):
            return True
        self._replay = None
        return False

    def agree(self, ready: Callable[[], Any], read: Callable[[], Call]) -> None:
        """Exchange what each rank is about to execute. Collective.

        `ready()` is the plan, `read()` the call that the arguments make: see `api.run`. Where only
        some ranks replay, or not the same execution, all send full messages in a second exchange.
        What one rank raises is raised on all, as is HeapExhausted, before anything is written.
        """
        context, replays = self._context, _replays(self._context)
        self._read = read
        texts = context.gather(self._operation, lambda: self._message(ready().rank_plan))
        if self.is_replay(texts):
            return
        said = checked(context.board, agreed_scalars, texts)
        number = replays.next_number()
        if any(text.startswith(_REPLAY) for text in said):
            said = context.gather(self._operation, self._full_message)
        new = self._new
        assert new is not None, "said"
        new.receive(self._operation, said)
        if self._key is not None and not (new.in_different_lanes or new.writes_peers_results):
            replays.keep(self._key, number, new.agreed(self._scalars), new.lane)

    def _message(self, rank_plan: RankPlan) -> bytes:
        """Alpha and beta, and a replay message or a full one."""
        self.rank_plan, given = rank_plan, self._given
        if self._key is None and self._timed is None:  # else it has been tried
            self._key = _key(self._context, rank_plan, given)
            replay = None if self._key is None else _replays(self._context).find(self._key)
            if replay is not None:
                return self._replay_message(replay)
        message = self._full_message()
        scaling = rank_plan.strategy.problem.scaling
        numbers = given.numbers(scaling) if scaling else ()
        self._scalars = packed_scalars(given.scalars(), numbers)
        return self._scalars + message

    def _replay_message(self, replay: Replay[_Agreement]) -> bytes:
        """The number of an execution that this one replays. Raises HeapExhausted."""
        agreed = replay.agreed
        self._replay, self._scalars = replay, agreed.scalars
        self.lane, self.stream = replay.lane, agreed.operands.stream
        self.results = made_results(self._context, agreed.blanks, self._given.c, self.stream)
        return agreed.scalars + _REPLAY + replay.number.to_bytes(8, "little")

    def _full_message(self) -> bytes:
        """All of the execution. Raises what is wrong on this rank, HeapExhausted."""
        if self._new is None:
            call_ = self._read()
            algorithms = self._timed or self.rank_plan.algorithms
            self._new = _NewInvocation(
                self._context, self.rank_plan, call_, self._given, algorithms
            )
            self.results, self.stream = self._new.results, self._new.operands.stream
        return self._new.message()

    def launch(self) -> None:
        """Put all of it on the stream."""
        if self._replay is None:
            assert self._new is not None
            self._new.launch()
            self.lane, blocking = self._new.lane, self._new.blocking
        else:
            enqueue = partial(_enqueue, self._context, self._replay, self.results)
            self._replay.launch(self.results.place, self.stream, enqueue)
            blocking = self._replay.agreed.blocking
        if blocking:
            self.lane.team.synchronize(self.stream)

    def perform(self) -> Any:
        """Launch it, and give the results to the user: D, or (D, outputs of the epilog)."""
        with self._context.executing(self._operation):
            self.launch()
            return self.results.give(self._context, self.stream)


def _enqueue(context: Context, replay: Replay[_Agreement], results: Results, on: int) -> None:
    """An execution as agreed on before, on a stream that may be capturing."""
    agreed, lane = replay.agreed, replay.lane
    operands = results.operands(agreed.operands, on)
    if agreed.is_fused:
        assert agreed.rank_plan.pattern is not None
        fused = Fused(agreed.rank_plan.pattern, agreed.rank_plan, operands, lane.team.device)
        fused.run(context, agreed.messages)
    else:
        order = agreed.addition_order
        phases = Execution(context, agreed.rank_plan, operands, lane, addition_order=order)
        phases.prepare()
        phases.meet()  # they have, when this was executed first
        phases.run(agreed.messages)


class _NewInvocation:
    """An execution that replays none: ranks exchange a full `message`, `receive`, and `launch`."""

    in_different_lanes: bool  # whether ranks are in different lanes of their own
    writes_peers_results: bool  # then each execution exchanges their addresses

    def __init__(
        self,
        context: Context,
        rank_plan: RankPlan,
        call_: Call,
        given: Arguments,
        algorithms: Algorithms,
    ) -> None:
        bindings()  # raises where there is no cuBLASLt
        self._context, self._rank_plan = context, rank_plan
        problem = rank_plan.strategy.problem
        self.operands, self.results = read_operands(context, problem, call_, given, algorithms)
        self.lane = Lane.of(context, self.operands.stream)
        self.blocking = call_.options.blocking is True
        self._said = HashedSpec(describe(call_))
        self._fused: Fused | None = None
        self._phases: Execution | None = None

    def message(self) -> bytes:
        """The lane, and whether one kernel could do it, else what phases need."""
        rank_plan, out = self._rank_plan, matrix_of(self.operands.out)
        order = rank_plan.addition_order("F" if out.by_columns else "C")
        if rank_plan.pattern is None or not is_faster(rank_plan):
            message = self._prepare_phases(order)
        else:
            self._fused = Fused(rank_plan.pattern, rank_plan, self.operands, self.lane.team.device)
            message = self._fused.message
        return _NEW + bytes([self.lane.number, _ORDERS.index(order)]) + message

    def _prepare_phases(self, order: str) -> bytes:
        """Take memory for a product in phases; what to tell the peers. Raises HeapExhausted."""
        context, rank_plan, lane = self._context, self._rank_plan, self.lane
        self._phases = Execution(context, rank_plan, self.operands, lane, addition_order=order)
        return self._phases.prepare()

    def receive(self, operation: str, said: Sequence[bytes]) -> None:
        """Decide with what all ranks have said. Collective."""
        messages = [text[3:] for text in said]
        self.in_different_lanes = (
            len({text[1] for text in said}) > 1
        )  # streams are numbered differently
        orders_differ = len({text[2] for text in said}) > 1  # results lie in different orders
        self._order = "" if orders_differ else _ORDERS[said[0][2]]
        if self.in_different_lanes:
            self.lane = Lane.numbered(self._context, LANES - 1)
        self._is_fused = self._fused is not None and self._fused.is_chosen(messages)
        self.writes_peers_results = self._is_fused and have_addresses(messages)
        if not self._is_fused and (
            self.in_different_lanes or orders_differ or self._fused is not None
        ):
            messages = self._context.gather(operation, lambda: self._prepare_phases(self._order))
        if not self._is_fused:
            assert self._phases is not None
            self._phases.meet()
        self._messages = tuple(messages)

    def agreed(self, scalars: bytes) -> _Agreement:
        """What the same again takes."""
        operands, blanks = self.operands.without_memory(), self.results.blanks
        how = self._is_fused, self._order, self._messages
        return _Agreement(
            *how, self._rank_plan, operands, blanks, self.blocking, scalars, self._said
        )

    def launch(self) -> None:
        """Put all of it on the stream, as it was agreed on."""
        if self._is_fused:
            assert self._fused is not None
            self._fused.run(self._context, self._messages)
        else:
            assert self._phases is not None
            self._phases.run(self._messages)
