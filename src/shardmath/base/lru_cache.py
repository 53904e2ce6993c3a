"""A mapping that keeps its latest entries: what earlier calls have worked out.

Which entries stay depends on the order of their uses alone, so ranks that use their mappings alike
hold the same entries.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LRUCache(Generic[K, V]):
    """At most `most` entries. Before there are more, the quarter used longest ago is dropped."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._uses = 0
        self._entries: dict[K, list[Any]] = {}  # value, and number of its last use: hits hash once

    def __repr__(self) -> str:
        return f"LRUCache({len(self)} of at most {self.most} entries)"

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def find(self, key: K) -> V | None:
        """The value of `key`, or None. Counts as a use."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry[1] = self._uses = self._uses + 1
        value: V = entry[0]
        return value

    def made(self, key: K, make: Callable[[], V]) -> V:
        """The value of `key`, which `make()` gives the first time. Counts as a use."""
        entry = self._entries.get(key)
        if entry is None:
            return self.keep(key, make())
        entry[1] = self._uses = self._uses + 1
        value: V = entry[0]
        return value

    def keep(self, key: K, value: V) -> V:
        """Keep `value` for `key`, and return it. Counts as a use."""
        if len(self._entries) >= self.most and key not in self._entries:
            self._drop(self._oldest()[: max(1, self.most // 4)])
        self._uses += 1
        self._entries[key] = [value, self._uses]
        return value

    def entry(self, key: K) -> list[Any]:
        """The value of a key that is here, and the number of its last use. Does not count as a use.

        Compiled code counts one by adding 1 to `_uses` and writing the sum into the entry.
        """
        return self._entries[key]

    def values(self) -> list[V]:
        """The values of all entries. Does not count as a use."""
        return [entry[0] for entry in self._entries.values()]

    def clear(self) -> None:
        """Forget all entries."""
        self._entries.clear()

    def _oldest(self) -> list[K]:
        """The keys of entries that may be dropped, the one used longest ago first."""
        return sorted(self._entries, key=lambda key: self._entries[key][1])

    def _drop(self, keys: list[K]) -> None:
        """Drop the entries of these keys."""
        for key in keys:
            del self._entries[key]
