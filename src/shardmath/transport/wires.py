"""Small messages between ranks that share no memory: control words, in order, over TCP.

What a rank sends another arrives in the order in which it was sent, and is applied when the
receiver next polls: every wait polls, or sleeps until there is something to poll, so no thread is
needed. A message names a channel and a place in it, and the channel decides what to do with it.
Messages for a channel that this rank has not opened yet are kept until it does; those for a closed
channel are dropped. When a connection ends, so has the peer.

An exception may leave `poll` or `send` at any point. Messages are taken off a queue before they are
delivered, and so delivered once at most; a connection on which it is not known how much has been
sent or received is ended, as if the peer had.

A rank that waits sends the others' hosts an empty message now and then, to see whether they are
there: their systems acknowledge it, also while the processes compute. A host that acknowledges
nothing for as long as a heartbeat is lost, and the connection to it ends.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b

from shardmath.group.links import exposed
from shardmath.group.liveness import PeerWatch

Deliver = Callable[[int, int, bytes], None]  # (rank that wrote, place, data)

_FRAME = struct.Struct("<16sIII")  # channel, its number, place, bytes that follow
_LIMIT = 1 << 20  # bytes of one message; a longer one is a fault
_EARLY_LIMIT = 64 << 20  # bytes kept for channels that are not open yet
_READ = 1 << 18
_LAST = (1 << 32) - 1
_BEAT = 0.25  # seconds between two looks at whether hosts answer
_HOOKED = 2e-4  # seconds of rest between two calls of the progress hooks
_BELL_FLAGS = os.EFD_NONBLOCK | os.EFD_CLOEXEC
_NOTHING = bytes(16)  # the channel of messages that say nothing
_ACKNOWLEDGED = struct.Struct("<56xI")  # in the system's facts: milliseconds since it last was
_DELIVERY = 1.0  # seconds that the end of a process waits until its last words have arrived


class Channel:
    """Messages under one name and number; all ranks that use a channel open it alike.

    If these ranks form a group, `ranks[r]` is the number in the mesh of the group's rank r.
    """

    def __init__(
        self, wires: Wires, key: bytes, number: int, ranks: Sequence[int] | None = None
    ) -> None:
        self._wires = wires
        self._head = (key, number)
        self._ranks = None if ranks is None else tuple(ranks)

    def send(self, ranks: Iterable[int], writes: Sequence[tuple[int, bytes]]) -> None:
        """Send each of `ranks` these (place, data), in order. May be called by a finalizer."""
        frames = [_FRAME.pack(*self._head, place, len(data)) + data for place, data in writes]
        peers = ranks if self._ranks is None else [self._ranks[rank] for rank in ranks]
        self._wires.send(peers, b"".join(frames))

    def close(self) -> None:
        """Close the channel: messages that still come for it are dropped."""
        self._wires.channels.pop(self._head, None)


class Wires:
    """This rank's connections to the others, by their numbers in the mesh.

    `watch` learns of peers whose connection ends, and so of hosts that have not answered for
    `heartbeat` seconds. `progress_hooks` are called at every poll: a library may need that to serve
    its peers.
    """

    def __init__(
        self, connections: Mapping[int, socket.socket], watch: PeerWatch, heartbeat: float = 2.0
    ) -> None:
        self.channels: dict[tuple[bytes, int], Deliver] = {}
        self.progress_hooks: list[Callable[[], object]] = []
        self._watch = watch
        self._connections = {r: exposed("words", each) for r, each in connections.items()}
        self._rank_of = {one.fileno(): rank for rank, one in self._connections.items()}
        self._received: dict[int, bytearray] = {rank: bytearray() for rank in self._connections}
        self._queues: dict[int, deque[bytes]] = {rank: deque() for rank in self._connections}
        self._waiting: set[int] = set()  # ranks whose connection is full for now
        self._early: dict[tuple[bytes, int], list[tuple[int, int, bytes]]] = {}
        self._early_bytes = 0
        self._opened: dict[bytes, int] = {}  # the highest number opened of each name
        self._lock = threading.RLock()
        self._patience = max(_BEAT, heartbeat - 3 * _BEAT)  # after a question
        self._next_look = 0.0
        self._asked: dict[int, float] = {}  # since when a host has not answered
        self._busy = False  # the thread that holds the lock is in `_flush` or `_receive`
        self._in_doubt: set[int] = set()  # ranks to which a system call is under way
        self._ready = select.epoll()
        for descriptor in self._rank_of:
            self._ready.register(descriptor, select.EPOLLIN)
        self._resting: set[int] = set()  # the bells of threads that rest, and
        self._bells: list[int] = []  # those that no thread has

    def open(
        self, name: str, number: int, deliver: Deliver, ranks: Sequence[int] | None = None
    ) -> Channel:
        """Channel `number` of `name`; numbers of one name are opened in rising order.

        `deliver(rank, place, data)` is called for each message; what it sends goes out after that.
        With `ranks`, a rank is numbered by its place among them, and the messages of others are
        dropped.
        """
        key = _key(name)
        if ranks is not None:
            deliver = _renumbered(ranks, deliver)
        with self._lock:  # no thread that looks meanwhile finds it half open
            self._opened[key] = max(number, self._opened.get(key, -1))
            self.channels[key, number] = deliver
            for message in self._early.pop((key, number), []):
                self._early_bytes -= len(message[2])
                deliver(*message)
            self._flush()
        return Channel(self, key, number, ranks)

    def forget(self, name: str) -> None:
        """Close all channels of `name` for good."""
        key = _key(name)
        self._opened[key] = _LAST
        for known in [known for known in list(self.channels) if known[0] == key]:
            self.channels.pop(known, None)
        for known in [known for known in list(self._early) if known[0] == key]:
            self._early_bytes -= sum(len(data) for _, _, data in self._early.pop(known, []))

    def send(self, ranks: Iterable[int], data: bytes) -> None:
        """Queue bytes for `ranks`, and hand the system what it takes."""
        for rank in ranks:
            if rank in self._queues:
                self._queues[rank].append(data)
        with self._lock:
            if not self._busy:  # else this thread is delivering, and sends it next
                self._flush()

    def queued(self, rank: int) -> int:
        """The bytes for `rank` that the system has not taken yet."""
        return sum(map(len, self._queues[rank])) if rank in self._connections else 0

    def poll(self) -> None:
        """Apply what has arrived, and send on what is queued. Never blocks."""
        for progress in self.progress_hooks:
            progress()
        self.receive()

    def rest(self, seconds: float) -> None:
        """Sleep at most `seconds`, until a message comes or another thread receives one.

        With progress hooks the sleep is short, so that they are called again soon.
        """
        if self.progress_hooks:
            seconds = min(seconds, _HOOKED)
        poll = select.poll()
        with self._lock:
            if not self._connections:
                return
            bell = self._bells.pop() if self._bells else os.eventfd(0, _BELL_FLAGS)
            self._resting.add(bell)
            poll.register(self._ready, select.POLLIN)
        try:
            poll.register(bell, select.POLLIN)
            poll.poll(1e3 * seconds)
        finally:
            with self._lock:
                self._resting.discard(bell)
                with suppress(BlockingIOError):
                    os.eventfd_read(bell)
                self._bells.append(bell)

    def nudge(self, ranks: Iterable[int]) -> None:
        """End the sleep of `ranks` that rest, by a message that says nothing."""
        self.send(ranks, _FRAME.pack(_NOTHING, 0, 0, 0))

    def receive(self) -> None:
        """Apply what has arrived. For any thread: unlike `poll`, it runs no progress hooks."""
        with self._lock:
            if self._busy or not self._connections:
                return
            for rank in list(self._in_doubt):
                self._in_doubt.discard(rank)
                self._end(rank)
            try:
                self._busy = True
                ready = self._ready.poll(0)
                for descriptor, _ in ready:
                    self._receive(self._rank_of[descriptor])
            finally:
                self._busy = False
            if ready:
                for bell in self._resting:
                    os.eventfd_write(bell, 1)
            self._waiting.clear()
            if time.monotonic() >= self._next_look:
                self._look_after()
            self._flush()

    def _look_after(self) -> None:
        """Send heartbeats to hosts that acknowledged nothing lately; end those that stay silent."""
        now = time.monotonic()
        self._next_look = now + _BEAT
        for rank, connection in list(self._connections.items()):
            try:
                facts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 64)
                answered = now - _ACKNOWLEDGED.unpack_from(facts)[0] / 1000
            except (OSError, struct.error):  # no connection of TCP's
                continue
            asked = self._asked.get(rank)
            # The system counts in jiffies; what it heard before it was asked is older than a beat.
            if asked is None or answered > asked - _BEAT / 2:
                self._asked.pop(rank, None)
                if answered < now - _BEAT:
                    self._asked[rank] = now
                    self._queues[rank].append(_FRAME.pack(_NOTHING, 0, 0, 0))
            elif now - asked > self._patience:
                self._end(rank)

    def _flush(self) -> None:
        for rank, queue in self._queues.items():
            while queue and rank not in self._waiting and rank in self._connections:
                if rank in self._in_doubt:
                    break
                self._in_doubt.add(rank)
                data = queue.popleft()
                try:
                    sent = self._connections[rank].send(data, socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    sent = 0
                except OSError:
                    sent = len(data)  # the end of the connection is found when it is read
                if sent < len(data):
                    queue.appendleft(data[sent:])
                    self._waiting.add(rank)
                self._in_doubt.discard(rank)

    def _receive(self, rank: int) -> None:
        """Read what `rank` has sent; end the connection if it has been closed."""
        while rank in self._connections:
            self._in_doubt.add(rank)
            try:
                data = self._connections[rank].recv(_READ)
            except BlockingIOError:
                self._in_doubt.discard(rank)
                return
            except OSError:
                data = b""
            buffer = self._received[rank]
            buffer += data
            self._in_doubt.discard(rank)
            if not data or not self._apply(rank):
                self._end(rank)
            elif len(data) < _READ:
                return

    def _apply(self, rank: int) -> bool:
        """Deliver the complete messages that have come from `rank`; False if one is malformed."""
        buffer = self._received[rank]
        while len(buffer) >= _FRAME.size:
            key, number, place, length = _FRAME.unpack_from(buffer)
            if length > _LIMIT:
                return False
            end = _FRAME.size + length
            if end > len(buffer):
                break
            message = bytes(memoryview(buffer)[_FRAME.size : end])
            del buffer[:end]
            if not self._deliver((key, number), rank, place, message):
                return False
        return True

    def _deliver(self, channel: tuple[bytes, int], rank: int, place: int, data: bytes) -> bool:
        deliver = self.channels.get(channel)
        if channel[0] == _NOTHING:
            return True
        if deliver is not None:
            deliver(rank, place, data)
        elif channel[1] > self._opened.get(channel[0], -1):
            self._early_bytes += len(data)
            self._early.setdefault(channel, []).append((rank, place, data))
        return self._early_bytes <= _EARLY_LIMIT

    def _end(self, rank: int) -> None:
        connection = self._connections.pop(rank, None)
        if connection is None:
            return
        self._ready.unregister(connection)
        connection.close()
        self._watch.mark_dead(rank)

    def close(self) -> None:
        """Close the connections once all is acknowledged that was sent, or a second has passed."""
        self.channels.clear()
        self.progress_hooks.clear()
        deadline = time.monotonic() + _DELIVERY
        with self._lock:
            while any(map(self._undelivered, self._connections)) and time.monotonic() < deadline:
                self._waiting.clear()
                self._flush()
                time.sleep(20e-6)
            for connection in self._connections.values():
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_WR)
                connection.close()
            self._close()

    def abandon(self) -> None:
        """Close a forked child's copies of the connections, which its parent goes on using."""
        for connection in self._connections.values():
            connection.close()
        self._close()

    def _close(self) -> None:
        self._connections.clear()
        self._ready.close()
        while self._bells:
            os.close(self._bells.pop())

    def _undelivered(self, rank: int) -> bool:
        """Whether the host of `rank` has not acknowledged all that was sent there."""
        if self._queues[rank]:
            return True
        try:
            raw = fcntl.ioctl(self._connections[rank].fileno(), termios.TIOCOUTQ, bytes(4))
        except (OSError, ValueError):  # it has ended, or was closed here
            return False
        return bool(struct.unpack("i", raw)[0])


def _renumbered(ranks: Sequence[int], deliver: Deliver) -> Deliver:
    """`deliver` for messages of these ranks alone, numbered by their places."""
    number_of = {peer: rank for rank, peer in enumerate(ranks)}

    def translated(peer: int, place: int, data: bytes) -> None:
        if peer in number_of:
            deliver(number_of[peer], place, data)

    return translated


def _key(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=16).digest()
