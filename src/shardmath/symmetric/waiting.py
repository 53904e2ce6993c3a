"""How a rank waits for another: it spins, then sleeps, with a deadline and liveness checks.

Peers mostly arrive within microseconds. So a wait first spins, for as long as falling asleep and
waking up would take, and yields the core a few times. Then it sleeps until the awaited peer rings,
for a millisecond at most, and checks whether the peers are alive, whether one has left, and the
deadline; and so on. The common case costs a few loads and no system call, and a rank without a core
of its own soon yields the one that its peer needs. A ring only ends a sleep early: a rank that
wakes looks for itself.

Where peers do not ring, because nothing was compiled or for words that they write without ringing,
a wait yields the core and then sleeps with exponential backoff, up to a millisecond.

Either all ranks come out of a round or a barrier, or none does: memory of a rank that has given up
may change, and a late peer must not read it. So

    a rank comes out when it has seen every peer arrive, and then, looking once more, has seen that
    none has taken its arrival back;
    a rank at its deadline takes its own arrival back, lets that become visible, and looks once
    more: if every peer has arrived by then, including those that are just taking it back, it
    arrives again, and waits for peers that do the same; otherwise it fails.

Proof. Suppose that X comes out, and let G be the first rank that fails. X's second look saw G's
arrival, so G took it back after that look; all peers had arrived before that look, and arrivals
stay visible as 2n or 2n-1. So G, when it looked, saw that all had arrived and that none had failed:
it did not fail. A store of X that G's look does not see is younger than G's, which X then sees.

This holds among ranks that share the page, and between hosts where a message takes less than
`_FAR_DOUBT` seconds. It cannot hold where a rank is interrupted, stopped or killed between the two
steps of giving up: some peers may then come out where others raise, and all of them raise in their
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
_DOUBT = 1e-3  # seconds after which all cores see that a word was taken back
_FAR_DOUBT = 0.05  # the same between hosts, there and back


class WaitPolicy(Immutable):
    """Seconds to wait: until the timeout, until a notice on stderr, and spinning at first."""

    timeout: float
    notice: float
    spin: float

    @classmethod
    def of(cls, timeout: float, notice: float, local_ranks: int) -> WaitPolicy:
        """A policy that spins only where this host has a core for each of its ranks."""
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

    `missing()` are the ranks still waited for, `named(ranks)` describes them, and
    `peer_error(ranks)` is the exception to raise when one of those that are `late()` (default:
    missing) will never arrive. `doing()` names this rank, the operation and the user's line.
    `show(why)` shows where all ranks are, with the notice. `rest(peer, arrived, seconds)` sleeps
    until the peer rings: see `Rows.rest`. Raises a peer error at once, and OpTimeout after
    `timeout` seconds (default: the policy's).
    """
    limit = policy.timeout if timeout is None else timeout
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
        error = _error_of(arrived, late or missing, peer_error)
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
    arrived: Callable[[], bool],
    late: Callable[[], Sequence[int]],
    peer_error: Callable[[Sequence[int]], Exception | None],
) -> Exception | None:
    """`peer_error` of the ranks that are late, if none of them has arrived meanwhile.

    A peer may arrive after `late` has looked, and go on or leave before `peer_error` looks: it then
    seems to have left instead of arriving. If the same ranks are late afterwards, none has arrived.
    """
    ranks = late()
    error = peer_error(ranks)
    if error is None:
        return None
    order()
    return error if not arrived() and late() == ranks else None


def _sleep(peer: int, arrived: Callable[[], bool], seconds: float) -> None:
    """Sleep, where no peer rings."""
    time.sleep(seconds)


class Arrivals:
    """The arrivals of the ranks of `rows` at rounds and barriers, as one of them sees them.

    The word of a rank is 2n when it has arrived for the n-th time, and 2n-1 when it has taken that
    back at its deadline.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def missing(self, word: int, target: int) -> list[int]:
        """The peers whose `word` is less than `target`."""
        words = self._rows.words
        return [r for r in self._rows.peers if words[r][word] < target]

    def second_look(self, word: int, target: int) -> list[int]:
        """`missing`, once more: the peers that have taken their arrival back since."""
        if self._rows.needs_polling:
            self._rows.poll()
        order()
        return self.missing(word, target)

    def come_after_all(self, word: int, target: int) -> bool:
        """Take this rank's arrival back, and look once more who has arrived.

        If all have, announce the arrival again, and return True.
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
        """`arrived`, preceded by receiving messages of ranks on other hosts, if there are any."""
        if not self._rows.needs_polling:
            return arrived
        poll = self._rows.poll

        def polled() -> bool:
            poll()
            return arrived()

        return polled
