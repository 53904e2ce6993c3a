"""How a rank waits for another: spinning, yielding, sleeping; with a deadline and liveness checks.

A wait first spins, since peers mostly arrive within microseconds; then yields the core; then sleeps
with exponential backoff up to a millisecond, and only then checks whether the peers are alive,
whether one has left, and the deadline. So the common case costs a few loads and no system call.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardmath.errors import OpTimeout

__all__ = ["WaitPolicy", "wait_until"]

_YIELDS = 100
_FIRST_SLEEP = 20e-6
_LAST_SLEEP = 1e-3


@dataclass(frozen=True)
class WaitPolicy:
    """How long to wait: `timeout` seconds, with a notice after `notice`; at first `spins` polls."""

    timeout: float
    notice: float
    spins: int

    @classmethod
    def of(cls, timeout: float, notice: float, local_ranks: int) -> WaitPolicy:
        """Spin long only where every rank has a core of its own."""
        cores = len(os.sched_getaffinity(0))
        return cls(timeout, notice, 2000 if local_ranks <= cores else 20)


def wait_until(
    arrived: Callable[[], bool],
    *,
    policy: WaitPolicy,
    missing: Callable[[], Sequence[int]],
    peer_error: Callable[[Sequence[int]], Exception | None],
    doing: Callable[[], str],
    named: Callable[[Sequence[int]], str],
    timeout: float | None = None,
) -> None:
    """Return once `arrived()`.

    `missing()` lists the ranks still waited for, which `named(ranks)` puts into words; `doing()`
    names this rank, the operation and the user's line, and `peer_error(ranks)` is the exception to
    raise when one of them will never arrive. Raises that at once, and OpTimeout after `timeout`
    seconds (default: the policy's).
    """
    for _ in range(policy.spins):
        if arrived():
            return
    for _ in range(_YIELDS):
        os.sched_yield()
        if arrived():
            return
    _wait_asleep(arrived, policy, missing, peer_error, doing, named, timeout)


def _wait_asleep(
    arrived: Callable[[], bool],
    policy: WaitPolicy,
    missing: Callable[[], Sequence[int]],
    peer_error: Callable[[Sequence[int]], Exception | None],
    doing: Callable[[], str],
    named: Callable[[Sequence[int]], str],
    timeout: float | None,
) -> None:
    limit = policy.timeout if timeout is None else timeout
    start = time.monotonic()
    noticed = False
    pause = _FIRST_SLEEP
    while not arrived():
        waited = time.monotonic() - start
        missing_ranks = missing()
        error = peer_error(missing_ranks)
        if error is not None and not arrived():  # a peer may arrive and then end
            raise error
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
            print(
                f"shardmath: {doing()}: waiting for {named(missing_ranks)}",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(min(pause, max(limit - waited, _FIRST_SLEEP)))
        pause = min(2 * pause, _LAST_SLEEP)
