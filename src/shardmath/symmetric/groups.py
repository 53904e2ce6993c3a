"""Groups of ranks that know where blocks of this rank's heap lie, and whose kernels write there.

After an operation of a group was given up, kernels of late ranks may still write to blocks that
they know of, and the last signals of kernels arrive when nobody waits for them any more. Such
memory goes to no other array before the group has ended: every other rank's GPU has done what it
was asked to do before the rank left the group, or the rank's process has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable


class Groups:
    """Groups by number. Groups that are not watched never write to a peer's memory."""

    def __init__(self) -> None:
        self._left: deque[tuple[int, Callable[[], bool]]] = deque()
        self._watched: dict[int, tuple[Callable[[], bool], list[object]]] = {}
        self._anywhere: dict[int, Callable[[], bool]] = {}

    def watch(self, group: int, gave_up: Callable[[], bool]) -> None:
        """Watch `group`; `gave_up()` says whether an operation of it was given up here."""
        self._watched[group] = gave_up, []

    def watch_everywhere(self, group: int, failed: Callable[[], bool]) -> None:
        """As `watch`, for a group whose kernels write anywhere on this heap, at places that they
        tell each other; late kernels may do so once the group has `failed()`.
        """
        self._anywhere[group] = failed

    def keep(self, group: int, memory: object) -> None:
        """Keep memory until a watched group has ended. The garbage collector may call it."""
        if group in self._watched:
            self._watched[group][1].append(memory)

    def leave(self, group: int, ended: Callable[[], bool]) -> None:
        """Note that this rank has left `group`, whose kernels are done once `ended()`.

        Only appends to a list: the garbage collector may call it.
        """
        self._left.append((group, ended))

    def ended(self) -> set[int]:
        """The groups that this rank has left and that have ended; see `forget`."""
        return {group for group, ended in tuple(self._left) if ended()} if self._left else set()

    def forget(self, groups: Collection[int]) -> None:
        """Drop what is kept for groups that have ended, and stop watching them."""
        for group in groups:
            self._watched.pop(group, None)
            self._anywhere.pop(group, None)
        for left in tuple(self._left):
            if left[0] in groups:
                self._left.remove(left)

    def forget_all(self) -> None:
        """Drop what is kept for any group: the heap is no longer used."""
        self._watched.clear()
        self._anywhere.clear()

    def may_write(self, told: Iterable[int]) -> bool:
        """Whether late kernels may write to a block that these groups were `told` of."""
        return any(failed() for failed in self._anywhere.values()) or any(
            self._watched[group][0]() for group in told if group in self._watched
        )
