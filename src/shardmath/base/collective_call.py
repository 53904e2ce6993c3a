"""The extent of a collective call: from where a program enters the package to where it returns.

An exception that leaves a call midway (Ctrl-C, an alarm, anything that a signal handler raises)
would leave this rank one call behind or ahead of its peers, and later calls would be paired with
the wrong ones. So every public function that communicates is a `collective_call`, or `composed` of
such calls, and every board that it uses is entered on the call's record before a word is published
there. Where the call does not return, those boards fail, and with them the same call on all ranks;
where an exception prevents even that, the record stays unfinished, and the next use of the board
finds it.

An exception is `settled` where all ranks raise it alike, or where a later call still finds the
ranks in step: it ends the call, and the boards remain usable.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial, wraps
from types import FunctionType
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import numpy as np

from shardmath.base import current
from shardmath.base.caller import caller_line
from shardmath.base.compiled import extension
from shardmath.base.log import DEBUG, is_heard, logged
from shardmath.base.recorder import this_process
from shardmath.base.untraced import (
    COMPILER,
    Watch,
    function_of_dtensors,
    function_of_foreign,
    is_loaded,
    is_watched,
    marked,
    operator_of,
    range_of_profiler,
    traced_as,
    unwatched,
    wants_operator,
    watches_of_torch,
)

P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E", bound=BaseException)

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]
"""A function that was called, its arguments by position and by name, and its result."""


class Interruptible(Protocol):
    """What a call sees of a board that it has used."""

    def interrupted(self, error: BaseException, line: str) -> None:
        """Tell the peers that `error` has left an operation before its end; `line` called it."""
        ...


class CollectiveCall:
    """One call under way in one thread. `finished` is set last: no exception can cut it short then.

    `boards` are those that it has used, `settled` the exception that leaves them usable. `thread`,
    and `rounds`, the number of rounds that its ranks had published, are set with the first board.
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
        self.settled = None  # its traceback refers to frames, which keep operands alive
        self.boards = []
        self.repeat = None
        self.finished = True


class _Thread(threading.local):
    """The `call` that a thread is in, or None, and whether it is in a range of torch's profiler."""

    call: CollectiveCall | None = None
    in_range = False


this_thread = _Thread()


waits: list[Callable[[], None]] = []
"""Functions that each call waits for before it begins: `interchange` adds the one for JAX."""


def settled(error: E) -> E:
    """`error`, after which the boards of this call remain usable."""
    if this_thread.call is not None:
        this_thread.call.settled = error
    return error


def require_function() -> None:
    """Keep compiled code from repeating the call under way, whose function does more than it."""
    if this_thread.call is not None:
        this_thread.call.repeat = None


def collective_call(function: Callable[P, R]) -> Callable[P, R]:
    """`function` as a collective call; within another call it is a part of that one.

    `torch.compile` does not trace it, as with `untraced`.
    """
    return marked(_collective(function, ""))


def differentiable(function: Callable[P, R]) -> Callable[P, R]:
    """`function` as a collective call for which torch has an operator of the same name.

    The operator (see `shardmath.autograd`) takes the place of the function where torch's compiler
    traces the call, and for tensors that need it: see `wants_operator`.
    """
    name = function.__name__
    return traced_as(name, _collective(function, name))


