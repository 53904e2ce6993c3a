"""The extent of a collective call: from where a program enters the package to where it returns.

An exception that leaves a call part of the way (Ctrl-C, an alarm, whatever a signal handler raises)
would leave this rank one call apart from its peers, whose later calls would then be paired with the
wrong ones. So every public function that communicates is a `collective_call`, and every board that
it uses is entered on the call's record before a word is published there. Where the call does not
return, those boards fail, and with them the same call on all ranks; where even that was cut short,
the record stays unfinished, and the next use of the board finds it.

An exception that all ranks raise alike, or after which a later call finds the ranks in step, is
`settled`: it ends the call, and the boards remain usable.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial, wraps
from logging import DEBUG
from types import FunctionType
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import numpy as np

from shardmath.base import current
from shardmath.base.caller import caller_line
from shardmath.base.compiled import extension
from shardmath.base.log import LOGGER, told
from shardmath.base.recorder import this_process
from shardmath.base.untraced import (
    COMPILER,
    function_of_dtensors,
    function_of_foreign,
    is_loaded,
    is_watched,
    marked,
    operator_of,
    traced_as,
    unwatched,
    wants_operator,
    watches_of_torch,
)

P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E", bound=BaseException)

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]
"""A function that was called, the arguments in order and by name, and what it has returned."""


class Interruptible(Protocol):
    """A board, as a call that has used it sees it."""

    def interrupted(self, error: BaseException, line: str) -> None:
        """Tell the peers that `error` has left an operation before its end; `line` called it."""
        ...


class CollectiveCall:
    """One call under way in one thread. `finished` is set once, when it can no longer be cut short.

    `boards` are those that it has used, `settled` the exception that is known to leave them usable;
    `thread` and `rounds`, those that all its ranks had published, are set with the first board.
    `repeat(call, rounds)` lets compiled code make such calls from now on.
    """

    thread = 0
    finished = False
    settled: BaseException | None = None
    rounds = -1
    repeat: Callable[[Call, int], None] | None = None

    def __init__(self) -> None:
        self.boards: list[Interruptible] = []

    def interrupt(self, error: BaseException, boards: Sequence[Interruptible]) -> None:
        """End the call because of `error`: `boards` fail unless the error is settled."""
        if self.settled is not error:
            line = caller_line() if boards else ""
            for board in boards:
                board.interrupted(error, line)
        this_process.leave()
        self.settled = None  # an exception's traceback refers to frames, and those to operands
        self.boards = []
        self.repeat = None
        self.finished = True


class _Thread(threading.local):
    """The `call` that a thread is in, None outside of any."""

    call: CollectiveCall | None = None


this_thread = _Thread()


def settled(error: E) -> E:
    """`error`, noted as one after which the boards of this call remain usable."""
    if this_thread.call is not None:
        this_thread.call.settled = error
    return error


def require_function() -> None:
    """Let compiled code not make such calls as that under way: its function has more to do."""
    if this_thread.call is not None:
        this_thread.call.repeat = None


def collective_call(function: Callable[P, R]) -> Callable[P, R]:
    """`function` as a collective call; called within another, it is a part of that one.

    `torch.compile` leaves it as it is, as what is `untraced`.
    """
    return marked(_collective(function, ""))


def differentiable(function: Callable[P, R]) -> Callable[P, R]:
    """`function` as a collective call, for which torch has an operator of that name: see
    `shardmath.autograd`. It is called in place of the function where torch's compiler traces the
    call, and where a tensor says so: see `wants_operator`.
    """
    name = function.__name__
    return traced_as(name, _collective(function, name))


def _collective(function: Callable[P, R], name: str) -> Callable[P, R]:
    """See `collective_call`; `name` is that of its operator, if there is one."""
    narrows = name == "matmul"  # autocast chooses its type

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_loaded(COMPILER) and is_watched():
            if this_thread.call is not None and not _is_part():
                this_thread.call = None  # or this frame would pass for its
            return unwatched(call)(*args, **kwargs)
        again = _again()
        if again is not None:
            given: R | None = again(function, args, kwargs)
            if given is not None:
                return given
        operands: tuple[Any, ...] = (*args, *kwargs.values()) if kwargs else args
        for operand in operands:
            kind = type(operand)
            if kind in _WITHOUT_FUNCTIONS:
                continue
            watches = _TENSORS.get(kind)  # in line: a plain tensor takes no call of ours
            if (
                watches is None
                or operand.requires_grad
                or watches[0]()
                or watches[1]()
                or (narrows and watches[2]())
            ):
                other = _function_of(operand, function, call, name)
                if other is not None:
                    return cast(R, other(*args, **kwargs))
        if this_thread.call is not None and _is_part():
            return function(*args, **kwargs)
        record = CollectiveCall()
        boards = record.boards  # which refer to the record: it forgets them at its end
        try:
            this_thread.call = record
            this_process.begin(function, args)
            made = told(function) if LOGGER.isEnabledFor(DEBUG) else function
            if this_process.compared is not None:
                made = this_process.compared(made)
            result = made(*args, **kwargs)
            this_process.end()
            this_thread.call = record.settled = None
            repeat, record.repeat = record.repeat, None
            record.boards = []
            record.finished = True
        except BaseException as error:
            this_thread.call = None
            record.interrupt(error, boards)
            raise
        if repeat is not None:
            repeat((function, args, kwargs, result), record.rounds)
        return result

    return call


# Types of arguments that leave every call to the function that was called; and torch.Tensor, with
# what says whether torch transforms or differentiates what is called, and whether it chooses types.
_WITHOUT_FUNCTIONS: set[type] = set()
_TENSORS: dict[type, tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any]]] = {}
_MOST = 1000


def _function_of(
    operand: Any, function: Any, call: Callable[..., Any], name: str
) -> Callable[..., Any] | None:
    """The function that an argument wants to be called in place of `function`, if it does: an array
    that knows how it is split has functions of its own, a tensor may want torch's operator, and
    arrays that only speak DLPack are taken before `call`, the public function, and given back.
    """
    ours = getattr(operand, "__shardmath_functions__", None)
    if ours is not None:
        other: Callable[..., Any] | None = ours.get(function)
        return other
    if hasattr(operand, "device_mesh"):  # a DTensor of torch's
        return function_of_dtensors(function)
    kind = type(operand)
    if kind is dict:  # of arrays
        for x in operand.values():
            if type(x) not in _WITHOUT_FUNCTIONS:
                other = _function_of(x, function, call, name)
                if other is not None:
                    return other
        return None
    if hasattr(operand, "requires_grad"):
        if kind is sys.modules["torch"].Tensor:
            _TENSORS[kind] = watches_of_torch()
        return operator_of(name) if name and wants_operator(operand, name) else None
    speaks_dlpack = hasattr(kind, "__dlpack__") and not issubclass(kind, np.ndarray)
    foreign = function_of_foreign(call, kind) if speaks_dlpack else None
    if foreign is None and len(_WITHOUT_FUNCTIONS) < _MOST:
        _WITHOUT_FUNCTIONS.add(kind)
    return foreign if name else None


@lru_cache(maxsize=1)
def _again() -> Callable[..., Any] | None:
    """The compiled function that makes a call that comes again: see direct.c."""
    built = extension("shardmath.call._direct")
    return None if built is None else partial(built.again, *current.places())


@marked
def _is_part() -> bool:
    """Whether a call of this thread is on the stack, beyond the one that asks.

    A call may have been cut short before it could take its record back; that one is not.
    """
    frame = sys._getframe(1).f_back
    while frame is not None:
        if frame.f_code is _ENTRANCE:
            return True
        frame = frame.f_back
    return False


_ENTRANCE = cast(FunctionType, collective_call(_is_part)).__code__
