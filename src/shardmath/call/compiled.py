"""Calls that come again as they were on all ranks: each is one compiled call, see direct.c.

The driver makes a call the first time, and whenever something is not as it was: another array, a
block that was freed, a plan that was made since. Without a compiler at installation it always does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from shardmath.base.collective_call import Call, CollectiveCall, this_thread
from shardmath.base.compiled import extension
from shardmath.call.agreement import Agreement, Plans
from shardmath.context.context import Context
from shardmath.handles.fingerprint import Looks
from shardmath.operators.arguments import LOGGER
from shardmath.program.offers import DoubleBuffer
from shardmath.program.performing import Arguments, Direct, Turn

_KEPT = 256  # calls
_NAME = "shardmath.call._direct"  # of the module that direct.c makes

_Calls = dict[int, tuple[Any, ...]]
Otherwise = Callable[..., Any]


class CompiledCalls:
    """The calls of one driver that are made so.

    `calls` has them by what identifies them, for each half of the double buffer.
    """

    def __init__(
        self, context: Context, looks: Looks, otherwise: Otherwise, compiled: Any, rounds: Any
    ) -> None:
        """`rounds` is what `Board.compiled` gives."""
        self._context, self._looks, self._compiled = context, looks, compiled
        self._otherwise = otherwise
        compiled.know(np.ndarray, np.zeros((3, 2), "f4")[:, 1:])
        self.calls: tuple[_Calls, _Calls] = {}, {}
        self._turn = DoubleBuffer.of(context).turn
        self._plans = Plans.of(context)
        self._shared = (
            *(looks, context, context.board, context.heap, self._plans, self._plans.all),
            *(this_thread, CollectiveCall, getattr(LOGGER, "_cache", None), LOGGER.isEnabledFor),
            *rounds,
        )

    @classmethod
    def of(cls, context: Context, looks: Looks, otherwise: Otherwise) -> CompiledCalls | None:
        """The compiled calls of a driver; None where nothing was built from C.

        `otherwise(begun, arguments, result, payload, texts, payloads)` is what follows an exchange
        in which a rank has sent another text; see `turn_of`.
        """
        built = extension(_NAME)
        rounds = built and context.board.compiled(ahead=context.team is not None)
        return None if rounds is None else cls(context, looks, otherwise, built, rounds)

    def make(self, arguments: Arguments) -> Any:
        """The results of a call that is known; None where it is another, and nothing was done."""
        calls = self.calls[self._turn()]
        return self._compiled.direct(self._shared, calls, arguments, self._otherwise)

    def keep(
        self, turn: Turn, agreement: Agreement[Any], direct: Direct, results: tuple[Any, ...]
    ) -> None:
        """Make calls like this so from now on. These are its results."""
        known, arguments, board = turn.known, turn.arguments, self._context.board
        text, made = agreement.texts[board.rank], self._plans.made
        if self._plans.repeated.find(agreement.texts) is not agreement:
            return  # a plan has been made since, and the texts will be others
        looks = self._looks(arguments.operands, arguments.results)
        if looks is None or known.blocks is None or not board.fits(len(text) + len(turn.payload)):
            return
        words = arguments.words, arguments.options, arguments.numbers
        begun = agreement.key[0], known, turn.prepared, turn.note, tuple(turn.made)
        entry = self._plans.all.entry(agreement.key)
        made_so: tuple[Any, ...] = (
            *(looks, words, known.blocks, made, direct.memory, entry, agreement.key[0], text),
            *(agreement.texts, direct.payload, direct.before, direct.new, direct.result),
            *({}, direct.bind, direct.receive, begun),
        )
        for half, calls in enumerate(self.calls):
            if direct.half in (None, half):
                if len(calls) >= _KEPT:
                    calls.clear()
                calls[self._compiled.key(looks, words)] = made_so
        call = this_thread.call
        if call is not None:
            call.repeat = partial(self._remember, made_so, direct.half, arguments, results)

    def _remember(
        self,
        made_so: tuple[Any, ...],
        half: int | None,
        arguments: Arguments,
        given: tuple[Any, ...],
        call: Call,
        rounds: int,
    ) -> None:
        """Make the public call that has returned so from now on, without the function that makes
        `arguments` of its own, if it is this one call of the driver and nothing else: it returned
        what was `given` then, or one of that.
        """
        seen = self._compiled.look(*call[:3])
        which = next((number for number, x in enumerate(given) if x is call[3]), None)
        if seen is None or which is None or self._context.board.rounds != rounds + 1:
            return
        key, arrays, objects = seen
        numbers = {id(x): number for number, x in enumerate(arrays)}
        operands, results = (
            tuple([None if x is None else numbers.get(id(x), -1) for x in those])
            for those in (arguments.operands, arguments.results)
        )
        used = {*operands, *results} - {None}
        options = arguments.options
        if used != {*numbers.values()} or arguments.stream is not None:
            return
        if any(isinstance(x, Context) or type(x).__hash__ is None for x in objects):
            return
        if options is not None and options.logger is not None:
            return
        calls = self._context.again
        if len(calls) >= _KEPT and key not in calls:
            calls.clear()
        words = arguments.words, options, arguments.numbers
        entry = calls.setdefault(
            key,
            (
                *(self._shared, self._otherwise, self._turn, [None, None]),
                *(operands, results, None if len(given) == 1 else which, words, objects),
            ),
        )
        entry[3][:] = [
            made_so if half in (None, number) else other for number, other in enumerate(entry[3])
        ]

    def forget(self) -> None:
        """Drop all of them."""
        for calls in self.calls:
            calls.clear()


def turn_of(
    begun: tuple[Any, ...], arguments: tuple[Any, ...], result: Any, payload: bytes
) -> Turn:
    """The turn of a call that compiled code has begun, and that it does not end."""
    _, known, prepared, note, names = begun
    turn = Turn(Arguments(*arguments), known, known.spec)
    turn.prepared, turn.note, turn.payload = prepared, note, payload
    turn.made = dict.fromkeys(names, result)
    return turn
