"""A pool of ranks for the tests: started once, then told what to run.

A call runs one module-level function on the first k ranks and returns their results in order. The
ranks are forked, or started by a launcher. They are replaced after any failure, so that no test
sees what another has broken, and die with the process that made them.
"""

from __future__ import annotations

import selectors
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from forked import Forked
from serve import CALL, FAILED, name_of, receive, send
from shardmath.base import wire
from shardmath.context.startup import new_context
from shardmath.errors import OpTimeout
from shardmath.launch.failure import Failure, rebuild
from started import LAUNCHER, PATIENCE, Member, Started, stacks_of

__all__ = ["PATIENCE", "Pool", "with_context"]

LINGER = 0.2  # seconds that the others have to end after one rank has failed


def own_group(group: Any) -> Any:
    """The default set-up: functions get the group itself."""
    return group


def with_context(group: Any) -> Any:
    """A set-up: functions get a context on cores."""
    return new_context("cpu", group)


class Pool:
    """`size` ranks that wait for functions to run.

    `setup(group)` makes, once for each number of ranks, the object that functions get as their
    first argument. It is called on every one of those ranks. `launcher` is one of
    `started.LAUNCHERS`, or "" for ranks that are forked.
    """

    def __init__(
        self, size: int, setup: Callable[[Any], Any] = own_group, *, launcher: str = LAUNCHER
    ) -> None:
        self.size = size
        self._setup = setup
        self._launcher = launcher
        self._jobs: dict[int, Forked | Started] = {}

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: int | None = None,
        timeout: float = PATIENCE,
    ) -> list[Any]:
        """`function(setup(group), *args)` on the first `ranks` ranks: the results in order.

        Raises what the first failing rank raised, as `shardmath.launch.spawn` does, and OpTimeout
        after `timeout` seconds, when every rank's stack is printed.
        """
        size = self.size if ranks is None else ranks
        if not 1 <= size <= self.size:
            raise ValueError(f"{size} ranks of a pool of {self.size}")
        if "<" in function.__qualname__:
            raise TypeError(f"{function.__qualname__} is not a function of a module")
        name = name_of(function)
        command = wire.encode((name, sys.path, size, name_of(self._setup), args))
        job = self._job(size)
        members = job.members[:size]
        try:
            for member in members:
                send(member.channel, CALL, command)
            replies = _collect(members, time.monotonic() + timeout)
        except BaseException:
            job.kill()
            raise
        failures = [reply for reply in replies.values() if isinstance(reply, Failure)]
        if failures or len(replies) < size:
            late = [member for member in members if member.rank not in replies]
            stacks = stacks_of(late)
            said = job.said()
            job.kill()
            if not failures:
                print(stacks, said, file=sys.stderr)
                names = [member.rank for member in late]
                raise OpTimeout(f"{name}: {timeout} s have passed; not finished: {names}", names)
            error = rebuild(min(failures, key=lambda failure: failure.order))
            for note in filter(None, (stacks, said)):
                error.add_note(note)
            raise error
        return [wire.decode(replies[rank]) for rank in range(size)]

    def close(self) -> None:
        """End the ranks; the next `run` starts new ones."""
        jobs = [job for job in self._jobs.values() if not job.ended]
        self._jobs.clear()
        for job in jobs:
            job.dismiss()
        for job in jobs:
            job.end()

    def _job(self, size: int) -> Forked | Started:
        """Ranks of which the first `size` make a group; of a launcher's, all."""
        key = size if self._launcher else self.size
        job = self._jobs.get(key)
        if job is None or job.ended:
            forks = not self._launcher
            job = Forked(key, self._setup) if forks else Started(self._launcher, key)
            self._jobs[key] = job
        job.used()
        return job


def _collect(members: Sequence[Member], deadline: float) -> dict[int, Any]:
    """Replies by rank: bytes or a Failure. Without those that did not come in time."""
    replies: dict[int, Any] = {}
    with selectors.DefaultSelector() as selector:
        for member in members:
            selector.register(member.channel, selectors.EVENT_READ, member)
        while len(replies) < len(members):
            events = selector.select(max(0.0, deadline - time.monotonic()))
            if not events:
                break
            for key, _ in events:
                selector.unregister(key.fileobj)
                reply = replies[key.data.rank] = _reply(key.data)
                if isinstance(reply, Failure):
                    linger = 10 * LINGER if reply.is_consequence else LINGER
                    deadline = min(deadline, time.monotonic() + linger)
    return replies


def _reply(member: Member) -> Any:
    message = receive(member.channel)
    if message is None:
        return member.last_words()
    kind, payload = message
    return Failure.decode(payload) if kind == FAILED else payload
