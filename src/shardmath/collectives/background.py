"""Collectives that run while the program goes on, and the handles on which it waits for them.

On cores a thread of each context makes these calls, one after the other in the order in which they
were given. It makes them in another context of the same ranks and memory, so that they do not mix
with the calls of the program.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from shardmath.base.collective_call import require_function
from shardmath.base.untraced import unrecorded
from shardmath.call.agreement import raise_on_all_ranks
from shardmath.collectives.operand import context_of

if TYPE_CHECKING:
    from shardmath.context.context import DistributedContext


class Work:
    """A collective under way. Its operand and its `out` belong to it until it is completed."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def wait(self, timeout: float | None = None) -> Any:
        """The result of the call, once there is one. Raises what the call raised.

        Raises TimeoutError after `timeout` seconds: the call goes on, and may be waited for again.
        """
        return self._future.result(timeout)

    def is_completed(self) -> bool:
        """Whether the call has ended, with a result or with an exception."""
        return self._future.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the call raised, None if it has a result. Waits as `wait` does."""
        return self._future.exception(timeout)


class _Background:
    """The thread of a context, and the context in which it makes calls. Collective.

    The new thread makes that context, and the caller waits for it, so that it makes no call of its
    own meanwhile.
    """

    def __init__(self, context: DistributedContext) -> None:
        self.thread = ThreadPoolExecutor(1, f"shardmath rank {context.rank}")
        made = self.thread.submit(context.split, 0, context.rank).result()
        assert made is not None, "every rank takes part"
        self.context = made


def start(
    function: Callable[..., Any], context: DistributedContext | None, x: Any, **words: Any
) -> Work:
    """`function(x, context=context, **words)`, under way. Collective.

    On GPUs the call is put on the current stream, as every call is, before this returns.
    """
    context = context_of(function.__name__, context)
    require_function()  # compiled code, which repeats calls, does not know threads
    if context.device_id == "cpu":
        background = _background_of(context)
        call = partial(function, x, context=background.context, **words)
        return Work(background.thread.submit(unrecorded, call))  # a thread has its own grad mode
    made: Future[Any] = Future()
    made.set_result(function(x, context=context, **words))
    return Work(made)


def refuse(operation: str, context: DistributedContext | None, mistake: Exception) -> NoReturn:
    """Raise `mistake` on all ranks in place of a call that was to go on. Collective.

    Ranks that start the call raise it where they wait for it.
    """
    context = context_of(operation, context)
    if context.device_id == "cpu":
        background = _background_of(context)
        background.thread.submit(
            raise_on_all_ranks, background.context, operation, mistake
        ).result()
    raise_on_all_ranks(context, operation, mistake)


def _background_of(context: DistributedContext) -> _Background:
    return context.cache("background", lambda: _Background(context))
