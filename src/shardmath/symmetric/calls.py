"""Calls with which ranks run ahead: how many each has made, and which they were.

A call whose arguments are known on all ranks needs no meeting of hosts: this rank lists it in its
row of the board, and goes on. Who meets the others elsewhere compares: where a peer has listed
calls that this rank has not, it has passed the place where this rank meets, or will never come.

    rank 0   list 1 ── list 2 ── list 3 ── meet: 3 ┐
                                                   ├ they differ: rank 1 says what it called
    rank 1   list 1 ── meet: 1 ────────────────────┘

A row's words here are: the number of calls; that number at the last meeting, for even and for odd
ones; and the last WINDOW calls, by their tags. A rank is never further ahead than that, so what it
did where a peer meets can still be read there. Whoever sees the number of calls sees their tags.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shardmath.symmetric.rows import Rows

__all__ = ["LIST_BYTES", "WINDOW", "Calls"]

WINDOW = 64  # calls that a rank may be ahead of its slowest peer
_MADE, _MET, _TAGS = 0, 1, 3
LIST_BYTES = 8 * (_TAGS + WINDOW + 1)  # a multiple of 32


class Calls:
    """The calls that the ranks of `rows` have listed, as one of them sees them.

    They lie from byte `place` of each row on.
    """

    def __init__(self, rows: Rows, place: int) -> None:
        self._rows = rows
        self._first = place // 8
        self._peers = [r for r in range(len(rows.words)) if r != rows.rank]
        self._words = [rows.words[r] for r in self._peers]
        self._room = WINDOW  # calls that can be listed without another look at the peers
        self._meetings = 0

    @property
    def made(self) -> int:
        """How many this rank has listed."""
        return self._rows.words[self._rows.rank][self._first]

    def places(self, tag: int) -> tuple[int, int, int, int, tuple[int, ...]]:
        """What compiled code lists a call by: the addresses of `made` and of the tags, how many
        there are, this call's, and the addresses of the peers' `made`.
        """
        made, *peers = [
            np.frombuffer(self._rows.bytes[rank], np.uint8).ctypes.data + 8 * self._first
            for rank in (self._rows.rank, *self._peers)
        ]
        return made, made + 8 * _TAGS, WINDOW, tag, tuple(peers)

    def add(self, tag: int, wait_for_room: Callable[[int], None]) -> None:
        """List one more call.

        `wait_for_room(number)` returns when no peer has listed less than so many calls.
        """
        number = self.made + 1
        if number > self._room:
            if self._listed() + WINDOW < number:
                wait_for_room(number - WINDOW)
            self._room = self._listed() + WINDOW
        first = self._first
        self._rows.words[self._rows.rank][first + _TAGS + number % WINDOW] = tag
        self._rows.publish(first + _MADE, number)

    def _listed(self) -> int:
        """The calls that all peers have listed."""
        place = self._first + _MADE
        return min([words[place] for words in self._words], default=self.made)

    def missing(self, number: int) -> list[int]:
        """The peers that have listed less than so many calls."""
        place = self._first + _MADE
        return [r for r in self._peers if self._rows.words[r][place] < number]

    def meet(self) -> None:
        """Tell the peers how many calls this rank has made, before a round of an exchange."""
        self._meetings += 1
        self._rows.words[self._rows.rank][self._met] = self.made

    @property
    def _met(self) -> int:
        return self._first + _MET + (self._meetings & 1)

    def differ(self) -> bool:
        """Whether ranks meet that have made different numbers of calls: after the exchange."""
        place, made = self._met, self.made
        return any(words[place] != made for words in self._words)

    def ahead(self, ranks: Sequence[int] | None = None) -> list[int]:
        """The peers, all or of some ranks, that have listed a call that this rank has not."""
        return self._with(lambda number: number > self.made, ranks)

    def behind(self, ranks: Sequence[int] | None = None) -> list[int]:
        """The peers that have not listed a call that this rank has."""
        return self._with(lambda number: number < self.made, ranks)

    def _with(self, wanted: Callable[[int], bool], ranks: Sequence[int] | None) -> list[int]:
        place = self._first + _MADE
        some = self._peers if ranks is None else ranks
        return [r for r in some if wanted(self._rows.words[r][place])]

    def next_of(self, rank: int) -> int:
        """The tag of the call of a peer that is ahead with which it has passed this rank."""
        return self._rows.words[rank][self._first + _TAGS + (self.made + 1) % WINDOW]
