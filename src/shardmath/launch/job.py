"""Watch a job's ranks until all have ended: their output, their reports, the first failure.

The first failure ends the job: SIGTERM to the ranks that have not failed, SIGKILL after a grace. A
failure that is only a consequence (see `failure`) waits a moment for its cause before it does so.
When `watch` returns or raises, no rank is left.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from shardmath.launch.failure import Failure, died
from shardmath.launch.output import Prefixer
from shardmath.launch.ranks import REPORT_HEADER, Rank

GRACE: Final = 2.0  # seconds between a request to end and SIGKILL
SETTLE: Final = 0.5  # seconds in which the cause of a consequence must show
PROMPT: Final = 0.05  # seconds after which an unfinished line is taken for a prompt
FAILURE: Final = b"F"  # kinds of report
RESULT: Final = b"R"
_CHUNK = 1 << 18


@dataclass
class Job:
    """The ranks of one job, and what is known of them.

    `results` and `failures` are what the ranks reported; `interrupt` is the first signal that ended
    the job from outside, if one did.
    """

    ranks: Sequence[Rank]
    stdout: Prefixer
    stderr: Prefixer
    needs_results: bool = False
    results: dict[int, bytes] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    interrupt: int | None = None

    def __post_init__(self) -> None:
        self._alive = {rank.number: rank for rank in self.ranks}
        self._inbox = {rank.number: bytearray() for rank in self.ranks}
        self._selector = selectors.DefaultSelector()
        self._last_seen = time.monotonic()
        self._plan: list[tuple[float, int]] = []  # when to send which signal, soonest first
        self._ending = False
        self._terminal = any(not rank.leads_group for rank in self.ranks)

    @property
    def first_failure(self) -> Failure | None:
        """The failure that ended the job: the earliest that is a cause, else the earliest."""
        return min(self.failures, key=lambda failure: failure.order, default=None)

    def watch(self, *, deadline: float | None = None, wake: int | None = None) -> bool:
        """Wait until every rank has ended; False when `deadline` came first, and all were killed.

        `wake` is a descriptor from which signal numbers are read, as `signal.set_wakeup_fd` writes
        them: they end the job, but for SIGQUIT, which is passed on.
        """
        for rank in self.ranks:
            self._register(rank.stdout, partial(self._read_output, rank, rank.stdout, self.stdout))
            self._register(rank.stderr, partial(self._read_output, rank, rank.stderr, self.stderr))
            self._register(rank.report, partial(self._read_report, rank))
            self._register(rank.pidfd, partial(self._bury, rank))
        if wake is not None:
            self._register(wake, partial(self._read_signals, wake))
        in_time = True
        try:
            while self._alive:
                if deadline is not None and time.monotonic() >= deadline:
                    in_time = False
                    break
                self._step(deadline)
        finally:
            self._kill_all()
            self._selector.close()
        self.stdout.finish()
        self.stderr.finish()
        return in_time

    def end(self, *steps: tuple[float, int]) -> None:
        """Send signals to the ranks that run: (seconds from now, signal), in this order."""
        now = time.monotonic()
        self._ending = True
        self._plan = [(now + delay, signum) for delay, signum in steps]

    def _register(self, descriptor: int, action: Callable[[], object]) -> None:
        os.set_blocking(descriptor, False)
        self._selector.register(descriptor, selectors.EVENT_READ, action)

    def _step(self, deadline: float | None) -> None:
        """Wait for the next event or the next planned signal, and act on it."""
        moments = [when for when, _ in self._plan[:1]] + ([] if deadline is None else [deadline])
        left = max(0.0, min(moments) - time.monotonic()) if moments else None
        prompting = self._terminal and self.stdout.is_open(0)
        if prompting:
            left = PROMPT if left is None else min(left, PROMPT)
        events = self._selector.select(left)
        for key, _ in events:
            if key.fileobj in self._selector.get_map():  # not closed by an action before it
                key.data()
        if prompting and not events:
            self.stdout.show_partial(0)
        self._last_seen = time.monotonic()
        self._judge()
        self._send_due()

    def _judge(self) -> None:
        """Let the first failure end the job; a mere consequence only after a while."""
        if self._ending or not self.failures:
            return
        if not all(failure.is_consequence for failure in self.failures):
            self.end((0.0, signal.SIGTERM), (GRACE, signal.SIGKILL))
        elif not self._plan:
            self.end((SETTLE, signal.SIGTERM), (SETTLE + GRACE, signal.SIGKILL))
            self._ending = False

    def _send_due(self) -> None:
        while self._plan and self._plan[0][0] <= time.monotonic():
            _, signum = self._plan.pop(0)
            self._ending = True
            failed = {failure.rank for failure in self.failures}
            for rank in self._alive.values():
                # One that has failed is on its way out; the terminal has interrupted its own.
                spared = (signum == signal.SIGTERM and rank.number in failed) or (
                    signum == signal.SIGINT and not rank.leads_group
                )
                if not spared:
                    rank.send_signal(signum)

    def _read_output(self, rank: Rank, descriptor: int, prefixer: Prefixer) -> None:
        data = self._read(descriptor)
        if data:
            prefixer.feed(rank.number, data)

    def _read_report(self, rank: Rank) -> None:
        inbox = self._inbox[rank.number]
        inbox += self._read(rank.report) or b""
        while len(inbox) >= REPORT_HEADER.size:
            kind, length = REPORT_HEADER.unpack_from(inbox)
            end = REPORT_HEADER.size + length
            if len(inbox) < end:
                break
            with memoryview(inbox) as view:
                payload = bytes(view[REPORT_HEADER.size : end])
            del inbox[:end]
            if kind == FAILURE:
                self.failures.append(Failure.decode(payload))
            else:
                self.results[rank.number] = payload

    def _read(self, descriptor: int) -> bytes | None:
        """The bytes that can be read now; None if none can."""
        try:
            data = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return None
        if not data:
            self._selector.unregister(descriptor)
        return data or None

    def _bury(self, rank: Rank) -> None:
        """Take the last words of a rank that has ended, and judge how it ended."""
        if self._ending:
            rank.send_signal(signal.SIGKILL)  # what it started, while its number is still its own
        _, wait_status = os.waitpid(rank.pid, 0)
        del self._alive[rank.number]
        self._drain(rank)
        status = os.waitstatus_to_exitcode(wait_status)
        spoke = rank.number in {failure.rank for failure in self.failures}
        lacks_result = self.needs_results and rank.number not in self.results
        if (status != 0 or lacks_result) and not spoke and not self._ending:
            self.failures.append(died(rank.number, status, when=self._last_seen))
        for descriptor in (rank.stdout, rank.stderr, rank.report, rank.pidfd):
            with contextlib.suppress(KeyError):
                self._selector.unregister(descriptor)
        rank.close()

    def _drain(self, rank: Rank) -> None:
        """Read what the pipes still hold; what the rank started may keep them open for ever."""
        for descriptor, prefixer in ((rank.stdout, self.stdout), (rank.stderr, self.stderr)):
            while descriptor in self._selector.get_map():
                data = self._read(descriptor)
                if data is None:
                    break
                prefixer.feed(rank.number, data)
        while rank.report in self._selector.get_map():
            before = len(self._inbox[rank.number]), len(self.results), len(self.failures)
            self._read_report(rank)
            if before == (len(self._inbox[rank.number]), len(self.results), len(self.failures)):
                break

    def _read_signals(self, wake: int) -> None:
        for signum in self._read(wake) or b"":
            if signum == signal.SIGQUIT:  # which asks where the ranks are
                for rank in self._alive.values():
                    if rank.leads_group:  # else the terminal has asked it
                        os.kill(rank.pid, signum)
                continue
            if self.interrupt is not None:
                self.end((0.0, signal.SIGKILL))
                continue
            self.interrupt = signum
            if signum == signal.SIGINT:
                self.end((0.0, signum), (GRACE, signal.SIGTERM), (2 * GRACE, signal.SIGKILL))
            else:
                self.end((0.0, signum), (GRACE, signal.SIGKILL))

    def _kill_all(self) -> None:
        self._ending = True
        for rank in self._alive.values():
            rank.send_signal(signal.SIGKILL)
        for rank in list(self._alive.values()):
            os.waitpid(rank.pid, 0)
            rank.close()
        self._alive.clear()
