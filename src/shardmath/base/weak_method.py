"""Methods that outlive their objects, which they do not keep."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def weakly(method: Callable[P, R]) -> Callable[P, R]:
    """A function that calls a method, whose object it does not keep but must be there."""
    living = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = living()
        assert bound is not None, "the object is in use"
        return bound(*args, **kwargs)

    return call


def weakly_or(otherwise: R, method: Callable[P, R]) -> Callable[P, R]:
    """As `weakly`, of an object that may have gone: the function then returns `otherwise`."""
    living = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = living()
        return otherwise if bound is None else bound(*args, **kwargs)

    return call
