"""The package's logger: INFO for starts, plans and allocations, DEBUG for each call."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from shardmath.base import current
from shardmath.base.caller import caller_line
from shardmath.base.recorder import operands_of

R = TypeVar("R")

LOGGER = logging.getLogger("shardmath")


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
            LOGGER.debug("%s: %s, %s, %s %.3f ms", who, what, line, how, took)

    return call
