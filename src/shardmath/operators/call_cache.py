"""Calls with equal arguments are described once, and remember what their last execution found.

A description depends on the arguments alone, so equal arguments make the same one. What the last
execution found is a guess for the next, which lets a rank prepare it before the ranks agree.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar

from shardmath.call.agreement import HashedSpec
from shardmath.context import Context
from shardmath.lru_cache import LRUCache

__all__ = ["CachedCall", "cached_call"]

_CACHE = partial(LRUCache[Hashable, Any], 128)  # calls of one kind in a context


class CachedCall:
    """A call as it was described, also for agreement: `spec`. Subclasses keep what was found."""

    def __init__(self, description: Hashable) -> None:
        self.description: Any = description
        self.spec = HashedSpec(description)


Cached = TypeVar("Cached", bound=CachedCall)


def cached_call(
    context: Context, kind: type[Cached], arguments: Hashable, describe: Callable[[], Hashable]
) -> Cached:
    """The same object for all calls of a kind with equal `arguments`. Local.

    What has no hash is described each time, and found by its description. Raises what `describe`
    does.
    """
    calls: LRUCache[Hashable, Cached] = context.cache(f"calls: {kind.__qualname__}", _CACHE)
    try:
        found = calls.find(arguments)
    except TypeError:
        found, arguments = None, None
    if found is None:
        description = describe()
        found = calls.made(description, lambda: kind(description))
        if arguments is not None:
            calls.keep(arguments, found)
    return found
