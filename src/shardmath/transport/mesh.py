"""A socket between every two ranks of one host, for passing descriptors of memory.

Where there are several hosts all ranks are joined by `wires` too, which carry words but no memory.
The sockets are abstract Unix sockets: no name in the file system, nothing that outlives a process,
nothing reachable from another host. A connection is accepted only from this user, from the process
that announced itself through the group, with the key that it was given there. What travels
afterwards is a short tag and one descriptor; tags are compared with what is expected, never
interpreted.
"""

from __future__ import annotations

import array
import errno
import os
import secrets
import select
import socket
import struct
import threading
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from shardmath import wire
from shardmath.caller import caller_line
from shardmath.errors import BootstrapError, HeapExhausted, RankFailure
from shardmath.group.base import ProcessGroup
from shardmath.group.links import too_few_descriptors
from shardmath.transport.available import limit_reached
from shardmath.transport.handshake import connect_far
from shardmath.transport.hosts import host_identity, hosts_of
from shardmath.transport.liveness import PeerWatch
from shardmath.transport.wires import Wires

__all__ = ["Mesh"]

_HELLO = struct.Struct("=16sI")  # key, rank
_CREDENTIALS = struct.Struct("=iii")  # pid, uid, gid
_TAG_BYTES = 64
# In front of the tag: bytes of the memory, where it cannot say itself. Where no descriptor comes
# with it, the length of the tag, behind which it says why.
_SIZE = struct.Struct("=Q")
_WHY_BYTES = 512
_NAMED = 8  # ranks of a message, at most
_GRACE = 0.2  # seconds: a dying process closes its sockets first, and counts as dead later


