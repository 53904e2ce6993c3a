"""A product's call on a context of GPUs: what ranks say of it, and what they put on the stream.

A call that comes again as it was looks at its arrays, makes its results, says a number, and
launches a graph: see `operators/replay.py`. Any other reads its operands and tells all of it. With
operands on GPUs a call returns when all is on the stream; operands in host memory are carried there
and back.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from shardmath.arrays import library_of
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
from shardmath.planning import HashedSpec
from shardmath.symmetric.device_array import Blank
from shardmath.symmetric.fingerprint import fingerprint

__all__ = ["Turn", "comes_again", "tune"]

_ANEW, _AGAIN = b"\0", b"\1"
_ORDERS = ("", "C", "F")
_PLAIN = frozenset([int, float, complex, MatmulEpilog, type(None)])


@dataclass(frozen=True)
class _Agreed:
    """How all ranks perform an execution, by one kernel or in phases, of which one collective adds
    up the products in an order, and what each has `told` for it; and this rank's part in it: what
    it said of alpha and beta (`scalars`) and of all else (`said`), and how new results look. It
    refers to no array.
    """

    fuses: bool
    addition_order: str
    told: tuple[bytes, ...]
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
    one = Turn(context, operation, arguments, timed)
    one.agree(ready, read)
    assert timed.timings is not None
    with context.executing(operation):
        one.launch()
        one.lane.team.synchronize(one.stream)
    texts = context.gather(operation, lambda: tuning.packed(timed.timings or {}))
    chosen = tuning.fastest([tuning.unpacked(text) for text in texts])
    one.rank_plan.algorithms.chosen.update(chosen)
    one.rank_plan.cache["told"] = tuning.told(timed.timings, chosen)


def comes_again(context: Context, rank_plan: RankPlan, given: Arguments) -> bool:
    """Whether a call with these arguments has been executed on this rank, and may come again."""
    key = _key(context, rank_plan, given)
    return key is not None and _replays(context).find(key) is not None


def _replays(context: Context) -> ReplayCache[_Agreed]:
    found: ReplayCache[_Agreed] = context.cache("matmul replays", ReplayCache)
    return found


def _key(context: Context, rank_plan: RankPlan | None, given: Arguments) -> Hashable | None:
    """What makes two calls the same on this rank; None for one that cannot come again.

    Without a share all that a plan depends on is a part of it. Arrays in host memory are carried to
    another place each time, and what is captured is not launched now.
    """
    team, inputs = context.team, {} if given.inputs is None else given.inputs
    assert team is not None, "a context of GPUs"
    plan = id(rank_plan) if rank_plan is not None else _planned_alike(given)
    if plan is None or not isinstance(inputs, Mapping):
        return None
    try:
        numbers, laid = _scales(rank_plan, given)
        alpha, beta = _plain(given.alpha), _plain(given.beta)
        stream = streams.given(given.stream, library_of(given.a).name, team.device)
    except (TypeError, ValueError):  # it is said where the call is read
        return None
    seen = fingerprint(context, given.a, given.b, given.c, *inputs.values(), *laid)
    if seen is None or streams.capturing(stream):
        return None
    kinds = type(alpha), type(beta)  # True, 1 and 1.0 are equal
    return plan, seen, tuple(inputs), numbers, alpha, beta, kinds, stream


def _planned_alike(given: Arguments) -> Hashable | None:
    """What makes two calls of the function the same, apart from arrays and scalars; None where that
    takes a closer look.
    """
    options, qualifiers, epilog = given.options, given.qualifiers, given.epilog
    if given.scales is not None or given.preferences is not None or type(epilog) not in _PLAIN:
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


def _plain(value: Any) -> complex | None:
    """Alpha or beta as given, if it is a number of Python's or nothing; else as such a number."""
    return value if type(value) in _PLAIN else scalar("alpha or beta", value)


class Turn:
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
        self._replay: Replay[_Agreed] | None = None
        self._anew: _Anew | None = None

    def repeat(self) -> tuple[HashedSpec, bytes] | None:
        """What a call of the function says of its plan, and of itself, if it was made before.

        Raises HeapExhausted.
        """
        self._key = _key(self._context, None, self._given)
        replay = None if self._key is None else _replays(self._context).find(self._key)
        return None if replay is None else (replay.agreed.said, self._say_again(replay))

    def is_repeated(self, said: Sequence[bytes]) -> bool:
        """Whether all ranks, who have said this, repeat the same execution."""
        if self._replay is not None and said.count(said[0]) == len(said):
            return True
        self._replay = None
        return False

    def agree(self, ready: Callable[[], Any], read: Callable[[], Call]) -> None:
        """Say what this rank is about to do, and hear the others. Collective.

        `ready()` is the plan, `read()` the call that the arguments make: see `api.run`. What only
        some ranks repeat, or not the same execution, is told once more by all. What one rank raises
        is raised on all, as is want of memory, before any element has been written.
        """
        context, replays = self._context, _replays(self._context)
        self._read = read
        texts = context.gather(self._operation, lambda: self._say(ready().rank_plan))
        if self.is_repeated(texts):
            return
        said, number = agreed_scalars(texts), replays.next_number()
        if any(text.startswith(_AGAIN) for text in said):
            said = context.gather(self._operation, self._say_all)
        anew = self._anew
        assert anew is not None, "said"
        anew.hear(self._operation, said)
        if self._key is not None and not (anew.apart or anew.have_addresses):
            replays.keep(self._key, number, anew.agreed(self._scalars), anew.lane)

    def _say(self, rank_plan: RankPlan) -> bytes:
        """Alpha and beta; and the execution that this one replays, or all of it."""
        self.rank_plan, given = rank_plan, self._given
        if self._key is None and self._timed is None:  # else it has been tried
            self._key = _key(self._context, rank_plan, given)
            replay = None if self._key is None else _replays(self._context).find(self._key)
            if replay is not None:
                return self._say_again(replay)
        told = self._say_all()
        scaling = rank_plan.strategy.problem.scaling
        numbers = given.numbers(scaling) if scaling else ()
        self._scalars = packed_scalars(given.scalars(), numbers)
        return self._scalars + told

    def _say_again(self, replay: Replay[_Agreed]) -> bytes:
        """The number of an execution that this one replays. Raises HeapExhausted."""
        agreed = replay.agreed
        self._replay, self._scalars = replay, agreed.scalars
        self.lane, self.stream = replay.lane, agreed.operands.stream
        self.results = made_results(self._context, agreed.blanks, self._given.c, self.stream)
        return agreed.scalars + _AGAIN + replay.number.to_bytes(8, "little")

    def _say_all(self) -> bytes:
        """What is new in it. Raises what is wrong on this rank, HeapExhausted."""
        if self._anew is None:
            call_ = self._read()
            algorithms = self._timed or self.rank_plan.algorithms
            self._anew = _Anew(self._context, self.rank_plan, call_, self._given, algorithms)
            self.results, self.stream = self._anew.results, self._anew.operands.stream
        return self._anew.say()

    def launch(self) -> None:
        """Put all of it on the stream."""
        if self._replay is None:
            assert self._anew is not None
            self._anew.launch()
            self.lane, blocking = self._anew.lane, self._anew.blocking
        else:
            again = partial(_again, self._context, self._replay, self.results)
            self._replay.launch(self.results.place, self.stream, again)
            blocking = self._replay.agreed.blocking
        if blocking:
            self.lane.team.synchronize(self.stream)

    def perform(self) -> Any:
        """Launch it, and give the results to the user: D, or (D, outputs of the epilog)."""
        with self._context.executing(self._operation):
            self.launch()
            return self.results.give(self._context, self.stream)


