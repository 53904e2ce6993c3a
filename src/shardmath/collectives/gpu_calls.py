"""Calls of collectives on GPUs: a driver whose calls wait for no peer's host once all know them.

Such a call is listed and launched, see `ahead`; this rank's host waits for its peers only if it has
to learn how much they send. In all other calls the ranks meet, as the driver has it. If a call was
one launch, from the operand and to the result as they lie, compiled code can repeat it, see
`repeats`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardmath.arrays import ArraySpec
from shardmath.call.agreement import Agreement, agree
from shardmath.call.driver import Driver
from shardmath.collectives.ahead import Ahead, KnownCall
from shardmath.collectives.forms import OnGPUs, OwnParts
from shardmath.collectives.gpu_operand import DeviceOperand, DeviceOutput, DirectLaunch, placeholder
from shardmath.collectives.operand import Shape
from shardmath.collectives.repeats import Repeats
from shardmath.context.context import Context
from shardmath.program.performing import Arguments, Names, Plan, Turn

_PLAIN = frozenset([int, str, tuple, type(None)])  # words by which calls are found: True is no axis


class CollectivePerformer:
    """Performs one collective on GPUs: the driver's performer."""

    number, direct = 0, None

    def __init__(self, context: Context, names: Names, collective: OnGPUs) -> None:
        self.collective = collective
        self._context, self._operation = context, names.operation

    def inspect(self, arguments: Arguments) -> None:
        """See Performer."""
        self.read(arguments)

    def read(self, arguments: Arguments) -> DeviceOperand | None:
        """See Performer. Raises as DeviceOperand and DeviceOutput."""
        (x,), (out,) = arguments.operands, arguments.results
        if x is not None:
            return DeviceOperand(self._context, x, out)
        if out is not None:
            DeviceOutput(self._context, out)
        return None

    def without_memory(self, arrays: DeviceOperand | None) -> None:
        """See Performer: arrays that are not kept are read anew in each call."""

    def most_copied(self, spec: ArraySpec) -> int:
        """See Performer: calls are repeated wherever their arrays lie."""
        return 0

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """See Performer: never called."""

    @property
    def copier(self) -> None:
        """See Performer: never used."""

    def prepare(self, turn: Turn, plan: Plan | None) -> None:
        """See Performer."""

    def release(self) -> None:
        """See Performer."""

    def perform(self, turn: Turn, agreement: Agreement[Any], plan: Plan) -> tuple[Any, ...]:
        """See Performer."""
        problem, tag = plan.problem, plan.kept.get("tag")
        if tag is None:
            common = self.collective.form.agreed(turn.spec.spec, problem)
            tag = plan.kept["tag"] = Ahead.of(self._context).tag(self._operation, common)
        with self._context.executing(self._operation):
            return (self.collective.launch(self.operand(turn, problem, tag), problem),)

    def operand(self, turn: Turn, problem: Any, tag: int) -> DeviceOperand:
        """The operand of a call with this tag; a placeholder if this rank gives none."""
        (x,), (out,) = turn.arguments.operands, turn.arguments.results
        held: DeviceOperand | None = turn.known.arrays
        if held is None and x is not None:
            held = DeviceOperand(self._context, x, out)
        elif held is None:
            held = placeholder(self._context, problem.library, problem.dtype, problem.shape, out)
        held.tag, turn.held = tag, held
        return held

    def put(self, operand: DeviceOperand, plan: Plan | OwnParts) -> Any:
        """The result of a known call, given its plan, or only this rank's own part."""
        if isinstance(plan, OwnParts):
            return operand.exchange(plan)
        return self.collective.launch(operand, plan.problem)


