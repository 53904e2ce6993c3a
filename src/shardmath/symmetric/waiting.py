"""How a rank waits for another: spinning, then asleep; with a deadline and liveness checks.

A wait first spins, since peers mostly arrive within microseconds, for as long as falling asleep and
waking up would take; yields the core a few times; then it sleeps until the peer that it waits for
rings, for a millisecond at most, and checks whether the peers are alive, whether one has left, and
the deadline. So the common case costs a few loads and no system call, and a rank that has no core
of its own soon lets go of the one that its peer needs. A ring only ends a sleep early: whoever
wakes looks for itself.

Where peers cannot ring, since nothing was compiled, or what is awaited is not what they ring for,
a wait yields the core, and then sleeps with exponential backoff up to a millisecond.

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
import sys
import time
from collections.abc import Callable, Sequence

from shardmath.base.immutable import Immutable
from shardmath.errors import OpTimeout
from shardmath.symmetric.rows import RUNNING, STATE, Rest, Rows, order

_YIELDS = 100
_FIRST_SLEEP = 20e-6
LONGEST_REST = 1e-3  # seconds of sleep between two looks at whether the peers are alive
_SPIN = 50e-6  # seconds: about what it takes to fall asleep and to be woken
_DOUBT = 1e-3  # seconds in which a word that is taken back is seen by cores that load it
_FAR_DOUBT = 0.05  # the same between hosts, there and back


class WaitPolicy(Immutable):
    """How long to wait: `timeout` seconds, with a notice after `notice`; it spins for `spin`."""

    timeout: float
    notice: float
    spin: float

    @classmethod
    def of(cls, timeout: float, notice: float, local_ranks: int) -> WaitPolicy:
        """Spin only where every rank has a core of its own, as far as this host can tell."""
        cores = len(os.sched_getaffinity(0))
        return cls(timeout, notice, _SPIN if local_ranks <= cores else 0.0)


def wait_until(
    arrived: Callable[[], bool],
    *,
    policy: WaitPolicy,
    missing: Callable[[], Sequence[int]],
    peer_error: Callable[[Sequence[int]], Exception | None],
    doing: Callable[[], str],
    named: Callable[[Sequence[int]], str],
    show: Callable[[str], None],
    timeout: float | None = None,
    rest: Rest | None = None,
    late: Callable[[], Sequence[int]] | None = None,
) -> None:
    """Return once `arrived()`.

    `missing()` lists the ranks still waited for, which `named(ranks)` puts into words; `doing()`
    names this rank, the operation and the user's line, and `peer_error(ranks)` is the exception to
    raise when one of those that are `late()` (default: missing) will never arrive. `show(why)`
    shows where all ranks are, with the notice that this one waits. `rest(peer, arrived, seconds)`
    sleeps until the peer rings: `Rows.rest`.
    Raises the error at once, and OpTimeout after `timeout` seconds (default: the policy's).
    """
    limit = policy.timeout if timeout is None else timeout
    late = missing if late is None else late
    start, noticed = time.monotonic(), False
    while not arrived():
        if time.monotonic() - start >= policy.spin:
            break
    else:
        return
    if rest is None:
        rest, pause = _sleep, _FIRST_SLEEP
        for _ in range(_YIELDS):
            os.sched_yield()
            if arrived():
                return
    else:
        pause = LONGEST_REST
    while not arrived():
        waited = time.monotonic() - start
        error = _error_of(late, peer_error)
        if error is not None:
            raise error
        missing_ranks = missing()
        if not missing_ranks:
            continue
        if waited > limit:
            raised = "SHARDMATH_TIMEOUT" if timeout is None else "the timeout of this call"
            slow = "it was" if len(missing_ranks) == 1 else "they were"
            raise OpTimeout(
                f"{doing()}: waited {waited:.{1 if waited >= 1 else 2}f} s for "
                f"{named(missing_ranks)}; raise {raised} if {slow} only slow",
                missing_ranks,
            )
        if waited > policy.notice and not noticed:
            noticed = True
            words = f"{doing()}: waiting for {named(missing_ranks)}"
            print(f"shardmath: {words}", file=sys.stderr, flush=True)
            show("where the ranks are")
        rest(missing_ranks[0], arrived, min(pause, max(limit - waited, _FIRST_SLEEP)))
        pause = min(2 * pause, LONGEST_REST)


def _error_of(
    late: Callable[[], Sequence[int]],
    peer_error: Callable[[Sequence[int]], Exception | None],
) -> Exception | None:
    """What `peer_error` says of the ranks that are late.

    A peer may arrive after `late` has looked, and go on or leave before `peer_error` looks: then it
    seems to have done so instead. Where the same ranks are late afterwards, none has arrived.
    """
    ranks = late()
    error = peer_error(ranks)
    if error is None:
        return None
    order()
    return error if late() == ranks else None


def _sleep(peer: int, arrived: Callable[[], bool], seconds: float) -> None:
    """Sleep, where no peer rings."""
    time.sleep(seconds)


class Arrivals:
    """Arrivals of the ranks of `rows` at rounds and barriers, as one of them sees them.

    A word of a rank's row is 2n where it has arrived for the n-th time, and 2n-1 where it has taken
    that back, as a rank does that has waited too long.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def missing(self, word: int, target: int) -> list[int]:
        """The peers whose `word` is less than `target`."""
        words = self._rows.words
        return [r for r in self._rows.peers if words[r][word] < target]

    def second_look(self, word: int, target: int) -> list[int]:
        """The peers whose `word` is still less than `target`, after what `missing` has seen."""
        if self._rows.needs_polling:
            self._rows.poll()
        order()
        return self.missing(word, target)

    def come_after_all(self, word: int, target: int) -> bool:
        """Take this rank's arrival back, and look once more who has come.

        Where all have, announces the arrival again, and returns True.
        """
        self._rows.publish(word, target - 1)
        if self._rows.needs_polling:
            deadline = time.monotonic() + _FAR_DOUBT
            while time.monotonic() < deadline:
                self._rows.poll()
                time.sleep(_DOUBT)
        else:
            time.sleep(_DOUBT)
        running = [words[STATE] == RUNNING for words in self._rows.words]  # first: it is final
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
