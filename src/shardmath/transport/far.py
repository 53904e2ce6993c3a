"""Connections between ranks of different hosts, made at start-up over TCP.

A rank listens at the addresses that it tells its peers, and at no others: at those that
SHARDMATH_ADDRESS names, else at those by which this host is known and reaches others, else at those
of its network devices.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

from shardmath.base.config import environment
from shardmath.errors import BootstrapError, RankFailure
from shardmath.group.base import ProcessGroup, rank_names
from shardmath.group.handshake import new_key
from shardmath.group.links import too_few_descriptors
from shardmath.group.liveness import GRACE, PeerWatch
from shardmath.group.meeting import BACKLOG, Call, Place, meet
from shardmath.group.tcp import Endpoint, devices, hub_of, leads_back, resolved

# Addresses that routes lead away to; nothing is sent there. The second, where the first has none.
_OUTSIDE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
_KEEPALIVE = ((4, 10), (5, 5), (6, 3))  # TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_KEEPCNT: 25 s in all
_ADVICE = "; SHARDMATH_ADDRESS sets the address at which other hosts reach a rank"


def connect_far(
    group: ProcessGroup, *, address: str, timeout: float, watch: PeerWatch, names: Sequence[str]
) -> dict[int, socket.socket]:
    """A connection to each of the other ranks. Collective.

    `address` is where they reach this rank; "" for what can be found out. `watch` tells of ranks
    that end meanwhile; `names[r]` is rank r in messages. Raises BootstrapError when not all connect
    within `timeout` seconds, or one has no address to listen at, RankFailure when one has ended.
    """
    rank, key = group.rank, new_key()
    endpoints: list[Endpoint] = []
    listeners: list[socket.socket] = []
    problem = ""
    with ExitStack() as stack:
        try:
            endpoints, listeners = listen(address)
            for listener in listeners:
                stack.enter_context(listener)
        except OSError as error:  # the others wait for this rank's card: it says why there is none
            short = error.errno == errno.EMFILE
            problem = str(too_few_descriptors(rank)) if short else f"{names[rank]} {error}"
        cards = _gathered(group, (endpoints, key, problem), watch)
        problems = [said for _, _, said in cards if said]
        if problems:
            raise BootstrapError("; ".join(problems))
        made = meet(
            rank,
            listeners,
            key,
            calls={r: _call(told, its_key) for r, (told, its_key, _) in enumerate(cards[:rank])},
            awaited=range(rank + 1, group.nranks),
            names=names,
            watch=watch,
            timeout=timeout,
            advice=_ADVICE,
        )
    for connection in made.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            with suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


def listen(address: str) -> tuple[list[Endpoint], list[socket.socket]]:
    """The endpoints to tell the peers, and the sockets that listen there.

    `address`, a name or a number, is where they reach this host. Where this host does
    not have that address, as behind address translation, the peers are told `address`, and this
    rank listens where it reaches others. Raises OSError, in words, where it can listen nowhere.
    """
    with ExitStack() as undo:
        reasons: list[str] = []
        listeners = _bound(_own(address) if address else _outward(), reasons, undo)
        endpoints = [_endpoint(listener) for listener in listeners]
        if address and not listeners:
            listeners = _bound(_outward(), reasons, undo)
            endpoints = [(address, _endpoint(listener)[1]) for listener in listeners]
        if not listeners:
            raise OSError(f"can listen nowhere ({'; '.join(reasons)}){_ADVICE}")
        undo.pop_all()
        return endpoints, listeners


def _bound(
    addresses: Sequence[tuple[int, Any]], reasons: list[str], undo: ExitStack
) -> list[socket.socket]:
    """Sockets that listen at those of the (family, address) pairs that belong to this host."""
    listeners = []
    for family, address in addresses:
        if ipaddress.ip_address(address[0]).is_unspecified:
            reasons.append(f"{address[0]}: it stands for all addresses")
            continue
        try:
            listener = socket.create_server(address, family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno == errno.EMFILE:
                raise
            reasons.append(f"{address[0]}: {error.strerror}")
        else:
            listeners.append(undo.enter_context(listener))
    return listeners


def _own(name: str) -> list[tuple[int, Any]]:
    """The addresses of `name`, without those that lead back to the caller unless `name` is one."""
    with suppress(OSError):
        addresses = resolved(name, 0)
        return [a for a in addresses if a[1][0] == name or not leads_back(a[1][0])]
    return []


def _outward() -> list[tuple[int, Any]]:
    """The addresses by which this host reaches the one where ranks meet, if that is known.

    Else those of its default route and of its own name; on a host with neither, whose name means
    loopback, those of its network devices; without any, loopback.
    """
    addresses: list[tuple[int, Any]] = []
    with suppress(OSError):  # BootstrapError is an OSError: nobody says where they meet
        for family, where in resolved(*hub_of(environment())):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(where)
                addresses += resolved(probe.getsockname()[0], 0)
    towards = [each for each in dict.fromkeys(addresses) if not leads_back(each[1][0])]
    if towards:
        return towards
    for family, outside in _OUTSIDE:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((outside, 9))
            if not addresses:
                addresses += resolved(probe.getsockname()[0], 0)
    with suppress(OSError):
        addresses += resolved(socket.gethostname(), 0)
    outward = [address for address in addresses if not leads_back(address[1][0])]
    loopback = [(int(socket.AF_INET), ("127.0.0.1", 0))]
    return list(dict.fromkeys(outward)) or _of_devices() or loopback


def _of_devices() -> list[tuple[int, Any]]:
    """The IPv4 addresses of this host's network devices but loopback."""
    found = [address for _, host in devices() for address in resolved(host, 0)]
    return [address for address in found if not leads_back(address[1][0])]


def _endpoint(listener: socket.socket) -> Endpoint:
    """The address and port at which a socket listens; link-local addresses include the link."""
    numeric = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    host, port = socket.getnameinfo(listener.getsockname(), numeric)
    return host, int(port)


def _call(endpoints: Sequence[Endpoint], key: bytes) -> Call:
    """How to call a peer that listens at `endpoints` and has given out `key`."""
    places: list[Place] = []
    reasons: list[str] = []
    for host, port in endpoints:
        try:
            addresses = resolved(host, port)
        except OSError as error:
            reasons.append(f"{host}: {error.strerror}")
            continue
        for family, where in addresses:
            name = f"{host} port {port}" if host == where[0] else f"{host} ({where[0]}) port {port}"
            places.append(Place(name, family, socket.SOCK_STREAM, where))
    return Call(places, key, reasons)


def _gathered(group: ProcessGroup, card: object, watch: PeerWatch) -> list[Any]:
    try:
        return group.allgather_values(card)
    except RankFailure as error:
        # A rank that ended because another died is not the cause.
        dead = sorted(watch.wait(GRACE) | set(error.ranks))
        raise RankFailure(f"{error}; ended have {rank_names(dead)}", dead) from None
