"""Framed, bounded messages over the anonymous sockets that join the ranks of one host.

Every wait has a deadline and ends when the peer's end closes. The standard library alone: the
launcher makes the sockets and must start fast. A frame is a fixed header and that many bytes:

    magic "SMG1" · kind (data, or the news of a failure) · exchange number · length of the payload
"""

from __future__ import annotations

import contextlib
import errno
import json
import resource
import select
import socket
import struct
import time
from collections.abc import Collection, Sequence
from typing import Final

from shardmath.base import config
from shardmath.base.caller import who
from shardmath.errors import BootstrapError, RankFailure
from shardmath.group.base import rank_names

# Bytes; a longer one is a fault or an attack, never a start-up message.
FRAME_LIMIT: Final = 1 << 28

_HEADER = struct.Struct("<4sB3xIQ")
_MAGIC = b"SMG1"
_DATA, _FAILURE = 0, 1
_LAST = 0xFFFFFFFF  # the number of a frame of a rank that gives up before any exchange
_FAREWELL = _HEADER.pack(_MAGIC, _FAILURE, _LAST, 0)[: -struct.calcsize("<Q")]
_CHUNK = 1 << 20


def exposed(place: str, connection: socket.socket) -> socket.socket:
    """`connection`; or one that misbehaves as SHARDMATH_FAULT says: see `base.faults`."""
    if f"{config.PREFIX}FAULT" not in config.environment():
        return connection
    from shardmath.base.faults import faulty

    return faulty(place, connection)


def star(size: int) -> list[list[socket.socket]]:
    """The sockets of each of `size` ranks, which join rank 0 to every other rank.

    Rank 0's are in the order of its peers 1, 2, ...; every other rank has one. All of them close on
    exec.

           1
           |
      3 -- 0 -- 2
    """
    ends: list[list[socket.socket]] = [[] for _ in range(size)]
    for peer in range(1, size):
        hub, spoke = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ends[0].append(hub)
        ends[peer].append(spoke)
    return ends


