"""Arrivals at rounds and barriers, which a rank that has waited too long takes back.

A word of a rank's row is 2n where it has arrived for the n-th time, and 2n-1 where it has taken
that back.

Either all ranks come out of a round or a barrier, or none does: what a rank that has given up lets
its peers read may change, and who comes late must not take it for what it was. So

    a rank comes out when it has seen every peer arrive, and then, looking once more, has seen that
    none had taken it back;
    a rank whose time has passed takes its own arrival back, lets that become visible, and looks
    once more: where every peer has arrived by then, also one that is just taking it back, it
    arrives again, and waits for those that do the same; else it fails.

Proof. Say that X comes out, and let G be the first that fails. X's second look saw G's arrival, so
G took it back after that look; all peers had arrived before that look, and arrivals stay visible
as 2n or 2n-1. So when G looked, it saw that all had arrived, and nobody who had failed: it did not
fail. A store of X's that G's look does not see is younger than what G took back, which X then sees.

This holds among ranks that share the page, and between hosts where a message takes less than
`_FAR_DOUBT` seconds. It cannot hold where a rank is interrupted, stopped or killed between the two
steps of giving up: some peers may then come out where others raise, and all hear of it in their
next operation.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from shardmath.symmetric.rows import ORDERED, Rows

__all__ = ["Arrivals"]

_DOUBT = 1e-3  # seconds in which a word that is taken back is seen by cores that load it
_FAR_DOUBT = 0.05  # the same between hosts, there and back


class Arrivals:
    """The arrivals of the ranks of `rows`, as one of them sees them."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._peers = [r for r in range(len(rows.words)) if r != rows.rank]

    def missing(self, word: int, target: int) -> list[int]:
        """The peers whose `word` is less than `target`."""
        words = self._rows.words
        return [r for r in self._peers if words[r][word] < target]

    def second_look(self, word: int, target: int) -> list[int]:
        """The peers whose `word` is still less than `target`, after what `missing` has seen."""
        if self._rows.needs_polling:
            self._rows.poll()
        if not ORDERED:
            os.sched_yield()
        return self.missing(word, target)

    def come_after_all(self, word: int, target: int, state: int) -> bool:
        """Take this rank's arrival back, and look once more who has come.

        Where all have, announces the arrival again, and returns True. Word `state` of a row is 0
        until its rank has failed.
        """
        self._rows.publish(word, target - 1)
        if self._rows.needs_polling:
            deadline = time.monotonic() + _FAR_DOUBT
            while time.monotonic() < deadline:
                self._rows.poll()
                time.sleep(_DOUBT)
        else:
            time.sleep(_DOUBT)
        running = [words[state] == 0 for words in self._rows.words]  # first: it never comes back
        came = all(
            words[word] >= (target - 1 if runs else target)
            for words, runs in zip(self._rows.words, running, strict=True)
        )
        if came:
            self._rows.publish(word, target)
        return came

    def polling(self, arrived: Callable[[], bool]) -> Callable[[], bool]:
        """`arrived`, after messages of ranks on other hosts have been taken in."""
        if not self._rows.needs_polling:
            return arrived
        poll = self._rows.poll

        def polled() -> bool:
            poll()
            return arrived()

        return polled
