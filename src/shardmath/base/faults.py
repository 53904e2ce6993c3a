"""Faults on purpose, for tests: messages between ranks come late, twice, cut short, or not at all.

`SHARDMATH_FAULT` says where, how often, and what: `words=0.01:drop,links=0.1:delay,seed=7`. A place
is a kind of socket, which misbehaves when it sends. Sockets of places that are not named are left
alone, and are no slower.

    links     the start: frames of the group through which ranks tell each other who they are
    meeting   the start: proofs between ranks that meet, and descriptors of memory between them
    words     between hosts: control words, and memory that is read and written by asking

    delay      it is sent 20 ms later            truncate   half is sent, and the connection ends
    drop       neither it nor anything after it  error      the connection ends, and says so
    duplicate  it is sent twice                  die        the process is killed
"""

from __future__ import annotations

import errno
import os
import random
import signal
import socket
import time
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from shardmath.base import config

PLACES = ("links", "meeting", "words")
KINDS = ("delay", "drop", "duplicate", "truncate", "error", "die")

_VARIABLE = f"{config.PREFIX}FAULT"
_LATE = 0.02  # seconds


def faulty(place: str, connection: socket.socket) -> socket.socket:
    """`connection`, or a socket in its place that misbehaves as SHARDMATH_FAULT says.

    Raises ValueError for a value that it cannot read.
    """
    text = config.environment().get(_VARIABLE, "")
    if not text:
        return connection
    faults, drawn = _read(text)
    if place not in faults:
        return connection
    timeout = connection.gettimeout()
    made = FaultySocket(fileno=connection.detach())
    made.settimeout(timeout)
    made.misbehave(faults[place], drawn)
    return made


@cache
def _read(text: str) -> tuple[Mapping[str, tuple[float, str]], random.Random]:
    """The probability and the kind of fault of each place, and the source of random numbers."""
    faults: dict[str, tuple[float, str]] = {}
    seed = ""
    for part in text.split(","):
        place, _, what = part.strip().partition("=")
        probability, _, kind = what.partition(":")
        try:
            if place == "seed":
                seed = what
                continue
            faults[place] = float(probability), kind
            if place not in PLACES or kind not in KINDS or not 0 <= faults[place][0] <= 1:
                raise ValueError
        except ValueError:
            raise ValueError(
                f"{_VARIABLE}={text!r}: {part.strip()!r} is no place=probability:kind, with one of "
                f"the places {', '.join(PLACES)} and one of the kinds {', '.join(KINDS)}"
            ) from None
    return faults, random.Random(seed or None)


class FaultySocket(socket.socket):
    """A socket that misbehaves when it sends."""

    _fault: tuple[float, str] = (0.0, "")
    _drawn: random.Random
    _is_silent = False

    def misbehave(self, fault: tuple[float, str], drawn: random.Random) -> None:
        """Misbehave with the probability and in the way that `fault` says."""
        self._fault, self._drawn = fault, drawn

    def send(self, data: Any, flags: int = 0) -> int:
        """Send as a socket does, unless a fault strikes."""
        return self.sendmsg([data], (), flags)

    def sendmsg(  # type: ignore[override]
        self, buffers: Iterable[Any], ancillary: Iterable[Any] = (), flags: int = 0
    ) -> int:
        """Send as a socket does, unless a fault strikes."""
        whole, rights = b"".join(buffers), list(ancillary)
        kind = self._kind()
        if kind == "drop":
            return len(whole)
        if kind == "truncate":
            super().sendmsg([whole[: len(whole) // 2]], rights, flags)
            self.shutdown(socket.SHUT_WR)
            return len(whole)
        sent = super().sendmsg([whole], rights, flags)
        if kind == "duplicate" and sent == len(whole):
            self._send_again(whole, rights, flags)
        return sent

    def _kind(self) -> str:
        """The fault that strikes now and that the caller has to act out; "" for none."""
        probability, kind = self._fault
        if self._is_silent:
            return "drop"
        if self._drawn.random() >= probability:
            return ""
        if kind == "delay":
            time.sleep(_LATE)
        elif kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "error":
            self.shutdown(socket.SHUT_RDWR)
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        self._is_silent = kind == "drop"
        return kind

    def _send_again(self, whole: bytes, rights: list[Any], flags: int) -> None:
        try:
            while whole:
                whole, rights = whole[super().sendmsg([whole], rights, flags) :], []
        except BlockingIOError:  # part of a message was sent: the reader is to find that out
            self.shutdown(socket.SHUT_WR)
