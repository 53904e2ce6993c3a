"""The package's logger: INFO for starts, plans and allocations, DEBUG for each call.

Importing `logging` takes as long as a fifth of the package, and until the program has done it,
nobody can listen: a start asks `is_heard`, and does not import it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, Final, TypeVar

from shardmath.base import current
from shardmath.base.caller import caller_line
from shardmath.base.recorder import operands_of
from shardmath.base.untraced import is_loaded

if TYPE_CHECKING:
    from logging import Logger

R = TypeVar("R")

DEBUG: Final = 10  # as logging numbers its levels
INFO: Final = 20


@cache
def package_logger() -> Logger:
    """The package's logger."""
    import logging

    return logging.getLogger("shardmath")


def is_heard(level: int) -> bool:
    """Whether the program listens to the package's messages of this level."""
    return is_loaded("logging") and package_logger().isEnabledFor(level)


def logged(function: Callable[..., R]) -> Callable[..., R]:
    """`function`, each call of which is logged at DEBUG, with the time that it took."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> R:
        what, line = f"{function.__qualname__}({operands_of(args)})", caller_line()
        how, start = "raised", time.perf_counter()
        try:
            result = function(*args, **kwargs)
            how = "took"
            return result
        finally:
            took = 1e3 * (time.perf_counter() - start)
            context = current.get()
            who = "a rank" if context is None else f"rank {context.rank}"
            package_logger().debug("%s: %s, %s, %s %.3f ms", who, what, line, how, took)

    return call
