"""Calls that come again unchanged on all ranks: direct.c makes each in one compiled call.

The driver makes a call the first time, and again whenever something has changed: an array is
another, a block was freed, a plan was made since. Where no C compiler was there at installation,
the driver makes every call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np

from shardmath.arrays import libraries
from shardmath.base.collective_call import Call, CollectiveCall, this_thread
from shardmath.base.compiled import extension
from shardmath.base.log import package_logger
from shardmath.base.untraced import watches_of_torch
from shardmath.call.agreement import Agreement, Plans
from shardmath.call.stand_ins import CopyAgain
from shardmath.context.context import Context
from shardmath.handles.fingerprint import Looks
from shardmath.program.offers import DoubleBuffer
from shardmath.program.performing import Arguments, Direct, Turn

_KEPT = 1024  # calls
_NAME = "shardmath.call._direct"  # of the module that direct.c makes

_Calls = dict[int, tuple[Any, ...]]
_Seen = tuple[bytes, bytes, tuple[Any, ...], tuple[Any, ...]]
Otherwise = Callable[..., Any]


class Lying(IntEnum):
    """What the key of a call says of its arrays' memory: direct.c has the same numbers."""

    PLACED = 0  # where they lie, and their strides
    STRIDED = 1  # their strides alone
    CONTIGUOUS = 2  # that they are contiguous, if they are those of a library


class CompiledCalls:
    """The calls of one driver that compiled code makes.

    `calls` has them by a key of their arrays and words, once for each half of the double buffer.
    """

    def __init__(
        self, context: Context, looks: Looks, otherwise: Otherwise, compiled: Any, rounds: Any
    ) -> None:
        """`rounds` is what `Board.compiled` gives."""
        self._context, self._looks, self._compiled = context, looks, compiled
        self._otherwise = otherwise
        self.calls: tuple[_Calls, _Calls] = {}, {}
        self._turn = DoubleBuffer.of(context).turn
        self._keys: set[bytes] = set()  # of calls of an object's methods, in the context's `again`
        self._plans = Plans.of(context)
        self._shared = shared_by_calls(context, looks, rounds)

    @classmethod
    def of(cls, context: Context, looks: Looks, otherwise: Otherwise) -> CompiledCalls | None:
        """The compiled calls of a driver; None where nothing was built from C.

        `otherwise(begun, arguments, result, payload, texts, payloads)` goes on with a call after an
        exchange in which a rank has sent another text; see `turn_of`.
        """
        built = direct_calls()
        rounds = built and context.board.compiled(ahead=context.team is not None)
        return None if rounds is None else cls(context, looks, otherwise, built, rounds)

    def make(self, arguments: Arguments) -> Any:
        """The results of a call that is kept; None if it is not, and then nothing was done."""
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
        """Let compiled code make calls like this one, which has given these results.

        `owner` is the object whose method was called, None for a call of a function.
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
        kept: tuple[Any, ...] = (  # in the order of direct.c's first enum
            *(looks, words, known.blocks, made, direct.memory, entry, agreement.key[0], text),
            *(agreement.texts, direct.payload, direct.before, direct.new, direct.result),
            *({}, direct.bind, direct.home, direct.receive, begun),
        )
        by_half: list[Any] = [None, None]
        for half, calls in enumerate(self.calls):
            if direct.half in (None, half):
                if len(calls) >= _KEPT:
                    del calls[next(iter(calls))]  # the oldest
                calls[self._compiled.key(looks, words)] = by_half[half] = kept
        call = this_thread.call
        if call is not None:
            call.repeat = partial(self._remember, by_half, arguments, results, owner, None)

    def keep_elsewhere(
        self, arguments: Arguments, stand_ins: Arguments, results: tuple[Any, ...], copy: CopyAgain
    ) -> None:
        """Let compiled code make public calls like this one wherever their operands lie.

        Their `arguments` differ from this one's in that. It was made with `stand_ins`, and has
        given these results; `copy` copies other operands to the same stand-ins.
        """
        call, looks = this_thread.call, self._looks(stand_ins.operands, stand_ins.results)
        if call is None or looks is None:
            return
        words = arguments.words, arguments.options, arguments.numbers
        key = self._compiled.key(looks, words)
        by_half = [calls.get(key) for calls in self.calls]
        if any(kept is not None for kept in by_half):
            call.repeat = partial(self._remember, by_half, arguments, results, None, copy)

    def _remember(
        self,
        by_half: list[Any],
        arguments: Arguments,
        given: tuple[Any, ...],
        owner: Any,
        copy: CopyAgain | None,
        call: Call,
        rounds: int,
    ) -> None:
        """Let compiled code make the public call that has just returned, too, without entering the
        public function, which only turns its own arguments into `arguments`. `by_half` has what is
        kept of the driver's call for each half of the double buffer, or None.

        This holds only if the public call was this one call of the driver, and nothing else: all
        arrays are the same, and it returned the results that the driver had `given`, or one of
        them. With `copy`, it holds wherever the operands lie.
        """
        held = () if owner is None else owner.held
        lying = Lying.PLACED if copy is None else Lying.STRIDED
        seen = seen_in(self._compiled, call, held, lying)
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
        if copy is not None and len(numbers) < len(arrays):
            return  # an array that was given twice: next time there may be two
        if any(isinstance(x, Context) or type(x).__hash__ is None for x in objects):
            return
        if arguments.stream is not None or getattr(options, "logger", None) is not None:
            return
        calls, words = self._context.again, (arguments.words, options, arguments.numbers)
        if len(calls) >= _KEPT and key not in calls:
            calls.clear()
        if owner is not None:  # referred to weakly: it goes when nobody else refers to it
            self._keys.add(key)
            gone = weakref.ref(owner, lambda _: calls.pop(key, None))
            objects = (gone, *[x for x in objects if x is not owner])
        made = calls.get(key)
        if made is not None and made[6] == facts:
            by_half = [new or old for new, old in zip(by_half, made[4], strict=True)]
        calls[key] = (
            *(watches_of(call[0], arrays), self._shared, self._otherwise, self._turn, by_half),
            *(held, facts, operands, results, None if len(given) == 1 else which, words, objects),
            copy,
        )

    def forget_public(self) -> None:
        """Let the methods of the object be entered again: it refers to other operands now."""
        for key in self._keys:
            self._context.again.pop(key, None)
        self._keys.clear()

    def forget(self) -> None:
        """Drop all calls."""
        self.forget_public()
        for calls in self.calls:
            calls.clear()


def direct_calls() -> Any:
    """The module built from direct.c, told of NumPy's arrays; None where it was not built."""
    built = extension(_NAME)
    if built is not None:
        built.know(np.ndarray, np.zeros((3, 2), "f4")[:, 1:])
    return built


