"""Groups of ranks that know where blocks of this rank's heap lie.

A group in which an operation was given up may have kernels of late ranks at work that write to what
they were told of, at any time until their processes end: that memory goes to no other array.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from shardmath.transport.base import Fence


class Groups:
    """Groups by number. Those that are not watched never write to a peer's memory."""

    def __init__(self) -> None:
        self._left: deque[tuple[int, Callable[[], bool]]] = deque()
        self._gave_up: dict[int, Callable[[], bool]] = {}
        self._ending: list[tuple[list[int], Fence]] = []  # kernels of theirs run before the fence

    def watch(self, group: int, gave_up: Callable[[], bool]) -> None:
        """`gave_up()` says whether an operation of the group did not come to its end here."""
        self._gave_up[group] = gave_up

    def leave(self, group: int, ended: Callable[[], bool]) -> None:
        """This rank has left `group`, of which nothing is awaited once `ended()`.

        Only appends to a list: the garbage collector may call it.
        """
        self._left.append((group, ended))

    def ended(self, fence: Callable[[], Fence | None]) -> list[int]:
        """The groups that have ended since this was last asked.

        One in which all went well is watched until its last kernels are done here: `fence()` is
        behind what the device does, None while none can be set.
        """
        if not self._left and not self._ending:
            return []
        left = [self._left.popleft() for _ in range(len(self._left))]
        over = [group for group, ended in left if ended()]
        self._left.extend(group for group in left if group[0] not in over)
        watched = [group for group in over if group in self._gave_up]
        last = fence() if watched else None
        if last is not None:
            self._ending.append((watched, last))
        self._ending, ending = [], self._ending
        for groups, behind in ending:
            if not behind.passed():
                self._ending.append((groups, behind))
                continue
            for group in groups:
                if not self._gave_up[group]():
                    del self._gave_up[group]
        return over

    def may_write(self, told: Iterable[int]) -> bool:
        """Whether late ranks of one of these groups may write to what they were told of."""
        return any(self._gave_up[group]() for group in told if group in self._gave_up)
