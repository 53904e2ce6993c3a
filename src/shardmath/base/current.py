"""Which context is current: the one piece of module state in the package.

It stands at the bottom of the layers so that geometry can ask for the number of ranks when a caller
leaves it out. The value is per thread and per task.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol


class CurrentContext(Protocol):
    """What the lower layers see of a context."""

    @property
    def rank(self) -> int:
        """The rank of the process."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...


_default: list[CurrentContext | None] = [None]
_forked: list[bool] = [False]
_stack: ContextVar[tuple[CurrentContext, ...]] = ContextVar("shardmath_contexts", default=())


def get() -> CurrentContext | None:
    """The innermost `with` context, else the default one, else None."""
    stack = _stack.get()
    return stack[-1] if stack else _default[0]


def within(context: Any) -> AbstractContextManager[Any]:
    """A manager of a `with` block in which `context` is current, if it is not so already."""
    return nullcontext() if get() is context else context


def places() -> tuple[object, object]:
    """The variable and the list that hold `with` contexts and the default one: for direct.c."""
    return _stack, _default


def default() -> CurrentContext | None:
    """The context that `initialize` made, or None."""
    return _default[0]


def set_default(context: CurrentContext | None) -> None:
    """Make `context` the default one, for every thread."""
    _default[0], _forked[0] = context, False


def set_forked() -> None:
    """Note that this process was forked off a rank, and is none, until it makes a context."""
    _forked[0] = True


def is_forked() -> bool:
    """Whether this process was forked off a rank, and has made no context of its own."""
    return _forked[0]


def override(context: CurrentContext) -> None:
    """Make `context` current until the matching `restore`."""
    _stack.set((*_stack.get(), context))


def overridden() -> tuple[CurrentContext, ...]:
    """The contexts made current by `override`, the innermost last."""
    return _stack.get()


def reset(contexts: tuple[CurrentContext, ...]) -> None:
    """Make the contexts current again that `overridden` returned."""
    _stack.set(contexts)


def restore(context: CurrentContext) -> None:
    """Undo the innermost `override`. Raises RuntimeError when that was not of `context`."""
    stack = _stack.get()
    if not stack or stack[-1] is not context:
        raise RuntimeError(
            "this context is not the innermost one that this thread has entered: leave contexts in "
            "the reverse of the order they were entered in, as nested with blocks do"
        )
    _stack.set(stack[:-1])


def forget() -> tuple[CurrentContext, ...]:
    """Make no context current, as in a process that has just been forked; return those that were.

    The caller keeps them: they belong to the parent, and must not be finalised here.
    """
    inherited = _stack.get() + tuple(filter(None, _default))
    _stack.set(())
    _default[0] = None
    return inherited
