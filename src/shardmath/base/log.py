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


def told(function: Callable[..., R]) -> Callable[..., R]:
    """`function`, whose call is told of at DEBUG."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> R:
        what, line, start = f"{function.__qualname__}({operands_of(args)})", caller_line(), _now()
        how = "raised"
        try:
            result = function(*args, **kwargs)
            how = "took"
            return result
        finally:
            context = current.get()
            who = "a rank" if context is None else f"rank {context.rank}"
            LOGGER.debug("%s: %s, %s, %s %.3f ms", who, what, line, how, 1e3 * (_now() - start))

    return call


def _now() -> float:
    return time.perf_counter()
