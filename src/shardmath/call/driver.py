"""The one driver: it takes a call of any operator from its arguments to its results.

    arguments ──► arrays, spec ──► agree ──► plan ──► perform
    again:        fingerprint ───► agree ───────────► perform

An operator says what ranks compare (`describe`), what they are to do (`check`) and how (`program`);
see `Operation`. The driver and the performers do the rest. Arrays are read once for all calls that
look alike. Results and workspace are made before the ranks agree, for the plan of the last such
call, so that a repeated call takes one exchange. An error on one rank is raised on all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, Protocol, TypeVar

from shardmath.arrays import ArraySpec
from shardmath.arrays.detect import library_and_spec
from shardmath.base import wire
from shardmath.base.log import INFO, is_heard
from shardmath.base.lru_cache import LRUCache
from shardmath.base.recorder import this_process
from shardmath.base.weak_method import weakly
from shardmath.call.agreement import Agreement, HashedSpec, agree, concluded
from shardmath.call.compiled import CompiledCalls, turn_of
from shardmath.call.stand_ins import CopyAgain, StandIns
from shardmath.context.context import Context, require_context
from shardmath.geometry import Layout
from shardmath.handles.fingerprint import Recognised
from shardmath.machine import Machine
from shardmath.operators.arguments import check_stream, log_plan, options_of
from shardmath.program.cores import Cores
from shardmath.program.notes import PLAIN, TAG_BYTES, Number, number
from shardmath.program.performing import Arguments, Known, Names, Performer, Plan, Turn
from shardmath.program.steps import Program
from shardmath.symmetric.rows import NAME_BYTES

_KEPT = 1024  # calls of an operation that are recognised: a step of a deep model has hundreds
_DERIVATIVES = {"1": "requires grad", "2": "has a tangent", "3": "requires grad, has a tangent"}

Specs = Mapping[str, ArraySpec | None]
Problem = TypeVar("Problem")


class Operation(Protocol[Problem]):
    """What an operator's author writes. All of it is pure, and needs no ranks.

    `options` is the class of the user's options, which have a `logger`. Some methods are optional:

        on_cores(context, names, kept=)   the performer on cores, where that is not `Cores`
        on_gpus(context, names, kept=)    the performer on GPUs, where that is not `GPUs`
        driver(context)                   the class of its drivers, where that is not `Driver`
        operands(problem)                 layouts of operands by name, where ranks may own copies
    """

    names: Names
    options: type[Any]

    def describe(self, arrays: Specs, words: tuple[Any, ...], options: Any) -> Hashable:
        """One rank's call as plain data, for all ranks to compare. Raises what is wrong with it.

        `arrays` are the specs of operands and results by name, None for those that were left out.
        """
        ...

    def check(self, specs: Sequence[Any]) -> Problem:
        """The problem that all ranks' descriptions state. Raises if they do not fit together."""
        ...

    def program(self, problem: Problem, machine: Machine, rank: int) -> Program:
        """The program of `rank`."""
        ...

    def explain(self, problem: Problem, machine: Machine) -> str:
        """What is done, in a few lines."""
        ...


def call(operation: Operation[Any], arguments: Arguments) -> Any:
    """The results of a call in the current context. Collective; a part of a `collective_call`."""
    context = require_context()
    driver: Driver | None = None if context.derivatives else context.caches.get(operation)
    return (driver or driver_of(context, operation)).call(arguments)


def driver_of(context: Context, operation: Operation[Any]) -> Driver:
    """The driver of all calls of a function, in this context.

    Ranks compare which operands have derivatives: each choice of operands has a driver of its own.
    """
    if context.derivatives:
        key = operation, context.derivatives
        operation = context.cache(key, lambda: _Differentiated(*key))
    driver: Driver | None = context.caches.get(operation)
    if driver is not None:
        return driver
    kind = getattr(operation, "driver", None)
    return (kind(context) if kind else Driver).of(context, operation)


