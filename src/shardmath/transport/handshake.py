"""Connections between ranks of different hosts, made at start-up over TCP.

Both sides prove that they know the key that the listening rank has handed out through the group,
and neither sends it: who has not been in the exchange can neither connect nor pose as a rank. What
travels afterwards is not encrypted, as with MPI and NCCL.

    caller                                   listener
    magic, rank, nonce c              ->
                                      <-     nonce a, mac(key, "answer", c, a, rank)
    mac(key, "call", c, a, rank)      ->
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from shardmath import wire
from shardmath.errors import BootstrapError, RankFailure
from shardmath.group.base import ProcessGroup
from shardmath.transport.liveness import PeerWatch

__all__ = ["connect_far"]

_HELLO = struct.Struct("<4sI16s")  # magic, rank, nonce
_ANSWER = struct.Struct("<16s32s")  # nonce, proof
_MAGIC = b"SMW1"
_PROOF = 32
_GRACE = 0.2  # seconds: a dying process closes its sockets first, and counts as dead later
_HELLO_TIMEOUT = 5.0  # seconds that a connection has to say who it is
_OUTSIDE = ("192.0.2.1", 9)  # an address that routes lead away to; nothing is sent there
_KEEPALIVE = ((4, 10), (5, 5), (6, 3))  # TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_KEEPCNT: 25 s in all


def connect_far(
    group: ProcessGroup, far: Collection[int], *, address: str, timeout: float, watch: PeerWatch
) -> dict[int, socket.socket]:
    """A connection to each of the ranks `far`, which are on other hosts. Collective.

    `address` is where they reach this rank; "" for what can be found out. `watch` tells of ranks
    that end meanwhile. Raises BootstrapError when not all connect within `timeout` seconds,
    RankFailure when one has ended.
    """
    key = secrets.token_bytes(32)
    here = address == "127.0.0.1"
    with ExitStack() as stack:
        listener = stack.enter_context(_listener(here=here, backlog=group.nranks))
        port = int(listener.getsockname()[1])
        names = [address] if address else _addresses()
        endpoints = _gathered(group, (names, port, key), watch)
        deadline = time.monotonic() + timeout
        made: dict[int, socket.socket] = {}
        undo = stack.enter_context(ExitStack())
        undo.callback(_close, made)
        for peer in sorted(far):
            if peer < group.rank:
                names, port, its_key = endpoints[peer]
                try:
                    made[peer] = _call(group.rank, peer, names, port, its_key, deadline)
                except BootstrapError:
                    _require_alive(group.rank, watch.wait(_GRACE))
                    raise
        while missing := sorted(set(far) - set(made)):
            _await_call(group.rank, listener, watch, missing, deadline)
            _answer(listener, key, missing, made, deadline)
        undo.pop_all()
    for connection in made.values():
        _tune(connection)
    return made


def _gathered(group: ProcessGroup, card: object, watch: PeerWatch) -> list[tuple[Any, int, bytes]]:
    try:
        return [wire.decode(data) for data in group.allgather_bytes(wire.encode(card))]
    except RankFailure as error:
        # A rank that ended because another died is not the cause.
        dead = watch.wait(_GRACE) | set(error.ranks)
        names = ", ".join(f"rank {rank}" for rank in sorted(dead))
        raise RankFailure(f"{error}; ended have {names}", sorted(dead)) from None


def _listener(*, here: bool, backlog: int) -> socket.socket:
    if here:
        return socket.create_server(("127.0.0.1", 0), backlog=backlog)
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=backlog)


def _addresses() -> list[str]:
    """Where other hosts may reach this one: what its name stands for, and its way out."""
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(_OUTSIDE)
        found.append(str(probe.getsockname()[0]))
    with suppress(OSError):
        for *_, where in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            found.append(str(where[0]))
    outward = [name for name in found if not name.startswith("127.") and name != "::1"]
    return list(dict.fromkeys(outward)) or ["127.0.0.1"]


def _call(
    rank: int, peer: int, names: Sequence[str], port: int, key: bytes, deadline: float
) -> socket.socket:
    """The connection to `peer`, under the first of its addresses at which it answers."""
    reasons: list[str] = []
    for number, name in enumerate(names):
        left = max(0.1, deadline - time.monotonic()) / (len(names) - number)
        try:
            connection = socket.create_connection((str(name), int(port)), timeout=left)
        except OSError as error:
            reasons.append(f"{name}: {error}")
            continue
        try:
            nonce = secrets.token_bytes(16)
            connection.sendall(_HELLO.pack(_MAGIC, rank, nonce))
            connection.settimeout(max(0.1, deadline - time.monotonic()))
            other, proof = _ANSWER.unpack(_exactly(connection, _ANSWER.size))
            if not hmac.compare_digest(proof, _proof(key, b"answer", nonce, other, rank)):
                raise ConnectionError("what answers there is not that rank")
            connection.sendall(_proof(key, b"call", nonce, other, rank))
        except OSError as error:
            connection.close()
            reasons.append(f"{name}: {error}")
            continue
        return connection
    raise BootstrapError(
        f"rank {rank} cannot reach rank {peer} on another host ({'; '.join(reasons)}); "
        "SHARDMATH_ADDRESS sets the address under which a rank is reached"
    )


def _await_call(
    rank: int, listener: socket.socket, watch: PeerWatch, missing: list[int], deadline: float
) -> None:
    """Return when somebody calls."""
    ready = watch.await_readable(listener.fileno(), deadline - time.monotonic())
    _require_alive(rank, watch.dead())
    if not ready:
        raise BootstrapError(
            f"rank {rank} waited in vain at start-up for ranks {missing} on other hosts"
        )


def _require_alive(rank: int, dead: frozenset[int]) -> None:
    if dead:
        raise RankFailure(f"rank {rank} at start-up: ranks {sorted(dead)} died", sorted(dead))


def _answer(
    listener: socket.socket,
    key: bytes,
    missing: Sequence[int],
    made: dict[int, socket.socket],
    deadline: float,
) -> None:
    """Accept one connection; one that is not a missing rank's is closed and forgotten."""
    connection, _ = listener.accept()
    peer = -1
    try:
        connection.settimeout(max(0.01, min(_HELLO_TIMEOUT, deadline - time.monotonic())))
        magic, said, nonce = _HELLO.unpack(_exactly(connection, _HELLO.size))
        if magic == _MAGIC and said in missing:
            own = secrets.token_bytes(16)
            connection.sendall(_ANSWER.pack(own, _proof(key, b"answer", nonce, own, said)))
            proof = _exactly(connection, _PROOF)
            if hmac.compare_digest(proof, _proof(key, b"call", nonce, own, said)):
                peer = said
    except OSError:
        peer = -1
    if peer < 0:
        connection.close()
    else:
        made[peer] = connection


def _proof(key: bytes, what: bytes, nonce: bytes, other: bytes, rank: int) -> bytes:
    return hmac.digest(key, what + nonce + other + rank.to_bytes(4, "little"), "sha256")


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return bytes(data)


def _tune(connection: socket.socket) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _close(made: dict[int, socket.socket]) -> None:
    for connection in made.values():
        connection.close()
