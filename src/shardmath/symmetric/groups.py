"""What a heap knows of the groups that this rank has told where its blocks lie.

A group in which an operation was given up may have kernels of late ranks at work that write to what
they were told of, at any time until their processes end: that memory goes to no other array.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

__all__ = ["Groups"]


class Groups:
    """Groups by number. Those that are not watched never write to a peer's memory."""

    def __init__(self) -> None:
        self._left: deque[tuple[int, Callable[[], bool]]] = deque()
        self._gave_up: dict[int, Callable[[], bool]] = {}

    def watch(self, group: int, gave_up: Callable[[], bool]) -> None:
        """`gave_up()` says whether an operation of the group did not come to its end here."""
        self._gave_up[group] = gave_up

    def leave(self, group: int, ended: Callable[[], bool]) -> None:
        """This rank has left `group`, of which nothing is awaited once `ended()`.

        Only appends to a list: the garbage collector may call it.
        """
        self._left.append((group, ended))

    def ended(self) -> list[int]:
        """The groups that have ended since this was last asked."""
        found = []
        for _ in range(len(self._left)):
            group, ended = self._left.popleft()
            if ended():
                found.append(group)
                if not self._gave_up.get(group, _never)():
                    self._gave_up.pop(group, None)
            else:
                self._left.append((group, ended))
        return found

    def may_write(self, told: Iterable[int]) -> bool:
        """Whether late ranks of one of these groups may write to what they were told of."""
        return any(self._gave_up[group]() for group in told if group in self._gave_up)


def _never() -> bool:
    return False