def _again(context: Context, replay: Replay[_Agreed], results: Results, on: int) -> None:
    """All of it as agreed in an earlier execution, on a stream that may be being captured."""
    agreed, lane = replay.agreed, replay.lane
    operands = results.operands(agreed.operands, on)
    if agreed.fuses:
        assert agreed.rank_plan.pattern is not None
        one = Fused(agreed.rank_plan.pattern, agreed.rank_plan, operands, lane.team.device)
        one.run(context, agreed.told)
    else:
        order = agreed.addition_order
        phases = Execution(context, agreed.rank_plan, operands, lane, addition_order=order)
        phases.prepare()
        phases.meet()  # they have, when this was executed first
        phases.run(agreed.told)


class _Anew:
    """An execution that is like no earlier one: ranks `say` all of it, `hear` it, and `launch`."""

    apart: bool  # whether ranks are in different lanes of their own
    have_addresses: bool  # whether peers write the results: each time they are told where these lie

    def __init__(
        self,
        context: Context,
        rank_plan: RankPlan,
        call_: Call,
        given: Arguments,
        algorithms: Algorithms,
    ) -> None:
        bindings()  # raises where there is no cuBLASLt
        self._context, self._share = context, rank_plan
        problem = rank_plan.strategy.problem
        self.operands, self.results = read_operands(context, problem, call_, given, algorithms)
        self.lane = Lane.of(context, self.operands.stream)
        self.blocking = call_.options.blocking is True
        self._said = HashedSpec(describe(call_))
        self._fused: Fused | None = None
        self._phases: Execution | None = None

    def say(self) -> bytes:
        """The lane, and whether one kernel could do it, else what phases need."""
        rank_plan, out = self._share, matrix_of(self.operands.out)
        order = rank_plan.addition_order("F" if out.by_columns else "C")
        if rank_plan.pattern is None or not is_faster(rank_plan):
            told = self._prepare_phases(order)
        else:
            self._fused = Fused(rank_plan.pattern, rank_plan, self.operands, self.lane.team.device)
            told = self._fused.told
        return _ANEW + bytes([self.lane.number, _ORDERS.index(order)]) + told

    def _prepare_phases(self, order: str) -> bytes:
        """Take memory for a product in phases; what to tell the peers. Raises HeapExhausted."""
        context, rank_plan, lane = self._context, self._share, self.lane
        self._phases = Execution(context, rank_plan, self.operands, lane, addition_order=order)
        return self._phases.prepare()

    def hear(self, operation: str, said: Sequence[bytes]) -> None:
        """Decide with what all ranks have said. Collective."""
        told = [text[3:] for text in said]
        self.apart = len({text[1] for text in said}) > 1  # streams are numbered differently
        mixed = len({text[2] for text in said}) > 1  # results lie in different orders
        self._order = "" if mixed else _ORDERS[said[0][2]]
        if self.apart:
            self.lane = Lane.numbered(self._context, LANES - 1)
        self._fuses = self._fused is not None and self._fused.chosen(told)
        self.have_addresses = self._fuses and have_addresses(told)
        if not self._fuses and (self.apart or mixed or self._fused is not None):
            told = self._context.gather(operation, lambda: self._prepare_phases(self._order))
        if not self._fuses:
            assert self._phases is not None
            self._phases.meet()
        self._told = tuple(told)

    def agreed(self, scalars: bytes) -> _Agreed:
        """What the same again takes."""
        operands, blanks = self.operands.without_memory(), self.results.blanks
        how = self._fuses, self._order, self._told
        return _Agreed(*how, self._share, operands, blanks, self.blocking, scalars, self._said)

    def launch(self) -> None:
        """Put all of it on the stream, as it was agreed on."""
        if self._fuses:
            assert self._fused is not None
            self._fused.run(self._context, self._told)
        else:
            assert self._phases is not None
            self._phases.run(self._told)
