"""Calls that come again as they were on all ranks: each is one compiled call, see direct.c.

The driver makes a call the first time, and whenever something is not as it was: another array, a
block that was freed, a plan that was made since. Without a compiler at installation it always does.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from shardmath.base.collective_call import Call, CollectiveCall, this_thread
from shardmath.base.compiled import extension
from shardmath.base.log import LOGGER
from shardmath.base.untraced import watches_of_torch
from shardmath.call.agreement import Agreement, Plans
from shardmath.context.context import Context
from shardmath.handles.fingerprint import Looks
from shardmath.program.offers import DoubleBuffer
from shardmath.program.performing import Arguments, Direct, Turn

_KEPT = 256  # calls
_NAME = "shardmath.call._direct"  # of the module that direct.c makes

_Calls = dict[int, tuple[Any, ...]]
_Seen = tuple[bytes, bytes, tuple[Any, ...], tuple[Any, ...]]
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
        self.calls: tuple[_Calls, _Calls] = {}, {}
        self._turn = DoubleBuffer.of(context).turn
        self._keys: set[bytes] = set()  # of an object's methods, among the calls of the context
        self._plans = Plans.of(context)
        self._shared = shared_by_calls(context, looks, rounds)

    @classmethod
    def of(cls, context: Context, looks: Looks, otherwise: Otherwise) -> CompiledCalls | None:
        """The compiled calls of a driver; None where nothing was built from C.

        `otherwise(begun, arguments, result, payload, texts, payloads)` is what follows an exchange
        in which a rank has sent another text; see `turn_of`.
        """
        built = direct_calls()
        rounds = built and context.board.compiled(ahead=context.team is not None)
        return None if rounds is None else cls(context, looks, otherwise, built, rounds)

    def make(self, arguments: Arguments) -> Any:
        """The results of a call that is known; None where it is another, and nothing was done."""
        calls = self.calls[self._turn()]
        return self._compiled.direct(self._shared, calls, arguments, self._otherwise)

    def keep(
        self,
        turn: Turn,
        agreement: Agreement[Any],
        direct: Direct,
        results: tuple[Any, ...],
        owner: Any,
    ) -> None:
        """Make calls like this so from now on. These are its results; the call is one of `owner`'s,
        an object that is planned once, or of a function.
        """
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
            *({}, direct.bind, direct.home, direct.receive, begun),
        )
        for half, calls in enumerate(self.calls):
            if direct.half in (None, half):
                if len(calls) >= _KEPT:
                    calls.clear()
                calls[self._compiled.key(looks, words)] = made_so
        call = this_thread.call
        if call is not None:
            call.repeat = partial(self._remember, made_so, direct.half, arguments, results, owner)

    def _remember(
        self,
        made_so: tuple[Any, ...],
        half: int | None,
        arguments: Arguments,
        given: tuple[Any, ...],
        owner: Any,
        call: Call,
        rounds: int,
    ) -> None:
        """Make the public call that has returned so from now on, without the function that makes
        `arguments` of its own, if it is this one call of the driver and nothing else: it returned
        what was `given` then, or one of that. `owner` is the object whose method it is.
        """
        held = () if owner is None else owner.held
        seen = seen_in(self._compiled, call, held)
        which = next((number for number, x in enumerate(given) if x is call[3]), None)
        if seen is None or which is None or self._context.board.rounds != rounds + 1:
            return
        key, facts, arrays, objects = seen
        numbers = {id(x): number for number, x in enumerate(arrays)}
        operands, results = (
            tuple([None if x is None else numbers.get(id(x), -1) for x in those])
            for those in (arguments.operands, arguments.results)
        )
        used, options = {*operands, *results} - {None}, arguments.options
        if used != {*numbers.values()} or any(id(x) not in numbers for x in held):
            return
        if any(isinstance(x, Context) or type(x).__hash__ is None for x in objects):
            return
        if arguments.stream is not None or getattr(options, "logger", None) is not None:
            return
        calls, words = self._context.again, (arguments.words, options, arguments.numbers)
        if len(calls) >= _KEPT and key not in calls:
            calls.clear()
        if owner is not None:  # which goes when nobody else refers to it
            self._keys.add(key)
            gone = weakref.ref(owner, lambda _: calls.pop(key, None))
            objects = (gone, *[x for x in objects if x is not owner])
        made = calls.get(key)
        by_half = [None, None] if made is None or made[6] != facts else made[4]
        by_half = [made_so if half in (None, n) else by_half[n] for n in range(2)]
        calls[key] = (
            *(watches_of(call[0], arrays), self._shared, self._otherwise, self._turn, by_half),
            *(held, facts, operands, results, None if len(given) == 1 else which, words, objects),
        )

    def forget_public(self) -> None:
        """Enter the methods of the object whose calls these are: what it refers to has changed."""
        for key in self._keys:
            self._context.again.pop(key, None)
        self._keys.clear()

    def forget(self) -> None:
        """Drop all of them."""
        self.forget_public()
        for calls in self.calls:
            calls.clear()


def direct_calls() -> Any:
    """The module that direct.c makes, which knows NumPy's arrays; None where it was not built."""
    built = extension(_NAME)
    if built is not None:
        built.know(np.ndarray, np.zeros((3, 2), "f4")[:, 1:])
    return built


def shared_by_calls(context: Context, looks: Looks | None, rounds: Any) -> tuple[Any, ...]:
    """What all compiled calls of one kind share, as direct.c has it."""
    plans = Plans.of(context)
    return (
        *(looks, context, context.board, context.heap, plans, plans.all),
        *(this_thread, CollectiveCall, getattr(LOGGER, "_cache", None), LOGGER.isEnabledFor),
        *rounds,
    )


def seen_in(compiled: Any, call: Call, held: Any = (), *, anywhere: bool = False) -> _Seen | None:
    """The key by which direct.c finds a call that a user has made, words of the arrays that are
    `held` besides, its arrays, and objects that have to live; None where that takes a closer look.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        compiled.know_tensors(torch.Tensor)
    seen: _Seen | None = compiled.look(*call[:3], held, anywhere)
    return seen


def watches_of(function: Callable[..., Any], arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Functions of which none says, before a call of `function`, that torch is to know of it."""
    if not any(hasattr(x, "requires_grad") for x in arrays):
        return ()
    *watches, narrows = watches_of_torch()
    return (*watches, narrows) if function.__name__ == "matmul" else tuple(watches)


def turn_of(
    begun: tuple[Any, ...], arguments: tuple[Any, ...], result: Any, payload: bytes
) -> Turn:
    """The turn of a call that compiled code has begun, and that it does not end."""
    _, known, prepared, note, names = begun
    turn = Turn(Arguments(*arguments), known, known.spec)
    turn.prepared, turn.note, turn.payload = prepared, note, payload
    turn.made = dict.fromkeys(names, result)
    return turn
