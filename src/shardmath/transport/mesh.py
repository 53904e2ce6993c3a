"""A socket between every two ranks of one host, for passing descriptors of memory.

The sockets are abstract Unix sockets: no name in the file system, nothing that outlives a process,
nothing reachable from another host. A connection is accepted only from this user, from the process
that announced itself through the group, with the key that it was given there. What travels
afterwards is a short tag and one descriptor; tags are compared with what is expected, never
interpreted.
"""

from __future__ import annotations

import array
import os
import secrets
import select
import socket
import struct
import time
from contextlib import ExitStack, closing
from pathlib import Path

from shardmath import wire
from shardmath.errors import BackendUnavailable, BootstrapError, RankFailure
from shardmath.group.base import ProcessGroup
from shardmath.transport.watch import PeerWatch

__all__ = ["Mesh", "host_identity"]

_HELLO = struct.Struct("=16sI")  # key, rank
_CREDENTIALS = struct.Struct("=iii")  # pid, uid, gid
_TAG_BYTES = 64
_SIZE = struct.Struct("=Q")  # in front of the tag: bytes of the memory, where it cannot say itself
_GRACE = 0.2  # seconds: a dying process closes its sockets first, and counts as dead later


def host_identity() -> str:
    """Names the machine and its network namespace, within which abstract sockets are visible."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/net').readlink()}"


class Mesh:
    """Connections of this rank to all peers of `group`. Collective to create.

    `watch` tells which peers have ended; `pids[rank]` and `hosts[rank]` name them in messages.
    Raises BootstrapError when not all ranks connect within `timeout` seconds.
    """

    def __init__(self, group: ProcessGroup, timeout: float) -> None:
        self.rank = group.rank
        self.size = group.nranks
        self._timeout = timeout
        self._sockets: dict[int, socket.socket] = {}
        self._arrived: dict[int, dict[bytes, tuple[int, int]]] = {}
        with ExitStack() as undo:
            undo.callback(self._close_sockets)
            self._connect(group)
            self.watch = PeerWatch(
                {r: (self._pid(r), s.fileno()) for r, s in self._sockets.items()}
            )
            undo.pop_all()

    def _connect(self, group: ProcessGroup) -> None:
        key = secrets.token_bytes(16)
        name = "\0shardmath-" + secrets.token_hex(16)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(name)
            listener.listen(self.size)
            space = str(Path("/proc/self/ns/pid").readlink())
            card = (host_identity(), os.getpid(), name, key, socket.gethostname(), space)
            cards = [wire.decode(data) for data in group.allgather_bytes(wire.encode(card))]
            self._require_one_host([c[0] for c in cards])
            self.pids = [int(c[1]) for c in cards]
            self.hosts = [str(c[4]) for c in cards]
            deadline = time.monotonic() + self._timeout
            # Until there are sockets to watch, peers are watched by what they say of themselves.
            visible = [r for r in range(self.size) if cards[r][5] == space and r != self.rank]
            with closing(PeerWatch({r: (self.pids[r], -1) for r in visible})) as watch:
                for peer in range(self.rank):
                    self._sockets[peer] = self._call(str(cards[peer][2]), cards[peer][3], watch)
                while len(self._sockets) < self.size - 1:
                    self._answer(listener, key, deadline, watch)

    def _require_one_host(self, identities: list[str]) -> None:
        strangers = [r for r, host in enumerate(identities) if host != identities[0]]
        if strangers:
            raise BackendUnavailable(
                f"ranks {strangers} run on another host (or in another network namespace) than "
                "rank 0; the host transport reaches the memory of one machine only"
            )

    def _call(self, name: str, key: bytes, watch: PeerWatch) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(self._timeout)
            connection.connect(name)
            connection.send(_HELLO.pack(key, self.rank))
        except OSError as error:
            connection.close()
            self._require_alive(watch.wait(_GRACE))
            raise BootstrapError(
                f"rank {self.rank} cannot reach a peer's socket: {error}"
            ) from None
        return connection

    def _answer(
        self, listener: socket.socket, key: bytes, deadline: float, watch: PeerWatch
    ) -> None:
        """Accept one connection; one that is not a peer's is closed and forgotten."""
        missing = [r for r in range(self.rank + 1, self.size) if r not in self._sockets]
        remaining = max(0.0, deadline - time.monotonic())
        waited_for = [listener.fileno(), *watch.descriptors]
        ready = select.select(waited_for, [], [], remaining)[0]
        self._require_alive(watch.dead())
        if not ready:
            raise BootstrapError(
                f"rank {self.rank} waited {self._timeout:.0f} s at start-up for ranks {missing}"
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
            names = ", ".join(f"rank {r} (pid {self.pids[r]})" for r in sorted(dead))
            raise RankFailure(f"rank {self.rank} at start-up: {names} died", sorted(dead))

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

    def send(self, rank: int, tag: str, fd: int, nbytes: int = 0) -> None:
        """Hand a descriptor to `rank` under `tag`. Blocks only while the peer's queue is full.

        `nbytes` says how much memory it stands for, where the descriptor itself cannot.
        """
        assert 0 < len(tag.encode()) <= _TAG_BYTES, tag
        data = _SIZE.pack(nbytes) + tag.encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        try:
            self._sockets[rank].sendmsg([data], rights)
        except OSError as error:
            raise self._lost(rank, f"handing it {tag!r}", error) from None

    def receive(self, rank: int, tag: str) -> int:
        """The descriptor that `rank` sent under `tag`; the caller owns it. See `receive_sized`."""
        return self.receive_sized(rank, tag)[0]

    def receive_sized(self, rank: int, tag: str) -> tuple[int, int]:
        """The descriptor that `rank` sent under `tag`, which the caller owns, and its `nbytes`.

        Others that arrive before it are kept for their own `receive`. Raises RankFailure when the
        peer ends first, or says nothing within the start-up deadline.
        """
        wanted = tag.encode()
        arrived = self._arrived.setdefault(rank, {})
        while wanted not in arrived:
            try:
                data, fds, flags, _ = socket.recv_fds(
                    self._sockets[rank], _SIZE.size + _TAG_BYTES, 1
                )
            except OSError as error:
                raise self._lost(rank, f"waiting for its {tag!r}", error) from None
            if len(data) < _SIZE.size or len(fds) != 1 or flags & socket.MSG_CTRUNC:
                for fd in fds:
                    os.close(fd)
                raise self._lost(rank, f"waiting for its {tag!r}", "its socket has ended")
            arrived[data[_SIZE.size :]] = fds[0], _SIZE.unpack_from(data)[0]
        return arrived.pop(wanted)

    def _lost(self, rank: int, doing: str, error: object) -> RankFailure:
        dead = self.watch.wait(_GRACE)  # a peer that ended because another died is not the cause
        also = f"; dead are ranks {sorted(dead)}" if dead - {rank} else ""
        return RankFailure(
            f"rank {self.rank} lost rank {rank} (pid {self.pids[rank]} on {self.hosts[rank]}) "
            f"while {doing}: {error}{also}",
            sorted(dead) or [rank],
        )

    def _close_sockets(self) -> None:
        for connection in self._sockets.values():
            connection.close()
        for arrived in self._arrived.values():
            for fd, _ in arrived.values():
                os.close(fd)
        self._sockets.clear()
        self._arrived.clear()

    def close(self) -> None:
        """Close every connection."""
        self.watch.close()
        self._close_sockets()
