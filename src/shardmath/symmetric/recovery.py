"""The agreement of the remaining ranks, after a failure, on who goes on; on the failed board.

    rank 0   ask 1 ──┐                       ┌─ decide 1: ranks 0 and 2
    rank 1   (dead)  ├─ all have asked, left ┤
    rank 2   ask 1 ──┘  or died              └─ read it

One rank decides, the first that has asked, since ranks may see a death at different times. A rank
that asks again, because another did not come, or because an exception has taken it out of its last
recovery, asks with a higher number, and ranks that still wait join it there. Numbers only rise.
"""

from __future__ import annotations

from collections.abc import Callable

from shardmath.errors import RankFailure
from shardmath.symmetric.rows import DECISION, MAIL, RECOVERY, Rows


class Recovery:
    """One rank's part in a recovery of a board.

    Words of the `rows` say which number each rank has last asked for and decided; the decision, a
    bit for each rank that goes on, stands in place of its mail. `gone()` are the ranks that have
    died or left; `wait(awaited)` returns when `awaited()` is empty.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        gone: Callable[[], set[int]],
        wait: Callable[[Callable[[], list[int]]], None],
    ) -> None:
        self._rows = rows
        self._number = rows.words[rows.rank][RECOVERY]  # the last that this rank has asked for
        self._ranks = range(rows.size)
        self._gone = gone
        self._wait = wait

    def survivors(self) -> list[int]:
        """The ranks that go on, this one among them; equal on all of them. Collective.

        Raises as `wait` for ranks that do not come, and RankFailure where the others have gone on
        without this rank. It can be called again after either.
        """
        self._number += 1
        while True:
            self._number = max(self._number, self._highest())
            self._rows.publish(RECOVERY, self._number)
            self._wait(self._silent)
            gone = self._gone()
            asked = [r for r in self._ranks if r not in gone and self._has(RECOVERY, r)]
            while not self._is_overtaken():
                decided = [r for r in self._ranks if self._has(DECISION, r)]
                first = (decided or asked)[0]
                if first == self._rows.rank and not decided:
                    mask = sum(1 << rank for rank in asked)
                    self._rows.write(MAIL, mask.to_bytes(self._mask_bytes, "little"))
                    self._rows.publish(DECISION, self._number)
                self._wait(lambda first=first: self._undecided(first))  # type: ignore[misc]
                if self._has(DECISION, first):
                    return self._decision_of(first)
                asked.remove(first)  # it died before it could decide

    def _has(self, word: int, rank: int) -> bool:
        """Whether `rank` has asked for this recovery, or decided it, by the `word` for that."""
        return self._rows.words[rank][word] >= self._number

    def _highest(self) -> int:
        return max(words[RECOVERY] for words in self._rows.words)

    def _is_overtaken(self) -> bool:
        """Whether a rank has asked again since."""
        return self._highest() > self._number

    def _silent(self) -> list[int]:
        """The living ranks that have not asked; none once a rank has asked again."""
        if self._is_overtaken():
            return []
        late = [rank for rank in self._ranks if not self._has(RECOVERY, rank)]
        return [rank for rank in late if rank not in self._gone()] if late else late

    def _undecided(self, first: int) -> list[int]:
        """`first`, while it lives and its decision is awaited."""
        if self._has(DECISION, first) or self._is_overtaken() or first in self._gone():
            return []
        return [first]

    def _decision_of(self, rank: int) -> list[int]:
        data = self._rows.bytes[rank][MAIL : MAIL + self._mask_bytes].tobytes()
        mask, own = int.from_bytes(data, "little"), self._rows.rank
        survivors = [rank for rank in self._ranks if mask >> rank & 1]
        if own not in survivors:
            raise RankFailure(f"rank {own}: the other ranks went on without it", survivors)
        return survivors

    @property
    def _mask_bytes(self) -> int:
        return -(-len(self._ranks) // 8)
