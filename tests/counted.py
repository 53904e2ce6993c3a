"""How much a call does, counted: the same on every machine, whatever else runs there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["lines_of"]


def lines_of(call: Callable[[], Any]) -> tuple[Any, int]:
    """What `call` returns, and how many lines of Python it ran; one in a loop counts each time."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        result = call()
    finally:
        sys.settrace(before)
    return result, count
