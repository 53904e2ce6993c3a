"""Calls with which ranks run ahead: how many each rank has made, and which they were.

A call whose arguments are known on all ranks needs no exchange: a rank lists it in its row of the
board, and goes on. Where ranks do meet, in an exchange, they compare: a peer that has listed calls
that this rank has not listed has passed the place of the exchange, or will never come there.

    rank 0   list 1 ── list 2 ── list 3 ── meet: 3 ┐
                                                   ├ they differ: rank 1 says what it called
    rank 1   list 1 ── meet: 1 ────────────────────┘

A row has the number of calls; that number at the last meeting, for even and for odd meetings; and
for each of the last WINDOW calls its tag, and up to MOST_WORDS words that peers cannot know, such
as how much this rank sends. A rank is always less than WINDOW calls ahead, so the call that it made
in place of a peer's meeting, or of the last call that a peer has listed, can still be read there. A
rank that sees the number of calls also sees what is listed of them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from shardmath.symmetric.rows import CALLS, MOST_WORDS, TAGS, WINDOW, WORD, Rows

# Words of a row.
_MADE = CALLS // WORD
_MET = _MADE + 1
_TAGS = _MADE + TAGS
_WORDS = _TAGS + WINDOW


class Calls:
    """The calls that the ranks of `rows` have listed, as one of them sees them.

    `explain`: see `Board.let_run_ahead`.
    """

    def __init__(
        self, rows: Rows, explain: Callable[[Mapping[int, int | None]], Exception]
    ) -> None:
        self.explain = explain
        self._rows = rows
        self._own = rows.words[rows.rank]
        self._peers = rows.peers
        self._words = [rows.words[r] for r in self._peers]
        self._room = WINDOW  # calls that can be listed without another look at the peers
        self._meetings = 0

    @property
    def made(self) -> int:
        """The number of calls that this rank has listed."""
        return self._own[_MADE]

    def places(
        self, tag: int, words: Sequence[int]
    ) -> tuple[int, int, int, int, int, bytes, tuple[int, ...]]:
        """What compiled code needs to list a call: the addresses of `made`, of the tags and of the
        words; the number of tags; the call's tag and words; the addresses of the peers' `made`.
        """
        made, *peers = [
            np.frombuffer(self._rows.bytes[rank], np.uint8).ctypes.data + CALLS
            for rank in (self._rows.rank, *self._peers)
        ]
        tags, listed = (made + WORD * (word - _MADE) for word in (_TAGS, _WORDS))
        return made, tags, listed, WINDOW, tag, packed(words), tuple(peers)

    def add(
        self, tag: int, wait_for_room: Callable[[int], None], words: Sequence[int] = ()
    ) -> None:
        """List one more call.

        `wait_for_room(number)` returns when every peer has listed at least `number` calls.
        """
        number = self.made + 1
        if number >= self._room:
            if self._listed() + WINDOW <= number:
                wait_for_room(number + 1 - WINDOW)
            self._room = self._listed() + WINDOW
        self._own[_TAGS + number % WINDOW] = tag
        if words:
            self._rows.write(WORD * _first_word(number), packed(words))
        self._rows.publish(_MADE, number)

    def tags(self) -> dict[int, int]:
        """By rank, the tag of the call with the number of this rank's last one.

        To be called once all have listed it, as `words`, and before this rank lists another.
        """
        place = _TAGS + self.made % WINDOW
        return {rank: words[place] for rank, words in enumerate(self._rows.words)}

    def words(self, count: int) -> list[tuple[int, ...]]:
        """By rank, the first `count` words of the call with the number of this rank's last one."""
        return [self._words_of(rank, self.made, count) for rank in range(self._rows.size)]

    def _listed(self) -> int:
        """The number of calls that all peers have listed."""
        return min([words[_MADE] for words in self._words], default=self.made)

    def missing(self, number: int) -> list[int]:
        """The peers that have listed fewer than `number` calls."""
        return [r for r in self._peers if self._rows.words[r][_MADE] < number]

    def meet(self) -> None:
        """Tell the peers how many calls this rank has made, before a round of an exchange."""
        self._meetings += 1
        self._own[self._met] = self.made

    @property
    def _met(self) -> int:
        return _MET + (self._meetings & 1)

    def differ(self) -> bool:
        """After an exchange: whether the ranks have met after different numbers of calls."""
        place, made = self._met, self.made
        return any(words[place] != made for words in self._words)

    def ahead(self, ranks: Sequence[int] | None = None) -> list[int]:
        """The peers, or those among `ranks`, that have listed a call that this rank has not."""
        return self._with(lambda number: number > self.made, ranks)

    def behind(self, ranks: Sequence[int] | None = None) -> list[int]:
        """The peers, or those among `ranks`, that have not listed a call that this rank has."""
        return self._with(lambda number: number < self.made, ranks)

    def _with(self, wanted: Callable[[int], bool], ranks: Sequence[int] | None) -> list[int]:
        some = self._peers if ranks is None else ranks
        return [r for r in some if wanted(self._rows.words[r][_MADE])]

    def next_of(self, rank: int) -> int:
        """The tag of the call with which `rank`, which is ahead, has passed this one."""
        return self._rows.words[rank][_TAGS + (self.made + 1) % WINDOW]

    def next_words_of(self, rank: int, count: int) -> tuple[int, ...]:
        """The first `count` words of the call that `next_of` names."""
        return self._words_of(rank, self.made + 1, count)

    def _words_of(self, rank: int, number: int, count: int) -> tuple[int, ...]:
        first, words = _first_word(number), self._rows.words[rank]
        return tuple([words[place] for place in range(first, first + count)])


def _first_word(number: int) -> int:
    """The place in a row of the words that are listed with a call of that number."""
    return _WORDS + number % WINDOW * MOST_WORDS


def packed(words: Sequence[int]) -> bytes:
    """The bytes of words in a row."""
    assert len(words) <= MOST_WORDS, words
    return struct.pack(f"={len(words)}Q", *words)
