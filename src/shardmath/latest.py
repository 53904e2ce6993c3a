"""A mapping that keeps its latest entries: what calls that come again have worked out before.

The order of entries is that of their uses alone. So mappings of several ranks that are used alike
hold the same entries.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["Latest"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Latest(Generic[K, V]):
    """At most `most` entries. When there is one more, the one goes that was used longest ago."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._entries: OrderedDict[K, tuple[V]] = OrderedDict()
        self._newest: object = None  # the entry used last is the last already: it saves a hash

    def __repr__(self) -> str:
        return f"Latest({len(self)} of at most {self.most} entries)"

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def find(self, key: K) -> V | None:
        """The value of that key, or None. This is a use of it."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry is not self._newest:
            self._entries.move_to_end(key)
            self._newest = entry
        return entry[0]

    def made(self, key: K, make: Callable[[], V]) -> V:
        """The value of that key, kept from now on if `make()` has to give it. A use of it."""
        entry = self._entries.get(key)
        if entry is None:
            return self.keep(key, make())
        if entry is not self._newest:
            self._entries.move_to_end(key)
            self._newest = entry
        return entry[0]

    def keep(self, key: K, value: V) -> V:
        """Let `key` have that value, which is returned. This is a use of it."""
        self._newest = self._entries[key] = (value,)
        self._entries.move_to_end(key)
        if len(self._entries) > self.most:
            self._drop()
        return value

    def clear(self) -> None:
        """Forget all entries."""
        self._entries.clear()
        self._newest = None

    def _drop(self) -> None:
        """Let the entry go that was used longest ago."""
        self._entries.popitem(last=False)
