"""Collectives that run while the program goes on, and the handles on which it waits for them.

On cores a thread of each context makes these calls, one after the other in the order in which they
were given. It makes them in another context of the same ranks and memory, so that they do not mix
with the calls of the program.

An exception that leaves a call while it hands its work over leaves open whether the thread has the
work. So it fails the thread's context, after the calls that were given before: all ranks hear of it
where they wait.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Generic, NoReturn

from shardmath.arrays import Array
from shardmath.base.caller import caller_line
from shardmath.base.collective_call import CollectiveCall, require_function, this_thread
from shardmath.base.untraced import unrecorded
from shardmath.base.workers import Task, Workers
from shardmath.call.agreement import raise_on_all_ranks
from shardmath.collectives.operand import context_of
from shardmath.context.context import open_contexts

if TYPE_CHECKING:
    from shardmath.context.context import DistributedContext

_NAME = "background"  # under which a context keeps its _Background


class Work(Generic[Array]):
    """A collective under way. Its operand and its `out` belong to it until it is completed."""

    def __init__(self, task: Task[Array]) -> None:
        self._task = task

    def wait(self, timeout: float | None = None) -> Array:
        """The result of the call, once there is one. Raises what the call raised.

        Raises TimeoutError after `timeout` seconds: the call goes on, and may be waited for again.
        """
        return self._task.result(timeout)

    def is_completed(self) -> bool:
        """Whether the call has ended, with a result or with an exception."""
        return self._task.ended

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the call raised, None if it has a result. Waits as `wait` does."""
        if not self._task.wait(timeout):
            raise TimeoutError(f"the call has not ended within {timeout} s")
        return self._task.error


class _Background:
    """The thread of a context, and the context in which it makes calls. Collective."""

    def __init__(self, context: DistributedContext) -> None:
        # Else a split of the program's on another rank would be taken for the one that follows.
        context.agree("a first call with async_op", lambda: None, lambda _: None)
        made = context.split(0, context.rank)
        assert made is not None, "every rank has given a color"
        self.context = made
        self._thread = Workers(1)
        self._has_board = False  # whether the context's board is the thread's
        self._call: CollectiveCall | None = None  # the last that has given work

    def start(self, function: Callable[[], Array]) -> Work[Array]:
        """`function()`, which makes one call in `context`, on the thread."""
        call, last = this_thread.call, self._call
        if last is not None and last is not call and not last.finished:
            self.interrupted(RuntimeError("the call before it was interrupted"), caller_line())
        if call is not None:
            call.boards.append(self)
        if not self._has_board:
            self.context.board.hand_over()
            self._has_board = True
        self._call = call
        task = Task(function)
        self._thread.give(task)
        return Work(task)

    def interrupted(self, error: BaseException, line: str) -> None:
        """See `collective_call.Interruptible`."""
        self._thread.give(Task(partial(self.context.board.interrupted, error, line)))

    def finish(self) -> None:
        """Wait until all calls that were given have ended. Local."""
        last = Task(lambda: None)
        self._thread.give(last)
        last.wait()


def start(
    function: Callable[..., Any], context: DistributedContext | None, x: Any, **words: Any
) -> Work[Any]:
    """`function(x, context=context, **words)`, under way. Collective.

    On GPUs the call is put on the current stream, as every call is, before this returns.
    """
    context = context_of(function.__name__, context)
    require_function()  # compiled code, which repeats calls, does not know threads
    if context.device_id == "cpu":
        background = _background_of(context)
        call = partial(function, x, context=background.context, **words)
        return background.start(partial(unrecorded, call))  # a thread has its own grad mode
    made = Task(partial(function, x, context=context, **words))
    made.perform()
    made.result()
    return Work(made)


def refuse(operation: str, context: DistributedContext | None, mistake: Exception) -> NoReturn:
    """Raise `mistake` on all ranks in place of a call that was to go on. Collective.

    Ranks that start the call raise it where they wait for it.
    """
    context = context_of(operation, context)
    if context.device_id == "cpu":
        background = _background_of(context)
        refused = partial(raise_on_all_ranks, background.context, operation, mistake)
        background.start(refused).wait()
    raise_on_all_ranks(context, operation, mistake)


def _background_of(context: DistributedContext) -> _Background:
    _finish_at_exit()
    return context.cache(_NAME, lambda: _Background(context))


@cache
def _finish_at_exit() -> None:
    """Once per process: a program that ends makes the calls that it has started."""
    atexit.register(_finish)


def _finish() -> None:
    if getattr(sys, "last_value", None) is None:  # else peers are told at once that it has crashed
        for context in open_contexts():
            background = context.caches.get(_NAME)
            if background is not None:
                background.finish()
