"""What `torch.compile` does not look into: calls that share memory with other processes.

Compiled code is cut at such a call, which then runs as it is, between the graphs of what is around
it. Were it traced, parts of it would run on tensors that have no memory, after the ranks have
agreed. torch is not imported for this: before it is, nothing is compiled.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import ParamSpec, TypeVar

__all__ = ["untraced", "untraced_methods"]

P = ParamSpec("P")
R = TypeVar("R")
Class = TypeVar("Class", bound=type)

_SPECIAL = ("__init__", "__enter__", "__exit__", "__call__")


def untraced(call: Callable[P, R]) -> Callable[P, R]:
    """`call`, which `torch.compile` leaves as it is, together with all that it calls."""
    skipped: list[Callable[P, R]] = []

    @functools.wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if not skipped:  # once it is, the compiler need not look at the table of all modules
            if "torch._dynamo" not in sys.modules:  # nothing is compiled
                return call(*args, **kwargs)
            skipped.append(sys.modules["torch"].compiler.disable(call))
        return skipped[0](*args, **kwargs)

    vars(called)["_torchdynamo_disable"] = True  # what the compiler looks for before it goes in
    return called


def untraced_methods(kind: Class) -> Class:
    """The class `kind`, whose public methods, and those that make and enter it, are `untraced`."""
    for name, member in list(vars(kind).items()):
        if isinstance(member, FunctionType) and (not name.startswith("_") or name in _SPECIAL):
            setattr(kind, name, untraced(member))
    return kind
