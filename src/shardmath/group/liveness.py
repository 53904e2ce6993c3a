"""Which peers of this host are still alive.

A peer is watched by its pidfd, which becomes readable the moment the process ends, even as a
zombie. Where process ids are not visible (containers with their own), the end of its socket says
the same; and so does the end of its connection for a peer on another host (`mark_dead`).
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Mapping

GRACE = 0.2  # seconds: a dying process closes its sockets first, and counts as dead later


class PeerWatch:
    """Watches peers: rank -> (process id or 0, descriptor of a socket to the peer or -1).

    Any thread may ask: contexts that were split share it.
    """

    def __init__(self, peers: Mapping[int, tuple[int, int]]) -> None:
        self._poll = select.poll()
        self._rank_of: dict[int, int] = {}
        self._pidfds: list[int] = []
        self._dead: set[int] = set()
        self._lock = threading.RLock()
        for rank, (pid, socket_fd) in peers.items():
            self._watch(rank, pid, socket_fd)

    def _watch(self, rank: int, pid: int, socket_fd: int) -> None:
        if pid:
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                self._dead.add(rank)
                return
            self._pidfds.append(fd)
        elif socket_fd < 0:
            return
        else:
            fd = socket_fd
        self._poll.register(fd, self._events(fd))
        self._rank_of[fd] = rank

    def await_readable(self, descriptor: int, seconds: float) -> bool:
        """Wait until `descriptor` can be read or a peer's process ends; whether either happened."""
        own = select.poll()  # which, unlike `select.select`, takes descriptors above 1023
        for watched in (descriptor, *self._pidfds):
            own.register(watched, select.POLLIN)
        return bool(own.poll(max(0.0, seconds) * 1000))

    def mark_dead(self, rank: int) -> None:
        """Count `rank` as dead: whoever reads its connection has come to the end."""
        self._dead.add(rank)

    def dead(self) -> frozenset[int]:
        """The ranks whose process has ended. Never blocks; about a microsecond."""
        if self._lock.acquire(blocking=False):  # else another thread is finding out
            try:
                for fd, _ in self._poll.poll(0):
                    self._dead.add(self._rank_of[fd])
                    self._poll.unregister(fd)
            finally:
                self._lock.release()
        return frozenset(self._dead)

    def pending(self) -> list[tuple[int, int]]:
        """Descriptors, and the events that poll(2) is to report, of peers not known to be dead."""
        watched = list(self._rank_of.items())
        return [(fd, self._events(fd)) for fd, rank in watched if rank not in self._dead]

    def wait(self, seconds: float) -> frozenset[int]:
        """The ranks whose process has ended, after a wait for a first one of up to `seconds`."""
        if not self._dead:
            own = select.poll()  # one of these serves one thread at a time
            for fd in self._rank_of:
                own.register(fd, self._events(fd))
            own.poll(seconds * 1000)
        return self.dead()

    def _events(self, fd: int) -> int:
        return select.POLLIN if fd in self._pidfds else 0  # POLLHUP is always reported

    def close(self) -> None:
        """Stop watching: no more peers are found dead."""
        with self._lock:
            self._poll = select.poll()
            self._rank_of = {}
            while self._pidfds:
                os.close(self._pidfds.pop())
