"""How a rank waits for another: with a deadline, an eye on the peer's life, and words for it all.

A wait first spins, since peers mostly arrive within microseconds; then lets others have the core;
then sleeps, ever longer up to a millisecond, and only then looks whether the peers are alive,
whether one has left, and whether time is up. So the common case costs a few loads and no system
call.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardmath.errors import OpTimeout
from shardmath.group.base import rank_names

__all__ = ["Patience", "wait_until"]

_YIELDS = 100
_FIRST_SLEEP = 20e-6
_LAST_SLEEP = 1e-3


@dataclass(frozen=True)
class Patience:
    """How long to wait: `timeout` seconds, with a notice after `notice`; at first `spins` polls."""

    timeout: float
    notice: float
    spins: int

    @classmethod
    def of(cls, timeout: float, notice: float, local_ranks: int) -> Patience:
        """Spin long only where every rank has a core of its own."""
        cores = len(os.sched_getaffinity(0))
        return cls(timeout, notice, 2000 if local_ranks <= cores else 20)


def wait_until(
    arrived: Callable[[], bool],
    *,
    patience: Patience,
    missing: Callable[[], Sequence[int]],
    verdict: Callable[[Sequence[int]], Exception | None],
    doing: Callable[[], str],
    timeout: float | None = None,
) -> None:
    """Return once `arrived()`.

    `missing()` lists the ranks still waited for, `doing()` names this rank, the operation and the
    user's line, and `verdict(ranks)` is the exception to raise when one of them will never arrive.
    Raises that at once, and OpTimeout after `timeout` seconds (default: the patience's).
    """
    for _ in range(patience.spins):
        if arrived():
            return
    for _ in range(_YIELDS):
        os.sched_yield()
        if arrived():
            return
    _wait_asleep(arrived, patience, missing, verdict, doing, timeout)


def _wait_asleep(
    arrived: Callable[[], bool],
    patience: Patience,
    missing: Callable[[], Sequence[int]],
    verdict: Callable[[Sequence[int]], Exception | None],
    doing: Callable[[], str],
    timeout: float | None,
) -> None:
    limit = patience.timeout if timeout is None else timeout
    start = time.monotonic()
    noticed = False
    pause = _FIRST_SLEEP
    while not arrived():
        waited = time.monotonic() - start
        late = missing()
        error = verdict(late)
        if error is not None and not arrived():  # a peer may arrive and then end
            raise error
        if waited > limit:
            raised = "SHARDMATH_TIMEOUT" if timeout is None else "the timeout of this call"
            raise OpTimeout(
                f"{doing()}: waited {waited:.{1 if waited >= 1 else 2}f} s for {rank_names(late)}; "
                f"raise {raised} if they were only slow",
                late,
            )
        if waited > patience.notice and not noticed:
            noticed = True
            print(
                f"shardmath: {doing()}: waiting for {rank_names(late)}",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(min(pause, max(limit - waited, _FIRST_SLEEP)))
        pause = min(2 * pause, _LAST_SLEEP)