class Mesh:
    """Connections of this rank to all peers of `group`. Collective to create.

    `watch` tells which peers have ended; `pids[rank]` and `hosts[rank]` name them in messages.
    `host_of[rank]` numbers the hosts; where there are several, `wires` join all ranks, else None.
    The ranks are split into `pretended` hosts. `address` is where other hosts reach this one.
    Raises BootstrapError when not all ranks connect within `timeout` seconds.
    """

    def __init__(
        self, group: ProcessGroup, timeout: float, *, pretended: int = 1, address: str = ""
    ) -> None:
        self.rank = group.rank
        self.size = group.nranks
        self.host_of: tuple[int, ...] = ()
        self.wires: Wires | None = None
        self._pretended = pretended
        self._identities: list[str] = []
        self._timeout = timeout
        self._sockets: dict[int, socket.socket] = {}
        # By peer and tag, a descriptor and its bytes, or why there is none.
        self._arrived: dict[int, dict[bytes, tuple[int, int] | str]] = {}
        self._reading = [threading.Lock() for _ in range(self.size)]  # one reads for all threads
        with ExitStack() as undo:
            undo.callback(self._close_sockets)
            try:
                self._connect(group)
                self.watch = PeerWatch(
                    {
                        r: (self._pid(r), s.fileno())
                        for r, s in self._sockets.items()
                        if self.near(r)
                    }
                )
            except OSError as error:
                if error.errno == errno.EMFILE:
                    raise too_few_descriptors(self.rank) from error
                raise
            undo.callback(self.watch.close)
            if self.spans_hosts:
                self.wires = self._wired(group, address)
            undo.pop_all()

    @property
    def spans_hosts(self) -> bool:
        """Whether some ranks are on different hosts, pretended ones counted."""
        return len(set(self.host_of)) > 1

    @property
    def real_hosts(self) -> int:
        """How many machines the ranks are on."""
        return len(set(self._identities))

    @property
    def neighbours(self) -> int:
        """How many ranks are on this rank's machine, itself included."""
        return self._identities.count(self._identities[self.rank])

    def near(self, rank: int) -> bool:
        """Whether `rank` is on this rank's host, and so has addresses here."""
        return self.host_of[rank] == self.host_of[self.rank]

    def _wired(self, group: ProcessGroup, address: str) -> Wires:
        others = [rank for rank in range(self.size) if rank != self.rank]
        where = "127.0.0.1" if self.real_hosts == 1 else address
        known = {r: (self._pid(r), s.fileno()) for r, s in self._sockets.items()}
        with closing(PeerWatch(known)) as watch:
            try:
                made = connect_far(group, others, address=where, timeout=self._timeout, watch=watch)
            except (BootstrapError, RankFailure) as error:
                ranks = getattr(error, "ranks", ()) or others
                names = ", ".join(map(self.name, ranks[:_NAMED]))
                error.add_note(f"Here is {self.name(self.rank)}, {caller_line()}; there: {names}.")
                raise
        return Wires(made, self.watch)

    def _connect(self, group: ProcessGroup) -> None:
        key = secrets.token_bytes(16)
        name = "\0shardmath-" + secrets.token_hex(16)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(name)
            listener.listen(self.size)
            space = str(Path("/proc/self/ns/pid").readlink())
            own = host_identity()
            card = (own, os.getpid(), name, key, socket.gethostname(), space, self._pretended)
            cards = [wire.decode(data) for data in group.allgather_bytes(wire.encode(card))]
            self._identities = [str(c[0]) for c in cards]
            self.host_of = hosts_of(self._identities, [int(c[6]) for c in cards])
            here = [r for r in range(self.size) if self._identities[r] == own]
            self.pids = [int(c[1]) for c in cards]
            self.hosts = [str(c[4]) for c in cards]
            deadline = time.monotonic() + self._timeout
            # Until there are sockets to watch, peers are watched by what they say of themselves.
            visible = [r for r in here if cards[r][5] == space and r != self.rank]
            with closing(PeerWatch({r: (self.pids[r], -1) for r in visible})) as watch:
                for peer in here[: here.index(self.rank)]:
                    called, known = str(cards[peer][2]), cards[peer][3]
                    self._sockets[peer] = self._call(called, known, deadline, watch)
                while missing := [r for r in here if r > self.rank and r not in self._sockets]:
                    self._answer(listener, key, missing, deadline, watch)

    def _call(self, name: str, key: bytes, deadline: float, watch: PeerWatch) -> socket.socket:
        """A connection to the peer that listens there.

        A peer waits for a word no longer than `_answer` says. Where this process came too late with
        it, on a busy machine, it calls again.
        """
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                connection.settimeout(self._timeout)
                connection.connect(name)
                connection.send(_HELLO.pack(key, self.rank))
                return connection
            except OSError as error:
                connection.close()
                self._require_alive(watch.wait(_GRACE))
                late = isinstance(error, BrokenPipeError | ConnectionResetError)
                if not late or time.monotonic() > deadline:
                    raise BootstrapError(
                        f"{self.name(self.rank)} in initialize, {caller_line()}: cannot reach a "
                        f"peer's socket: {error}"
                    ) from None

    def _answer(
        self,
        listener: socket.socket,
        key: bytes,
        missing: list[int],
        deadline: float,
        watch: PeerWatch,
    ) -> None:
        """Accept one connection; one that is not a peer's is closed and forgotten."""
        remaining = max(0.0, deadline - time.monotonic())
        ready = watch.await_readable(listener.fileno(), remaining)
        self._require_alive(watch.dead())
        if not ready:
            names = ", ".join(map(self.name, missing))
            raise BootstrapError(
                f"{self.name(self.rank)} in initialize, {caller_line()}: waited "
                f"{self._timeout:.0f} s for {names}; SHARDMATH_STARTUP_TIMEOUT sets the limit"
            )
        connection, _ = listener.accept()
        connection.settimeout(max(0.01, min(1.0, remaining)))
        try:
            hello = connection.recv(_HELLO.size + 1)
        except OSError:
            hello = b""
        if len(hello) == _HELLO.size:
            said_key, peer = _HELLO.unpack(hello)
            genuine = secrets.compare_digest(said_key, key) and peer in missing
            if genuine and self._is_process_of(connection, peer):
                connection.settimeout(self._timeout)
                self._sockets[peer] = connection
                return
        connection.close()

    def _require_alive(self, dead: frozenset[int]) -> None:
        if dead:
            names = ", ".join(map(self.name, sorted(dead)))
            raise RankFailure(
                f"{self.name(self.rank)} in initialize, {caller_line()}: {names} died at start-up; "
                "start the job again",
                sorted(dead),
            )

    def _is_process_of(self, connection: socket.socket, peer: int) -> bool:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        return bool(uid == os.getuid() and pid in (0, self.pids[peer]))

    def _pid(self, rank: int) -> int:
        """The peer's process id as this process sees it; 0 where it is not visible."""
        raw = self._sockets[rank].getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
        pid = int(_CREDENTIALS.unpack(raw)[0])
        return pid if pid == self.pids[rank] else 0

    def name(self, rank: int) -> str:
        """A rank of the job and its process, for messages."""
        return f"rank {rank} (pid {self.pids[rank]} on {self.hosts[rank]})"

    def send(self, rank: int, tag: str, fd: int, nbytes: int = 0) -> None:
        """Hand a descriptor to `rank` under `tag`. Blocks only while the peer's queue is full.

        `nbytes` says how much memory it stands for, where the descriptor itself cannot.
        """
        assert 0 < len(tag.encode()) <= _TAG_BYTES, tag
        data = _SIZE.pack(nbytes) + tag.encode()
        self._send(rank, tag, data, [fd])

    def refuse(self, rank: int, tag: str, why: str) -> None:
        """Tell `rank`, instead of `send`, why it does not get what it waits for under `tag`."""
        text = f"{self.name(self.rank)}: {why}".encode()[:_WHY_BYTES]
        self._send(rank, tag, _SIZE.pack(len(tag.encode())) + tag.encode() + text, [])

    def _send(self, rank: int, tag: str, data: bytes, fds: list[int]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._sockets[rank].sendmsg([data], rights)
        except OSError as error:
            raise self._lost(rank, f"handing it {tag!r}", error) from None

    def receive(self, rank: int, tag: str) -> int:
        """The descriptor that `rank` sent under `tag`; the caller owns it. See `receive_sized`."""
        return self.receive_sized(rank, tag)[0]

    def receive_sized(self, rank: int, tag: str) -> tuple[int, int]:
        """The descriptor that `rank` sent under `tag`, which the caller owns, and its `nbytes`.

        Others that arrive before it are kept for their own `receive`, which may be another
        thread's: of several that wait for one peer, one reads the socket for all. Raises
        RankFailure when the peer ends first, or says nothing within the start-up deadline;
        HeapExhausted where the peer has refused it, or no descriptor is left for it here.
        """
        wanted = tag.encode()
        arrived = self._arrived.setdefault(rank, {})
        while (found := arrived.pop(wanted, None)) is None:
            with self._reading[rank]:
                if wanted not in arrived:
                    self._read(rank, tag, arrived)
        if isinstance(found, str):
            arrived[wanted] = found  # for good: it is not sent again, but after a recovery
            raise HeapExhausted(found)
        return found

    def arrived(self, prefix: str) -> list[tuple[int, int]]:
        """(rank, number) of the descriptors under `prefix` and a number that no call has received.

        What the peers have sent is read as far as it is there: their queues are empty then.
        """
        for rank, connection in self._sockets.items():
            waiting = select.poll()
            waiting.register(connection, select.POLLIN)
            with self._reading[rank], suppress(RankFailure):  # of a peer that has ended
                while waiting.poll(0):
                    self._read(rank, prefix, self._arrived.setdefault(rank, {}))
        start = prefix.encode()
        return [
            (rank, int(tag[len(start) :]))
            for rank, found in self._arrived.items()
            for tag, outcome in list(found.items())
            if tag.startswith(start) and not isinstance(outcome, str)
        ]

    def _read(self, rank: int, awaited: str, arrived: dict[bytes, tuple[int, int] | str]) -> None:
        """Put the next descriptor of `rank`, or why there is none, among `arrived`, by its tag."""
        doing = f"waiting for its {awaited!r}"
        try:
            most = _SIZE.size + _TAG_BYTES + _WHY_BYTES
            data, fds, flags, _ = socket.recv_fds(self._sockets[rank], most, 1)
        except OSError as error:
            raise self._lost(rank, doing, error) from None
        if len(data) < _SIZE.size:
            for fd in fds:
                os.close(fd)
            raise self._lost(rank, doing, "its socket has ended")
        size, tag = _SIZE.unpack_from(data)[0], data[_SIZE.size :]
        if not fds and not flags & socket.MSG_CTRUNC:  # refused
            arrived[tag[:size]] = tag[size:].decode(errors="replace")
            return
        before = arrived.get(tag)
        if fds:
            arrived[tag] = fds[0], size
            if isinstance(before, tuple):  # sent again after a recovery
                os.close(before[0])
        elif before is None:  # the system had no descriptor for this process
            reached = limit_reached(OSError(errno.EMFILE, ""))
            arrived[tag] = f"memory of {self.name(rank)} cannot be attached: {reached}"

    def _lost(self, rank: int, doing: str, error: object) -> RankFailure:
        dead = self.watch.wait(_GRACE)  # a peer that ended because another died is not the cause
        names = ", ".join(map(self.name, sorted(dead)))
        also = f"; dead: {names}" if dead - {rank} else ""
        return RankFailure(
            f"{self.name(rank)} was lost while {doing}: {error}{also}; call recover() of the "
            "context on all ranks that remain, or finalize and initialize",
            sorted(dead) or [rank],
        )

    def abandon(self) -> None:
        """Close this process's ends to other hosts: they are another process's, its parent's."""
        if self.wires is not None:
            self.wires.abandon()

    def _close_sockets(self) -> None:
        for connection in self._sockets.values():
            connection.close()
        for arrived in self._arrived.values():
            for outcome in arrived.values():
                if not isinstance(outcome, str):
                    os.close(outcome[0])
        self._sockets.clear()
        self._arrived.clear()

    def close(self) -> None:
        """Close every connection."""
        if self.wires is not None:
            self.wires.close()
        self.watch.close()
        self._close_sockets()
