"""A cache of calls by their arguments, so that equal calls are described once.

A description depends on the arguments alone. With it are kept the form of the last new results: the
next result of an equal call is allocated in that form before the ranks agree, and if they then
agree on another one, allocated again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from shardmath.context import Context
from shardmath.lru_cache import LRUCache
from shardmath.operators.fft.problem import Description
from shardmath.planning import Said
from shardmath.symmetric.device_array import Blank

__all__ = ["ArrayForm", "CachedCall", "cached_call"]

_CALLS = partial(LRUCache[Any, Any], 128)
_MAX_BLANKS = 16

ArrayForm = tuple[tuple[int, ...], str, Literal["C", "F"]]  # shape, dtype and order of a new array


@dataclass(eq=False)
class CachedCall:
    """A description, also as it is `said` in agreement; and the forms of results, by operand."""

    description: Description
    said: Said = field(init=False)
    blanks: LRUCache[Hashable, tuple[ArrayForm, Blank]] = field(
        init=False, repr=False, default_factory=lambda: LRUCache(_MAX_BLANKS)
    )

    def __post_init__(self) -> None:
        self.said = Said(self.description)


def cached_call(
    context: Context, given: Hashable, describe: Callable[[], Description]
) -> CachedCall:
    """The same object for all calls with equal arguments, which are `given`.

    Arguments without a hash are described each time, and looked up by their description. Raises
    what `describe` does.
    """
    known: LRUCache[Hashable, CachedCall] = context.cache("fft calls", _CALLS)
    try:
        found = known.find(given)
    except TypeError:
        found, given = None, None
    if found is None:
        description = describe()
        found = known.made(description, lambda: CachedCall(description))
        if given is not None:
            known.keep(given, found)
    return found