class Link:
    """One end of the socket to one peer; remembers a frame that is partly through.

    `is_awaited` says whether `receive_all` waits for one.
    """

    def __init__(self, sock: socket.socket, *, rank: int, peer: int) -> None:
        sock.setblocking(False)
        self.socket = exposed("links", sock)
        self.rank = rank
        self.peer = peer
        self.is_awaited = False
        self._outgoing = memoryview(b"")
        self._incoming = bytearray()

    def load(self, kind: int, number: int, payload: bytes) -> None:
        """Make a frame of `payload` the next one to go out."""
        if len(payload) > FRAME_LIMIT:
            raise BootstrapError(
                f"rank {self.rank}: a message of {len(payload)} bytes; the limit is {FRAME_LIMIT}"
            )
        header = _HEADER.pack(_MAGIC, kind, number & 0xFFFFFFFF, len(payload))
        self._outgoing = memoryview(header + payload)

    def push(self) -> bool:
        """Send what the socket takes; True when the frame is out. Raises OSError."""
        while self._outgoing:
            try:
                sent = self.socket.send(self._outgoing, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            self._outgoing = self._outgoing[sent:]
        return True

    def pull(self, number: int) -> bytes | None:
        """Receive what there is; the payload of frame `number` when it is complete, else None.

        Raises RankFailure when the peer's end is closed, and what the peer was told to tell.
        """
        while True:
            wanted = self._missing(number)
            if wanted == 0:
                return self._take()
            try:
                data = self.socket.recv(min(wanted, _CHUNK))
            except BlockingIOError:
                return None
            except OSError as error:
                if error.errno not in (errno.ECONNRESET, errno.EPIPE):
                    raise BootstrapError(
                        f"rank {self.rank}: socket to rank {self.peer}: {error}"
                    ) from error
                data = b""
            if not data:
                raise self.ended()
            self._incoming += data

    def ended(self) -> RankFailure:
        """The error where the peer's end is closed."""
        message = f"{who(self.rank)}: rank {self.peer} ended while this rank waited for it"
        return RankFailure(message, (self.peer,))

    def shut(self) -> None:
        """End the stream for both sides and every duplicate; what was sent can still be read."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def _missing(self, number: int) -> int:
        """How many bytes the frame still lacks, as far as is known."""
        if len(self._incoming) < _HEADER.size:
            return _HEADER.size - len(self._incoming)
        magic, kind, theirs, length = _HEADER.unpack_from(self._incoming)
        if magic != _MAGIC or kind not in (_DATA, _FAILURE) or length > FRAME_LIMIT:
            raise BootstrapError(f"rank {self.rank}: rank {self.peer} sent a malformed frame")
        if kind == _DATA and theirs != number & 0xFFFFFFFF:
            raise BootstrapError(
                f"rank {self.rank}: rank {self.peer} is at exchange {theirs}, this rank at {number}"
            )
        return int(_HEADER.size + length - len(self._incoming))

    def _take(self) -> bytes:
        kind = self._incoming[len(_MAGIC)]
        payload = bytes(memoryview(self._incoming)[_HEADER.size :])
        self._incoming = bytearray()
        if kind == _FAILURE:
            raise failure_of(self.rank, payload)
        return payload


def send_all(links: Sequence[Link], number: int, payload: bytes, *, deadline: float) -> None:
    """Send `payload` as data frame `number` over every link.

    Returns early for a peer that has gone: what it said last, or its silence, is for the receiver.
    Raises BootstrapError at the deadline, naming the peers that took too little.
    """
    for link in links:
        link.load(_DATA, number, payload)
    waiting = [link for link in links if not _pushed(link)]
    while waiting:
        ready = _poll(waiting, select.POLLOUT, deadline)
        if not ready:
            raise _late(waiting, "take a message")
        waiting = [link for link in waiting if link not in ready or not _pushed(link)]


def receive_all(links: Sequence[Link], number: int, *, deadline: float) -> dict[int, bytes]:
    """The payload of data frame `number` from every link, by peer.

    Raises RankFailure, naming every peer whose end was found closed, or BootstrapError at the
    deadline, naming the peers that had not spoken.
    """
    received: dict[int, bytes] = {}
    waiting = list(links)
    for link in waiting:
        link.is_awaited = True
    while waiting:
        ready = _poll(waiting, select.POLLIN, deadline)
        if not ready:
            raise _late(waiting, "arrive")
        ended: list[RankFailure] = []
        for link in ready:
            try:
                payload = link.pull(number)
            except RankFailure as error:
                ended.append(error)
                continue
            if payload is not None:
                received[link.peer] = payload
                waiting.remove(link)
                link.is_awaited = False
        if len(ended) == 1:
            raise ended[0]
        if ended:
            ranks = sorted({rank for error in ended for rank in error.ranks})
            raise RankFailure(f"{who(links[0].rank)}: {rank_names(ranks)} ended", ranks)
    return received


def tell_failure(links: Collection[Link], error: RankFailure | BootstrapError) -> None:
    """Tell the peers why this exchange will not complete, as far as their sockets take it."""
    payload = failure_in_bytes(error)
    for link in links:
        if not link._outgoing:  # a frame that is partly out cannot be overtaken
            link.load(_FAILURE, 0, payload)
            _pushed(link)


def farewell(error: RankFailure | BootstrapError) -> bytes:
    """The frame by which a rank that gives up tells why. Nothing else that ranks say begins so."""
    payload = failure_in_bytes(error)
    return _HEADER.pack(_MAGIC, _FAILURE, _LAST, len(payload)) + payload


def in_farewell(rank: int, words: bytes) -> RankFailure | BootstrapError | None:
    """The error in a `farewell` to `rank`, to be raised there; None where there is none."""
    return failure_of(rank, words[_HEADER.size :]) if words.startswith(_FAREWELL) else None


def too_few_descriptors(rank: int) -> BootstrapError:
    """The error where the system gives `rank` no more descriptors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return BootstrapError(
        f"rank {rank}: it may open {limit} descriptors, and needs two for each peer on its host "
        "beside its own: raise ulimit -n"
    )


def failure_in_bytes(error: RankFailure | BootstrapError) -> bytes:
    """An error encoded for peers, which decode it by `failure_of` and raise it, too."""
    ranks = list(error.ranks) if isinstance(error, RankFailure) else None
    return json.dumps({"ranks": ranks, "message": str(error)}).encode()


def failure_of(rank: int, payload: bytes) -> RankFailure | BootstrapError:
    """The error that a peer has sent `rank`, to be raised there."""
    try:
        news = json.loads(payload)
        message, ranks = f"rank {rank}: told by {news['message']}", news["ranks"]
        return (
            BootstrapError(message) if ranks is None else RankFailure(message, [*map(int, ranks)])
        )
    except (ValueError, KeyError, TypeError):
        return BootstrapError(f"rank {rank}: told of a failure in words that make no sense")


def _pushed(link: Link) -> bool:
    try:
        return link.push()
    except OSError:
        return True


def _poll(links: Sequence[Link], event: int, deadline: float) -> list[Link]:
    """The links on which something happened; none at the deadline."""
    poller = select.poll()
    by_descriptor = {}
    for link in links:
        poller.register(link.socket, event)
        by_descriptor[link.socket.fileno()] = link
    left = max(0.0, deadline - time.monotonic())
    return [by_descriptor[fd] for fd, _ in poller.poll(left * 1000)]


def _late(links: Sequence[Link], verb: str) -> BootstrapError:
    names = rank_names(sorted(link.peer for link in links))
    return BootstrapError(
        f"{who(links[0].rank)}: {names} did not {verb} before the deadline: does every rank call "
        "shardmath.initialize()? SHARDMATH_STARTUP_TIMEOUT sets the limit"
    )