class GPUCalls(Driver):
    """Calls of one collective in one context of GPUs."""

    performer: CollectivePerformer

    def call(self, arguments: Arguments) -> Any:
        context, operation = self.context, self.operation.names.operation
        context.require_open()
        context.board.enter(operation)
        turn = self._described(arguments)
        try:
            known = None if isinstance(turn, Exception) else self._known_call(turn)
            if known is None or isinstance(turn, Exception):
                return self._meet(turn)
            result = self._go(turn, known)
        finally:
            del turn  # the traceback of an error refers to this frame: that cycle would keep arrays
        return result

    def _described(self, arguments: Arguments) -> Turn | Exception:
        """The call, or what is wrong with it on this rank."""
        try:
            return self.ready(arguments, self.spec)
        except Exception as error:
            return error

    def _known_call(self, turn: Turn) -> KnownCall | None:
        """The known call that this turn makes; None if the ranks have to meet."""
        operation, ahead = self.operation.names.operation, Ahead.of(self.context)
        form, spec = self.performer.collective.form, turn.spec.spec
        if form.common(spec) is None:
            return ahead.find_of(spec[-1], operation)
        return ahead.find_fitting(operation, form, spec)

    def _meet(self, described: Turn | Exception) -> Any:
        """The result of a call on which the ranks agree now: they know the next such call."""
        operation, collective = self.operation.names.operation, self.performer.collective
        ahead, form = Ahead.of(self.context), collective.form
        own = described if isinstance(described, Exception) else described.spec.spec
        try:
            with ahead.meeting(own):
                turn, agreement, payloads = agree(
                    self.context, operation, _raised, self.build, described
                )
        finally:
            del described, own
        plan, spec = agreement.plan, turn.spec.spec
        result = self.perform(turn, agreement, payloads)
        common = form.agreed(spec, plan.problem)
        known = ahead.find(operation, common)
        if known is None:
            of_all = collective.result(turn.held, plan.problem)
            if of_all is None:
                return result
            into = (turn.held.kind, *of_all) if of_all else form.result(common)
            known = ahead.keep(operation, form, common, into, plan, self.build)
        # Where calls have counts, this launch has the peers' counts, so it is not the next one's.
        if known is not None and not form.counted:
            self._keep_compiled(turn, known, None, result)
        return result

    def _go(self, turn: Turn, known: KnownCall) -> Any:
        """The result of a call that all ranks know: no host waits for another's."""
        ahead, spec = Ahead.of(self.context), turn.spec.spec
        with self.context.executing(known.operation):
            ahead.go(known, known.form.words(spec))
            plan = ahead.plan(known, spec)
            operand = self.performer.operand(turn, known.plan.problem, known.tag)
            result = self.performer.put(operand, plan)
        kept, others = turn.known.prepared or (None, None), ahead.asked(known, spec)
        if kept[0] is not known or kept[1] != others:
            turn.known.prepared = known, others
            self._keep_compiled(turn, known, others, result)
        return result

    def _keep_compiled(
        self, turn: Turn, known: KnownCall, others: Sequence[Shape] | None, result: Any
    ) -> None:
        """Let compiled code make the next such call, if the peers list `others` in it again."""
        repeats, operand, own = Repeats.of(self.context), turn.held, turn.spec.spec
        (x,), (out,) = turn.arguments.operands, turn.arguments.results
        words, given = turn.arguments.words[2:], out if x is None else x
        direct = _direct(operand, given, result)
        if repeats is None or direct is None or direct.ready is None or not turn.known.lasting:
            return
        if not all(type(word) in _PLAIN for word in words):
            return
        counted = known.form.takes_counts(own, words)
        if counted and others is not None:
            return  # the launch depends on the peers' words
        listed = known.form.words(own)
        performer, tag = self.performer, known.tag

        def end(context: Context, x: Any, out: Any) -> tuple[Any, bool]:
            ahead = Ahead.of(context)
            with context.executing(known.operation):
                plan, same = ahead.plan(known, own), ahead.others(listed) == others
                return performer.put(DeviceOperand(context, x, out, tag=tag), plan), same

        library = operand.library
        repeats.keep(
            (known.operation, *(words[:1] if counted else words)),
            (library, operand.spec, given),
            (library.spec(result), result),
            direct.ready,
            (tag, listed),
            others,
            end,
            in_place=direct.in_place,
            given=not (others is not None and out is None),
            new=out is None or not known.form.counted,
            counted=counted,
        )


def _raised(described: Turn | Exception) -> Turn:
    if isinstance(described, Exception):
        raise described
    return described


def _direct(operand: DeviceOperand, given: Any, result: Any) -> DirectLaunch | None:
    """The launch of a call, if it was the only one: from the operand to the result, as they lie."""
    direct = operand.direct
    if given is None or direct is None or operand.on_host:
        return None
    library = operand.library
    if library.spec(result).order not in ("C", "both"):
        return None
    places = library.pointer(given), library.pointer(result)
    return direct if (direct.source, direct.target) == places else None