class _Differentiated:
    """An operation some of whose operands have derivatives: see `Context.with_derivatives`. Its
    name says which, and ranks compare names when they agree on a call.
    """

    def __init__(self, operation: Operation[Any], which: str) -> None:
        self._operation = operation
        names = operation.names
        self.names = names._replace(operation=with_derivatives(names.operation, names, which))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operation, name)


def with_derivatives(operation: str, names: Names, which: str) -> str:
    """The name of an operation, and which operands have derivatives: see `Context`. Different
    choices have different names, also where ranks compare only the beginning of a long one.
    """
    flags, _, before = which.partition(" ")
    pairs = zip(names.operands, flags, strict=False)
    said = ", ".join(f"{name} {_DERIVATIVES[flag]}" for name, flag in pairs if flag != "0")
    operation += f" ({said})" if said else ""
    operation += f" after copies (grad: {before})" if before else ""
    if len(operation) > NAME_BYTES:
        digest = blake2b(operation.encode(), digest_size=4).hexdigest()
        operation = f"{operation[: NAME_BYTES - 12]}... {digest}"
    return operation


class Driver:
    """Calls of one operation in one context; with `kept`, of one object with its own workspace."""

    def __init__(self, context: Context, operation: Operation[Any], *, kept: bool) -> None:
        self.context = context
        self.operation = operation
        self.machine = Machine("cpu" if context.team is None else "cuda", context.hosts)
        self.performer = _performer(context, operation, kept=kept)
        self._known: Recognised[Known] = Recognised(context, _KEPT)
        # Given a problem: the layouts of operands of which the ranks compare copies in each call.
        self._copied: Callable[[Any], Mapping[str, Layout]] | None = (
            getattr(operation, "operands", None) if context.compares_copies else None
        )
        self._compiled: CompiledCalls | None = None
        if self._copied is None and self.performer.direct:
            self._compiled = CompiledCalls.of(context, self._known.looks, weakly(self._otherwise))
        self._stand_ins = StandIns(context, self.performer)
        self.agreed: Callable[[], Any] | None = None  # a weak reference to an object's `build`
        self._options: LRUCache[Any, Any] = LRUCache(_KEPT)  # that are equal
        self._specs: LRUCache[Any, HashedSpec] = LRUCache(_KEPT)  # of arrays that look alike
        self._expected: LRUCache[bytes, Plan] = LRUCache(_KEPT)  # by the digest of this rank's spec
        self._plans: LRUCache[bytes, Plan]  # by tag, of all calls and objects of the operation
        self._plans = context.cache(f"plans: {operation.names.operation}", partial(LRUCache, _KEPT))

    @classmethod
    def of(cls, context: Context, operation: Operation[Any]) -> Driver:
        """The driver of all calls of a function."""
        return context.cache(operation, lambda: cls(context, operation, kept=False))

    # -- a call ------------------------------------------------------------------------------------

    def call(self, arguments: Arguments) -> Any:
        """The results of a call. Collective."""
        options = arguments.options
        if options is not None:
            options = self._same_options(options)
            arguments = arguments._replace(options=options)
        fixed = options is None or (type(options) is self.operation.options and not options.logger)
        if fixed and self._compiled is not None:
            results = self._compiled.make(arguments)
            if results is not None:
                return results
            copied = self._stand_ins.arguments(arguments)
            if copied is not None:
                return self._call_with(arguments, *copied)
        return self._call(arguments)

    def _call_with(self, arguments: Arguments, stand_ins: Arguments, copy: CopyAgain) -> Any:
        """The results of a call with stand-ins for its operands. Collective."""
        assert self._compiled is not None
        results = self._compiled.make(stand_ins)
        if results is None:
            results = self._call(stand_ins)
        if self.agreed is None:
            several = results if type(results) is tuple else (results,)
            self._compiled.keep_elsewhere(arguments, stand_ins, several, copy)
        return results

    def _call(self, arguments: Arguments) -> Any:
        """The results of a call that is not, or not yet, made by compiled code. Collective."""
        options = arguments.options
        operation = self.operation.names.operation
        turn, agreement, payloads = agree(
            self.context, operation, self.ready, self.build, arguments, self.spec
        )
        if options is not None or is_heard(INFO):
            self.log(options, agreement.plan)
        return self.perform(turn, agreement, payloads)

    def _same_options(self, options: Any) -> Any:
        """One object for all equal options, by whose identity calls are recognised.

        Options that are wrong are returned as they are, and so are those with a logger, which is
        told of each call.
        """
        try:
            read = options_of(self.operation.options, options)
            return options if read.logger else self._options.made(read, lambda: read)
        except (TypeError, ValueError):  # raised again where the call is described
            return options

    def ready(self, arguments: Arguments, spec: Callable[[Arguments], HashedSpec]) -> Turn:
        """This rank's side of a call, prepared for the plan that is expected. Local.

        Raises as `known`, HeapExhausted, and DataRace where a peer may be writing to an operand.
        The ranks can agree after it.
        """
        if self.context.observer is not None:
            from shardmath.handles.watched import tell_of

            for x in arguments.operands:
                tell_of(x, writes=False, what=self.operation.names.operation)
        known = self.known(arguments, spec)
        turn = Turn(arguments, known)
        self.performer.prepare(turn, known.expected)
        return turn

    def perform(self, turn: Turn, agreement: Agreement[Plan], payloads: Sequence[bytes]) -> Any:
        """The results of a call on which all ranks have agreed. Collective."""
        if self._copied is not None:
            from shardmath.call.copies import require_equal_copies

            layouts = self._copied(agreement.plan.problem)
            require_equal_copies(self.context, self.operation.names, turn.arguments, layouts)
        if turn.known.last is not agreement:
            self.expect_again(turn, agreement)
        turn.payloads = payloads
        results = self.performer.perform(turn, agreement, agreement.plan)
        if self._compiled is not None and turn.known.direct != (agreement, turn.prepared):
            self._keep(turn, agreement, results)
        return results[0] if len(results) == 1 else results

    def again(self, arguments: Arguments) -> Any:
        """The results of a call that compiled code makes; None if it does not, and then nothing was
        done. Collective if there are results.
        """
        compiled = self._compiled
        return None if compiled is None else compiled.make(arguments)

    def forget_public(self) -> None:
        """Let the object's methods be entered again: it refers to other operands now."""
        if self._compiled is not None:
            self._compiled.forget_public()

    def forget(self) -> None:
        """Drop the calls that compiled code makes."""
        if self._compiled is not None:
            self._compiled.forget()

    def _keep(self, turn: Turn, agreement: Agreement[Plan], results: tuple[Any, ...]) -> None:
        """Let compiled code make calls like this one."""
        known, performer = turn.known, self.performer
        known.direct = agreement, turn.prepared
        if performer.direct is None or self._compiled is None or not known.lasting:
            return
        direct = performer.direct(turn, agreement)
        if direct is not None and (direct.receive is not None or not any(turn.payloads)):
            method = None if self.agreed is None else self.agreed()
            owner = getattr(method, "__self__", None)
            self._compiled.keep(turn, agreement, direct, results, owner)

    def _otherwise(
        self,
        begun: tuple[Any, ...],
        arguments: tuple[Any, ...],
        result: Any,
        payload: bytes,
        texts: tuple[bytes, ...],
        payloads: Sequence[bytes],
    ) -> Any:
        """Go on with a call that compiled code has begun, and in which a rank's text was new."""
        turn = turn_of(begun, arguments, result, payload)
        build = self.build if self.agreed is None else self.agreed()
        agreement = concluded(self.context, begun[0], turn.spec, texts, build)
        return self.perform(turn, agreement, payloads)

    # -- recognising a call ------------------------------------------------------------------------

    def known(self, arguments: Arguments, spec: Callable[[Arguments], HashedSpec]) -> Known:
        """What is known of calls with equal arguments, whose arrays look and lie like these. Local.

        If nothing is known yet, the arrays are read in full, after `spec(arguments)`. Raises what
        is wrong with the arguments.
        """
        if arguments.stream is not None:
            check_stream(arguments.stream)
        operands, results, words, options, _, numbers = arguments
        try:
            if options is not None:
                options = options_of(self.operation.options, options)
            if numbers:
                numbers = self.numbers(arguments)
            said = words, tuple(map(type, words)), options, numbers  # True equals 1, and is no axis
            key = self._known.key(said, operands, results)
            known = None if key is None else self._known.find(key)
        except (TypeError, ValueError):  # a word has no hash, or is wrong: `spec` raises for it
            key = known = None
        if known is not None:
            return known
        by_name = dict(zip(self.operation.names.numbers, self.numbers(arguments), strict=True))
        own = spec(arguments)
        arrays, expected = self.performer.read(arguments), self._expected.find(own.digest)
        known = Known(own, self.performer.without_memory(arrays), True, expected, by_name)
        if key is not None:
            known.blocks = self._known.keep_for(key, (*operands, *results), known)
        return known if known.blocks else Known(own, arrays, False, expected, by_name)

    def numbers(self, arguments: Arguments) -> tuple[Number, ...]:
        """The numbers of a call. Local. Raises ValueError for a value that is no number."""
        pairs = zip(self.operation.names.numbers, arguments.numbers, strict=True)
        return tuple([x if type(x) in PLAIN else number(name, x) for name, x in pairs])

    def spec(self, arguments: Arguments) -> HashedSpec:
        """The spec of this rank's arguments, which all ranks compare. Local."""
        operation, names, words = self.operation, self.operation.names, arguments.words
        options = options_of(operation.options, arguments.options)
        arrays: dict[str, ArraySpec | None] = {}
        for name, x in zip(names.operands, arguments.operands, strict=True):
            left_out = x is None and name in names.optional
            arrays[name] = None if left_out else library_and_spec(x, name)[1]
        for name, x in zip(names.results, arguments.results, strict=True):
            arrays[name] = None if x is None else library_and_spec(x, name)[1]

        def described() -> HashedSpec:
            return HashedSpec(operation.describe(arrays, words, options))

        try:
            key = (*arrays.values(), words, tuple(map(type, words)), options)  # see `known`
            hash(key)
        except TypeError:  # one of the words has no hash
            return described()
        return self._specs.made(key, described)

    # -- plans -------------------------------------------------------------------------------------

    def expect_again(self, turn: Turn, agreement: Agreement[Plan]) -> None:
        """Expect the same agreement in the next such call. Local."""
        known = turn.known
        known.last = agreement
        if known.expected is not agreement.plan:
            known.expected = self.expect(turn.spec, agreement.plan)

    def expect(self, spec: HashedSpec, plan: Plan) -> Plan:
        """Expect `plan` in the next call with that spec. Local."""
        return self._expected.keep(spec.digest, plan)

    def build(self, specs: list[Any]) -> Plan:
        """The plan for all ranks' specs. Pure."""
        tag = blake2b(wire.encode(specs), digest_size=TAG_BYTES).digest()
        return self._plans.made(tag, partial(self._built, specs, tag))

    def _built(self, specs: list[Any], tag: bytes) -> Plan:
        problem = self.operation.check(specs)
        program = self.operation.program(problem, self.machine, self.context.rank)
        explain = partial(self.operation.explain, problem, self.machine)
        this_process.planned(explain)
        return Plan(tag, problem, program, explain)

    def log(self, options: Any, plan: Plan) -> None:
        """Log what was planned, to the user's logger or the package's."""
        logger = None if options is None else options_of(self.operation.options, options).logger
        log_plan(self.context, logger, plan)


def _performer(context: Context, operation: Operation[Any], *, kept: bool) -> Performer:
    """The performer of programs on this context's cores or GPUs."""
    make: Callable[..., Performer]
    if context.team is None:
        make = getattr(operation, "on_cores", Cores)
    else:
        from shardmath.program.gpus import GPUs

        make = getattr(operation, "on_gpus", GPUs)
    return make(context, operation.names, kept=kept)
