"""How much a call does, counted: the same on every machine, whatever else runs there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["calls_before", "lines_of"]

WAITING = tuple(f"symmetric/{name}.py" for name in ("board", "peers", "rows", "waiting"))
WAITING += ("/liveness.py",)
COMPILING = "is_watched"  # is asked where torch's compiler is loaded, as it is by some tests


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


def calls_before(last: str, call: Callable[[], Any]) -> list[str]:
    """The names of the Python functions that `call` calls until it calls the one named `last`.

    All that it calls where compiled code does what that would. What only waits for other ranks is
    left out: that is done more or less often.
    """
    names: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_qualname
        if event == "call" and name != COMPILING and not frame.f_code.co_filename.endswith(WAITING):
            names.append(name)
            if name == last:
                sys.setprofile(before)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return names
