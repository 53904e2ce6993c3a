"""Strangers: processes that connect to whatever a job's ranks listen at, and are none of them.

A job that starts among strangers has a last rank which halts before each exchange of its start, in
a `Halting` group. At that moment all ranks listen, and the test lets strangers in. So nothing
depends on who is faster.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from shardmath.group import handshake
from shardmath.process_group import ProcessGroup, ReductionOp

__all__ = ["Halting", "Listener", "Strangers", "await_listeners", "descendants"]

Listener = tuple[int, int, Any]  # family, kind and address
_PACE = 0.005  # seconds between two rounds of babbling


class Halting(ProcessGroup):
    """Another group, which calls `halt(n)` before its n-th exchange of bytes, from 0 on."""

    def __init__(self, inner: ProcessGroup, halt: Callable[[int], None]) -> None:
        self._inner = inner
        self._halt = halt
        self._exchanges = 0

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def nranks(self) -> int:
        return self._inner.nranks

    def broadcast_buffer(self, array: Any, *, root: int = 0) -> None:
        self._inner.broadcast_buffer(array, root=root)

    def allreduce_buffer(self, array: Any, *, op: ReductionOp) -> None:
        self._inner.allreduce_buffer(array, op=op)

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        self._halt(self._exchanges)
        self._exchanges += 1
        return self._inner.allgather_bytes(data)


class Strangers:
    """`each` connections to every listener, and a thread that keeps them busy until the end.

    Of four, one is silent, one slowly says what could be a rank's first words, one babbles, and one
    says something that only lacks the key. `calls` counts those that came through.
    """

    def __init__(self, each: int) -> None:
        self.calls = 0
        self._each = each
        self._ended = 0
        self._connections: list[tuple[int, socket.socket]] = []
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._talk, daemon=True)

    def __enter__(self) -> Strangers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for _, connection in self._connections:
            connection.close()

    def visit(self, listeners: Collection[Listener]) -> None:
        """Connect to all of them, as far as they take it."""
        for family, kind, address in listeners:
            for number in range(self._each):
                connection = socket.socket(family, kind)
                connection.setblocking(False)
                if connection.connect_ex(address) not in (0, errno.EINPROGRESS):
                    connection.close()
                    break
                _ready([connection], select.POLLOUT, 5000)  # now it waits to be accepted
                if number % 4 == 3:
                    self._say(connection, _forged())
                with self._lock:
                    self._connections.append((number % 4, connection))
                self.calls += 1
        self.hung_up()

    def hung_up(self) -> int:
        """How many connections the other side has ended so far."""
        with self._lock:
            ended = _ready([each for _, each in self._connections], select.POLLIN, 0)
            left = [each for each in self._connections if each[1].fileno() not in ended]
            for _, connection in self._connections:
                if connection.fileno() in ended:
                    connection.close()
            self._ended += len(ended)
            self._connections = left
        return self._ended

    def _talk(self) -> None:
        words = _forged()
        for turn in range(1 << 30):
            if self._over.wait(_PACE):
                return
            with self._lock:
                connections = list(self._connections)
            for manner, connection in connections:
                if manner == 2:
                    self._say(connection, b"GET / HTTP/1.1\r\n" * 64)
                elif manner == 1 and turn % 100 == 0:
                    self._say(connection, words[turn // 100 :][:1])

    @staticmethod
    def _say(connection: socket.socket, data: Any) -> None:
        try:
            connection.send(bytes(data), socket.MSG_NOSIGNAL)
        except OSError:
            return


def _forged() -> bytes:
    return handshake._MAGIC + struct.pack("<I", 1) + bytes(handshake._HELLO.size - 8)


def _ready(connections: Collection[socket.socket], events: int, milliseconds: int) -> set[int]:
    """The descriptors of those on which something happens within that time."""
    poll = select.poll()
    for connection in connections:
        poll.register(connection, events)
    return {descriptor for descriptor, _ in poll.poll(milliseconds)}


def await_listeners(pids: Callable[[], Collection[int]], size: int, near: bool) -> list[Listener]:
    """Where `size` of the processes listen, as soon as they do: on Unix sockets, or on others."""
    limit = time.monotonic() + 30
    while True:
        found = [_listening(pid) for pid in pids()]
        wanted = [[one for one in each if (one[0] == socket.AF_UNIX) == near] for each in found]
        if sum(map(bool, wanted)) == size:
            return [one for each in wanted for one in each]
        assert time.monotonic() < limit, found
        time.sleep(1e-3)  # no event tells that another process listens


def _listening(pid: int) -> list[Listener]:
    """Where this process listens, but for what it has from this one."""
    inodes = _sockets_of(pid) - _sockets_of(os.getpid())
    found: list[Listener] = []
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "00010000" and fields[6] in inodes and len(fields) > 7:
            name = fields[7].replace("@", "\0", 1)
            found.append((socket.AF_UNIX, int(fields[4], 16), name))
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        path = Path("/proc/net", table)
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                host, port = fields[1].split(":")
                words = struct.unpack(f">{len(host) // 8}I", bytes.fromhex(host))
                number = socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
                found.append((family, socket.SOCK_STREAM, (number, int(port, 16))))
    return found


def _sockets_of(pid: int) -> set[str]:
    """The inodes of the sockets that a process has open."""
    found: set[str] = set()
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            name = str(link.readlink())
            if name.startswith("socket:["):
                found.add(name[8:-1])
    except OSError:
        return found  # it has ended, or closed one meanwhile
    return found


def descendants(pid: int) -> list[int]:
    """The children of a process, and theirs."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [each for child in map(int, children) for each in (child, *descendants(child))]
