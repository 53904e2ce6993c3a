"""The state of a board's ranks: which run, have left, have given up or have died.

A rank writes into its row that it leaves or gives up; the system knows whether its process has
ended. The kernels of a rank may run on after it has left the group: a word of the row says when
they have ended, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from shardmath.errors import CollectiveMismatch, HeapExhausted, OpTimeout, RankFailure
from shardmath.group.liveness import PeerWatch
from shardmath.symmetric.messages import AFTER_FAILURE, RankNames, Reason
from shardmath.symmetric.rows import (
    ENDED,
    EXCHANGE,
    FAILED,
    GONE,
    KERNELS,
    LEFT,
    MAIL,
    MISMATCHED,
    REASON,
    REFUSED,
    RUNNING,
    SILENT,
    STATE,
    Rows,
)


class Peers:
    """The ranks of a board, as one of them sees them. Nothing here waits.

    `watch` is the watch over their processes, in which rank r has the number `numbers[r]`.
    """

    def __init__(
        self, rows: Rows, names: RankNames, watch: PeerWatch | None, numbers: Sequence[int]
    ) -> None:
        self.watch = watch
        self._rows = rows
        self._words = rows.words
        self._names = names
        self._numbers = list(numbers)
        # The error that all ranks are to raise in the same words, once this one knows of it.
        self.verdict: Exception | None = None

    def _ended(self) -> set[int]:
        """The ranks whose process has ended."""
        ended = self.watch.dead() if self.watch is not None else frozenset()
        return {rank for rank, number in enumerate(self._numbers) if number in ended}

    def dead(self) -> list[int]:
        """The ranks whose process has ended without leaving."""
        return [rank for rank in sorted(self._ended()) if self._words[rank][STATE] == RUNNING]

    def left(self) -> set[int]:
        """The peers that have said that they leave."""
        self._rows.receive()
        words = self._words
        return {r for r in self._rows.peers if words[r][STATE] == LEFT or words[r][STATE] & GONE}

    def gone(self) -> set[int]:
        """The peers that have left, or whose process has ended, whatever they did before."""
        return self.left() | self._ended()

    def _state(self, rank: int) -> int:
        """The state of a rank, or the one before it was gone."""
        return self._words[rank][STATE] & ~GONE

    def none_runs(self) -> bool:
        """Whether every rank, this one included, has left, has given up or is dead."""
        self._rows.poll()
        running = {rank for rank, words in enumerate(self._words) if words[STATE] == RUNNING}
        return not running or running <= self._ended()

    def is_ahead(self, rank: int) -> bool:
        """Whether `rank` has published a round of exchange that this rank has not."""
        return self._words[rank][EXCHANGE] > self._words[self._rows.rank][EXCHANGE]

    # -- what this rank says -----------------------------------------------------------------------

    def refuse(self, board: str, why: str) -> None:
        """Tell the peers that this rank cannot have the board of that name."""
        self._rows.write(REASON, Reason(why).pack())
        self._rows.publish(REFUSED, _digest(board))

    def silence_kernels(self) -> None:
        """Tell the peers that no kernel of this rank sends them anything more. From any thread."""
        self._rows.announce(KERNELS, SILENT)

    def end_kernels(self) -> None:
        """Tell the peers that all kernels of this rank have ended. From any thread."""
        if self._words[self._rows.rank][KERNELS] != ENDED:
            self._rows.announce(KERNELS, ENDED)

    # -- kernels of the peers ----------------------------------------------------------------------

    def at_work(self) -> list[int]:
        """The peers whose kernels may write to this rank's memory. From any thread.

        These are the peers whose kernels and processes have not ended.
        """
        self._rows.receive()
        working = [rank for rank in self._rows.peers if self._words[rank][KERNELS] != ENDED]
        ended = self._ended() if working else ()
        return [rank for rank in working if rank not in ended]

    def silent(self) -> list[int]:
        """The peers for which no kernel is to wait any more. From any thread.

        All peers, once one has died or given up: the group cannot go on. Otherwise the peers whose
        process or kernels have ended.
        """
        self._rows.receive()
        ended, silent = self._ended(), []
        for rank in self._rows.peers:
            state = self._state(rank)
            if state in (FAILED, MISMATCHED) or (rank in ended and state == RUNNING):
                return list(self._rows.peers)
            if rank in ended or self._words[rank][KERNELS]:
                silent.append(rank)
        return silent

    # -- errors ------------------------------------------------------------------------------------

    def error(self, late: Sequence[int]) -> Exception | None:
        """The exception to raise where one of these ranks will never arrive, else None."""
        return self._mismatch_error(late) or self.ended_error(late)

    def _mismatch_error(self, late: Sequence[int]) -> Exception | None:
        """The error where a late peer has published a round of exchange that this rank has not:
        it waits for this rank in another operation, and both would wait forever.
        """
        mismatched = [r for r in late if self.is_ahead(r) or self._state(r) == MISMATCHED]
        if not mismatched:
            return None
        names = self._names
        calls = "; ".join(f"{names.name(r)} is in {names.operation_of(r)}" for r in mismatched)
        return CollectiveMismatch(
            f"{names.where()}: the ranks called different operations: {calls}; all ranks must "
            "make the same calls in the same order"
        )

    def ended_error(self, late: Sequence[int]) -> Exception | None:
        """The exception to raise where a late peer has ended or given up, else None.

        A peer that died without a word is to blame. Otherwise a peer that gave up says who is, and
        the error is as on that peer, unless the peer itself or this rank is to blame.
        """
        names, ended = self._names, self._ended()  # first: a rank leaves, and then its process ends
        states = {rank: self._state(rank) for rank in late}
        died = [rank for rank in late if states[rank] == RUNNING and rank in ended]
        if died:
            return names.failure_of(died, "died")
        for rank in late:
            if states[rank] == FAILED:
                reason = self._reason(rank)
                if reason.error is not None:
                    self.verdict = reason.error
                    return self.verdict
                blamed = [r for r in reason.blamed if r != self._rows.rank]
                who = f"{names.where()}: {names.name(rank)}"
                text = f"{who} gave up: {reason.why}; {AFTER_FAILURE}"
                if reason.late and blamed:
                    return OpTimeout(text, blamed)
                return RankFailure(text, blamed or [rank])
        left = [rank for rank in late if states[rank] == LEFT]
        return names.failure_of(left, "has left") if left else None

    def silent_error(self, late: Sequence[int]) -> Exception | None:
        """As `ended_error`, where kernels have waited for these ranks.

        A rank may stop sending because another rank has ended, or before it says that it leaves.
        """
        error, silent = self.ended_error(late), set(self.silent())
        known = [rank for rank in late if rank in silent]
        if error is None and known:
            error = self.ended_error(self._rows.peers)
            error = error or self._names.failure_of(known, "sends no more")
        return error

    def refusal(self, ranks: Sequence[int], board: str) -> HeapExhausted | None:
        """The error where one of these ranks cannot have the board of that name, else None."""
        digest = _digest(board)
        for rank in ranks:
            if self._words[rank][REFUSED] == digest:
                return HeapExhausted(f"{self._names.name(rank)}: {self._reason(rank).why}")
        return None

    def _reason(self, rank: int) -> Reason:
        return Reason.unpack(self._rows.bytes[rank][REASON:MAIL].tobytes())


def _digest(name: str) -> int:
    """A word that stands for a name; never 0."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") | 1
