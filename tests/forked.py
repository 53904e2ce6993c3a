"""Ranks that are forked off the test's process: of `size` ranks, any first few make a group."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loaded  # noqa: F401  (before there are ranks)
from huge_pages import before_forks
from serve import name_of, serve
from shardmath.base import config, current
from shardmath.group.base import SoloProcessGroup
from shardmath.group.links import star
from shardmath.group.local import LocalProcessGroup
from shardmath.launch.failure import Failure, died
from shardmath.launch.ranks import die_with
from started import Member

__all__ = ["Forked"]


class Child(Member):
    """A forked rank as its parent sees it."""

    def __init__(self, rank: int, pid: int, channel: socket.socket, stack: int) -> None:
        super().__init__(rank, pid, channel, Path(f"/proc/self/fd/{stack}"))
        self._stack = stack

    def last_words(self) -> Failure:
        """How it ended, which it does just now."""
        info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert info is not None
        killed = info.si_code != os.CLD_EXITED
        status = -info.si_status if killed else info.si_status
        # A rank that died without a word is dated before those that noticed.
        return died(self.rank, status, when=0.0)

    def kill(self) -> None:
        """End and reap it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.channel.close()
        os.close(self._stack)


class Forked:
    """`size` ranks, which make with `setup` what their functions get."""

    def __init__(self, size: int, setup: Callable[[Any], Any]) -> None:
        before_forks()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        stars = {k: star(k) for k in range(1, size + 1)}
        self.ended = False
        self.members: list[Child] = []
        for rank in range(size):
            self.members.append(_fork(rank, stars, self.members, setup))
        for ends in stars.values():
            for sockets in ends:
                _close(sockets)

    def used(self) -> None:
        """Does nothing: the ranks stay as long as their pool."""

    def said(self) -> str:
        """Nothing that has not been written where the parent writes."""
        return ""

    def dismiss(self) -> None:
        """Does nothing: they have nobody to tell."""

    def end(self) -> None:
        """End them."""
        self.kill()

    def kill(self) -> None:
        """End them at once."""
        self.ended = True
        members, self.members = self.members, []
        for member in members:
            member.kill()


def _fork(
    rank: int,
    stars: dict[int, list[list[socket.socket]]],
    others: list[Child],
    setup: Callable[[Any], Any],
) -> Child:
    ours, theirs = socket.socketpair()
    stack = os.memfd_create(f"stack of rank {rank}")
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            die_with(parent)
            ours.close()
            for other in others:
                other.channel.close()
            sockets = {k: ends[rank] for k, ends in stars.items() if rank < k}
            for k, ends in stars.items():
                for number, those in enumerate(ends):
                    if number != rank or rank >= k:
                        _close(those)
            faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
            inherited = current.forget()
            gc.freeze()  # what the parent had is not collected over and over
            gc.callbacks.clear()  # Hypothesis times its own process's collections
            known = {name_of(setup): setup}
            serve(rank, theirs, lambda size: _group(rank, size, sockets[size]), known)
            del inherited
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    theirs.close()
    return Child(rank, pid, ours, stack)


def _close(sockets: list[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


def _group(rank: int, size: int, sockets: list[socket.socket]) -> Any:
    """The group of the first `size` ranks; the environment says the same."""
    names = {"RANK": rank, "SIZE": size, "PID": os.getpid()}
    names["LAUNCHER_FD"] = ",".join(str(sock.fileno()) for sock in sockets)
    config.export({config.PREFIX + name: str(value) for name, value in names.items()})
    return SoloProcessGroup() if size == 1 else LocalProcessGroup(rank, size, sockets)