def composed(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which communicates only by making collective calls, as a user's function would.

    It is not a collective call itself, so that compiled code can repeat each call that it makes.
    torch has an operator of the same name, as for a `differentiable` function.
    """
    name = function.__name__

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_loaded(COMPILER) and is_watched():
            return unwatched(call)(*args, **kwargs)
        for operand in (*args, *kwargs.values()):
            if type(operand) not in _WITHOUT_FUNCTIONS:
                other = _function_of(operand, function, call, name)
                if other is not None:
                    return other(*args, **kwargs)  # type: ignore[no-any-return]
        return function(*args, **kwargs)

    return traced_as(name, call)


def _collective(function: Callable[P, R], name: str) -> Callable[P, R]:
    """See `collective_call`; `name` is the name of torch's operator, "" if there is none."""
    narrows = name == "matmul"  # whose data type autocast chooses
    executes = function.__name__ == "execute"  # that of an object, which may write its operands

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_loaded(COMPILER) and is_watched():
            if this_thread.call is not None and not _is_part():
                this_thread.call = None  # else `_is_part` would take this frame for that call's
            return unwatched(call)(*args, **kwargs)
        writes = executes and args[0].overwrites  # type: ignore[attr-defined]
        writes = writes or not _IN_PLACE.isdisjoint(kwargs)
        again = _again_after_waits() if waits else _again()
        if again is not None:
            given: R | None = again(function, args, kwargs)
            if given is not None:
                return _written(given, args) if writes else given
        operands: tuple[Any, ...] = (*args, *kwargs.values()) if kwargs else args
        for operand in operands:
            kind = type(operand)
            if kind in _WITHOUT_FUNCTIONS:
                continue
            watches = _TENSORS.get(kind)  # inline: a plain tensor costs no Python call
            if (
                watches is None
                or operand.requires_grad
                or watches[0]()
                or watches[1]()
                or watches[2]()
                or (narrows and watches[3]())
            ):
                other = _function_of(operand, function, call, name)
                if other is not None:
                    return other(*args, **kwargs)  # type: ignore[no-any-return]
        if this_thread.call is not None and _is_part():
            return function(*args, **kwargs)
        record = CollectiveCall()
        boards = record.boards  # boards refer to the record, which forgets them at its end
        try:
            this_thread.call = record
            this_process.begin(function, args)
            made = logged(function) if is_heard(DEBUG) else function
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
        return _written(result, args) if writes else result

    return call


_IN_PLACE = frozenset(("out", "options"))  # arguments that may make a result the user's tensor


def _written(result: R, args: tuple[Any, ...]) -> R:
    """The result, or the first of several, of which torch hears that it was written, as the operand
    in whose memory it lies: a backward pass that has saved what was there before must raise.
    """
    first: Any = result[0] if isinstance(result, tuple) else result
    if hasattr(type(first), "_version"):  # that of an inference tensor cannot be read
        torch = sys.modules["torch"]
        operand: Any = getattr(args[0], "held", args)[0] if args else None  # an object's, or given
        is_other = first is not operand and type(first) is type(operand) is torch.Tensor
        same = is_other and first.data_ptr() == operand.data_ptr()
        torch._C._increment_version((first, operand) if same else (first,))
    return result


# Types of arguments for which the function itself is always called; and torch's own tensors, with
# the functions of `watches_of_torch`.
_WITHOUT_FUNCTIONS: set[type] = set()
_TENSORS: dict[type, tuple[Watch, Watch, Watch, Watch]] = {}
_MOST = 1000
_RANGE = "shardmath::"  # as torch's operators are called


def _function_of(
    operand: Any, function: Any, call: Callable[..., Any], name: str
) -> Callable[..., Any] | None:
    """The function to call in place of `function` because of an argument; None for none.

    A distributed array has functions of its own, a tensor may need torch's operator, and for arrays
    of unknown libraries that speak DLPack there is a wrapper of `call`, the public function.
    """
    kind = type(operand)
    if kind not in _TENSORS:
        ours = getattr(operand, "__shardmath_functions__", None)
        if ours is not None:
            other: Callable[..., Any] | None = ours.get(function)
            return other
        if hasattr(operand, "device_mesh"):  # a DTensor of torch's
            return function_of_dtensors(function)
    if hasattr(operand, "requires_grad"):
        torch = sys.modules["torch"]
        if kind not in _TENSORS and kind in (torch.Tensor, torch.nn.Parameter):
            _TENSORS[kind] = watches_of_torch()
        wants = name and wants_operator(operand, name)
        return operator_of(name) if wants else _in_profile(function, call)
    if kind is dict:  # of arrays
        for x in operand.values():
            if type(x) not in _WITHOUT_FUNCTIONS:
                other = _function_of(x, function, call, name)
                if other is not None:
                    return other
        return None
    speaks_dlpack = hasattr(kind, "__dlpack__") and not issubclass(kind, np.ndarray)
    foreign = function_of_foreign(call, kind) if speaks_dlpack else None
    if foreign is None and len(_WITHOUT_FUNCTIONS) < _MOST:
        _WITHOUT_FUNCTIONS.add(kind)
    return foreign if name else None


def _in_profile(function: Any, call: Callable[..., Any]) -> Callable[..., Any] | None:
    """`call`, the public function, in a range of its name for torch's profiler; None where there is
    no profiler on, or this thread is in such a range already.
    """
    found = None if this_thread.in_range else range_of_profiler(_RANGE + function.__qualname__)
    if found is None:
        return None

    def ranged(*args: Any, **kwargs: Any) -> Any:
        this_thread.in_range = True
        try:
            with found:
                return call(*args, **kwargs)
        finally:
            this_thread.in_range = False

    return ranged


@lru_cache(maxsize=1)
def _again() -> Callable[..., Any] | None:
    """The compiled function that repeats calls: see direct.c. None where it was not built."""
    built = extension("shardmath.call._direct")
    return None if built is None else partial(built.again, *current.places())


def _again_after_waits() -> Callable[..., Any] | None:
    """See `waits`."""
    for wait in waits:
        wait()
    return _again()


@marked
def _is_part() -> bool:
    """Whether another collective call of this thread is on the stack.

    `this_thread.call` alone does not tell: an exception may have kept a call from resetting it.
    """
    frame = sys._getframe(1).f_back
    while frame is not None:
        if frame.f_code is _ENTRANCE:
            return True
        frame = frame.f_back
    return False


_ENTRANCE = cast(FunctionType, collective_call(_is_part)).__code__