def shared_by_calls(context: Context, looks: Looks | None, rounds: Any) -> tuple[Any, ...]:
    """What all compiled calls of one driver share, in the order of direct.c's second enum."""
    plans, logger = Plans.of(context), package_logger()
    return (
        *(looks, context, context.board, context.heap, plans, plans.all),
        *(this_thread, CollectiveCall, getattr(logger, "_cache", None), logger.isEnabledFor),
        *rounds,
    )


def seen_in(compiled: Any, call: Call, held: Any = (), lying: Lying = Lying.PLACED) -> _Seen | None:
    """The key by which direct.c finds a call that a user has made; facts of the arrays that its
    object has `held`; all its arrays; and objects that have to live as long as the key. None for a
    call that direct.c cannot recognise.
    """
    for library in libraries().values():
        attributes = library.attributes()
        if attributes is not None:
            compiled.know_library(attributes)
    seen: _Seen | None = compiled.look(*call[:3], held, lying)
    return seen


def watches_of(function: Callable[..., Any], arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Functions that are asked before a call of `function`: where one says that torch is to record
    or trace it, compiled code does not make it.
    """
    if not any(hasattr(x, "requires_grad") for x in arrays):
        return ()
    *watches, narrows = watches_of_torch()
    return (*watches, narrows) if function.__name__ == "matmul" else tuple(watches)


def turn_of(
    begun: tuple[Any, ...], arguments: tuple[Any, ...], result: Any, payload: bytes
) -> Turn:
    """The turn of a call that compiled code has begun, and that the driver has to end."""
    _, known, prepared, note, names = begun
    turn = Turn(Arguments(*arguments), known)
    turn.prepared, turn.note, turn.payload = prepared, note, payload
    turn.made = dict.fromkeys(names, result)
    return turn
