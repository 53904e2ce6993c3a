"""Functions that call a method without keeping its object alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def weakly(method: Callable[P, R]) -> Callable[P, R]:
    """A function that calls `method`, whose object somebody else keeps alive."""
    living = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = living()
        assert bound is not None, "the object is in use"
        return bound(*args, **kwargs)

    return call


def weakly_or(otherwise: R, method: Callable[P, R]) -> Callable[P, R]:
    """As `weakly`, where the object may be gone: the function then returns `otherwise`."""
    living = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = living()
        return otherwise if bound is None else bound(*args, **kwargs)

    return call
