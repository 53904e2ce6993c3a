"""A socket between every two ranks of one host, for passing descriptors of memory.

Where there are several hosts all ranks are joined by `wires` too, which carry words but no memory.
The sockets are abstract Unix sockets: no name in the file system, nothing that outlives a process,
nothing reachable from another host. A connection is accepted only from this user, from the process
that announced itself through the group, and after a handshake with the key that it was given there.
What travels afterwards is a short tag and one descriptor; tags are compared with what is expected,
never interpreted.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING

from shardmath.errors import CollectiveMismatch, HeapExhausted, RankFailure, ShardmathError
from shardmath.group.base import ProcessGroup
from shardmath.group.handshake import new_key
from shardmath.group.links import too_few_descriptors
from shardmath.group.liveness import GRACE, PeerWatch
from shardmath.group.meeting import BACKLOG, Call, Place, meet
from shardmath.transport.available import limit_reached

if TYPE_CHECKING:
    from shardmath.transport.wires import Wires

_UNIX = (socket.AF_UNIX, socket.SOCK_SEQPACKET)
_CREDENTIALS = struct.Struct("=iii")  # pid, uid, gid
_TAG_BYTES = 64
# In front of the tag: bytes of the memory, where it cannot say itself. Where no descriptor comes
# with it, the length of the tag, behind which it says why.
_SIZE = struct.Struct("=Q")
_WHY_BYTES = 512
_LOOK = 20  # milliseconds between two looks at whether what is awaited can still come


class Mesh:
    """Connections of this rank to all peers of `group`. Collective to create.

    `watch` tells which peers have ended; `pids[rank]` and `hosts[rank]` name them in messages.
    `host_of[rank]` numbers the hosts; where there are several, `wires` join all ranks, else None.
    The ranks are split into `pretended` hosts. `address` is where other hosts reach this one.
    A host that answers nothing for `heartbeat` seconds counts as lost.
    `record` is the descriptor of what this rank records, and `records[rank]` each one's.
    Raises BootstrapError when not all ranks connect within `timeout` seconds.
    """

    def __init__(
        self,
        group: ProcessGroup,
        timeout: float,
        *,
        pretended: int = 1,
        address: str = "",
        record: int = -1,
        heartbeat: float = 2.0,
    ) -> None:
        self.rank = group.rank
        self.size = group.nranks
        self.host_of: tuple[int, ...] = ()
        self.wires: Wires | None = None
        self._pretended = pretended
        self._record = record
        self._heartbeat = heartbeat
        self._identities: list[str] = []
        self._timeout = timeout
        self._sockets: dict[int, socket.socket] = {}
        # By peer and tag, a descriptor and its bytes, or why there is none.
        self._arrived: dict[int, dict[bytes, tuple[int, int] | str]] = {}
        # One thread reads for all; it may enter again, as in transport/cores/host.py.
        self._reading = [threading.RLock() for _ in range(self.size)]
        with ExitStack() as undo:
            undo.callback(self._close_sockets)
            try:
                self._connect(group)
                known = {r: (self._pid(r), s.fileno()) for r, s in self._sockets.items()}
                self.watch = PeerWatch({r: each for r, each in known.items() if self.same_host(r)})
                undo.callback(self.watch.close)
                if len(set(self.host_of)) > 1:
                    self.wires = self._wired(group, address)
            except OSError as error:
                if error.errno == errno.EMFILE:
                    raise too_few_descriptors(self.rank) from error
                raise
            undo.pop_all()

    @property
    def real_hosts(self) -> int:
        """How many machines the ranks are on."""
        return len(set(self._identities))

    @property
    def neighbours(self) -> list[int]:
        """The ranks on this rank's machine, itself included."""
        own = self._identities[self.rank]
        return [rank for rank, identity in enumerate(self._identities) if identity == own]

    @property
    def neighbour_pids(self) -> list[int]:
        """The processes of the `neighbours`."""
        return [self.pids[rank] for rank in self.neighbours]

    @property
    def common_file(self) -> str:
        """A file that all `neighbours` can open, the record of the first of them."""
        first = self.neighbours[0]
        return f"/proc/{self.pids[first]}/fd/{self.records[first]}"

    def same_host(self, rank: int) -> bool:
        """Whether `rank` is on this rank's host, and so has addresses here."""
        return self.host_of[rank] == self.host_of[self.rank]

    def _wired(self, group: ProcessGroup, address: str) -> Wires:
        from shardmath.transport.far import connect_far
        from shardmath.transport.wires import Wires

        where = "127.0.0.1" if self.real_hosts == 1 else address
        known = {r: (self._pid(r), s.fileno()) for r, s in self._sockets.items()}
        with closing(PeerWatch(known)) as watch:
            made = connect_far(
                group, address=where, timeout=self._timeout, watch=watch, names=self.names
            )
        return Wires(made, self.watch, self._heartbeat)

    def _connect(self, group: ProcessGroup) -> None:
        key = new_key()
        name = "\0shardmath-" + os.urandom(16).hex()
        with socket.socket(*_UNIX) as listener:
            listener.bind(name)
            listener.listen(BACKLOG)
            space = os.readlink("/proc/self/ns/pid")
            own = host_identity()
            facts = socket.gethostname(), space, self._pretended, self._record
            card = (own, os.getpid(), name, key, *facts)
            cards = group.allgather_values(card)
            self._identities = [str(c[0]) for c in cards]
            self.host_of = hosts_of(self._identities, [int(c[6]) for c in cards])
            here = [r for r in range(self.size) if self._identities[r] == own]
            self.pids = [int(c[1]) for c in cards]
            self.hosts = [str(c[4]) for c in cards]
            self.records = [int(c[7]) for c in cards]
            # Until there are sockets to watch, peers are watched by what they say of themselves.
            visible = [r for r in here if cards[r][5] == space and r != self.rank]
            with closing(PeerWatch({r: (self.pids[r], -1) for r in visible})) as watch:
                self._sockets = meet(
                    self.rank,
                    [listener],
                    key,
                    calls={r: _call(*cards[r][2:4]) for r in here if r < self.rank},
                    awaited=[r for r in here if r > self.rank],
                    names=self.names,
                    watch=watch,
                    timeout=self._timeout,
                    admits=self._admits,
                )
        for connection in self._sockets.values():
            connection.settimeout(self._timeout)

    @property
    def names(self) -> list[str]:
        """The ranks, as messages name them."""
        return [
            f"rank {r} (pid {pid} on {host})"
            for r, (pid, host) in enumerate(zip(self.pids, self.hosts, strict=True))
        ]

    def _admits(self, connection: socket.socket, peers: Collection[int]) -> bool:
        """Whether a process of this user, and of one of these ranks, is at the other end.

        Processes of other namespaces have no number here: of those the key says who they are.
        """
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        return bool(uid == os.geteuid() and pid in (0, *(self.pids[peer] for peer in peers)))

    def _pid(self, rank: int) -> int:
        """The peer's process id as this process sees it; 0 where it is not visible."""
        raw = self._sockets[rank].getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
        pid = int(_CREDENTIALS.unpack(raw)[0])
        return pid if pid == self.pids[rank] else 0

    def name(self, rank: int) -> str:
        """A rank of the job and its process, for messages."""
        return self.names[rank]

    def send(self, rank: int, tag: str, fd: int, nbytes: int = 0) -> None:
        """Hand a descriptor to `rank` under `tag`. Blocks only while the peer's queue is full.

        `nbytes` says how much memory it stands for, where the descriptor itself cannot.
        """
        assert 0 < len(tag.encode()) <= _TAG_BYTES, tag
        data = _SIZE.pack(nbytes) + tag.encode()
        self._send(rank, tag, data, [fd])

    def refuse(self, rank: int, tag: str, why: str) -> None:
        """Send `rank`, in place of the descriptor under `tag`, the reason why there is none."""
        text = f"{self.name(self.rank)}: {why}".encode()[:_WHY_BYTES]
        self._send(rank, tag, _SIZE.pack(len(tag.encode())) + tag.encode() + text, [])

    def _send(self, rank: int, tag: str, data: bytes, fds: list[int]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._sockets[rank].sendmsg([data], rights)
        except OSError as error:
            raise self._lost(rank, f"handing it {tag!r}", error) from None

    def receive(self, rank: int, tag: str, watch: Callable[[], None] = lambda: None) -> int:
        """The descriptor that `rank` sent under `tag`; the caller owns it. See `receive_sized`.

        Meanwhile `watch()` is called now and then: it raises where nothing will come.
        """
        waiting = select.poll()
        waiting.register(self._sockets[rank], select.POLLIN)
        deadline = time.monotonic() + self._timeout
        while tag.encode() not in self._arrived.get(rank, ()) and time.monotonic() < deadline:
            if waiting.poll(_LOOK):
                with self._reading[rank]:
                    if waiting.poll(0):
                        self._read(rank, tag, self._arrived.setdefault(rank, {}))
                continue
            try:
                watch()
            except ShardmathError:
                if not waiting.poll(0):  # a peer may send it and then end
                    raise
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
        while (outcome := arrived.pop(wanted, None)) is None:
            with self._reading[rank]:
                if wanted not in arrived:
                    self._read(rank, tag, arrived)
        if isinstance(outcome, str):
            arrived[wanted] = outcome  # for good: it is not sent again, but after a recovery
            raise HeapExhausted(outcome)
        return outcome

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
            for rank, outcomes in self._arrived.items()
            for tag, outcome in list(outcomes.items())
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
        dead = self.watch.wait(GRACE)  # a peer that ended because another died is not the cause
        if self.wires is not None:  # which tell the watch of peers on other hosts
            self.wires.receive()
            dead = self.watch.dead()
        names = ", ".join(map(self.name, sorted(dead)))
        also = f"; dead: {names}" if dead - {rank} else ""
        return RankFailure(
            f"{self.name(rank)} was lost while {doing}: {error}{also}; call recover() of the "
            "context on all ranks that remain, or finalize and initialize",
            sorted(dead) or [rank],
        )

    def abandon(self) -> None:
        """Close a forked child's copies of connections to other hosts; its parent keeps them."""
        if self.wires is not None:
            self.wires.abandon()

    def _close_sockets(self) -> None:
        for connection in self._sockets.values():
            connection.close()
        for arrived in self._arrived.values():
            while arrived:
                _, outcome = arrived.popitem()
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


def host_identity() -> str:
    """Names the machine and its network namespace, within which abstract sockets are visible."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}/{os.readlink('/proc/self/ns/net')}"


def hosts_of(identities: Sequence[str], pretended: Sequence[int]) -> tuple[int, ...]:
    """The number of each rank's host, in order of appearance.

    All of `pretended` are equal: into so many hosts the ranks are split, as evenly as possible,

        rank   0 1 2 3 4
        host   0 0 0 1 1      of 2

    and two ranks share a host when they share the real and the pretended one. Raises
    CollectiveMismatch where `pretended` differ, ValueError where they are less than 1.
    """
    if len(set(pretended)) > 1:
        raise CollectiveMismatch(
            f"SHARDMATH_FAKE_HOSTS must be equal on all ranks; it is {list(pretended)}"
        )
    count, size = pretended[0], len(identities)
    if count < 1:
        raise ValueError(f"SHARDMATH_FAKE_HOSTS={count}: there is 1 host at least")
    keys = [(name, rank * count // size) for rank, name in enumerate(identities)]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return tuple(numbers[key] for key in keys)


def _call(name: str, key: bytes) -> Call:
    """How to call a peer that has told where its Unix socket is, and its key."""
    return Call([Place(f"socket {name[1:]}", *_UNIX, name)], key)
