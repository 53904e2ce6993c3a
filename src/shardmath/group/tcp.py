"""Ranks that know each other from environment variables alone, and meet over TCP.

Rank 0 listens where the variables say, and is the hub: in one exchange every rank sends it a frame
and receives those of all. Both sides of a connection first prove that they have the user's key: see
`meeting`. The key is SHARDMATH_KEY, or a file that only the user can read, made when it is first
needed; hosts that share the user's home share it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import ipaddress
import os
import socket
import stat
import struct
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from typing import Any

from shardmath.base.caller import process_name, who
from shardmath.base.config import PREFIX, Settings, config_folder
from shardmath.errors import BootstrapError
from shardmath.group.handshake import KEY_BYTES, new_key
from shardmath.group.liveness import PeerWatch
from shardmath.group.local import LocalProcessGroup
from shardmath.group.meeting import BACKLOG, Call, Place, meet

Endpoint = tuple[str, int]  # host and port

_PORTS = range(61000, 65500)  # which systems give to nobody of themselves
_LOOK = 0.1  # seconds between two tries to resolve the name of rank 0's host
_ADVICE = (
    "; does every rank call shardmath.initialize()? Hosts that share no home need the same "
    "SHARDMATH_KEY"
)
_SIOCGIFADDR, _REQUEST = 0x8915, struct.Struct("16s24x")  # as in <linux/sockios.h> and <net/if.h>
_LOST = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class TcpProcessGroup(LocalProcessGroup):
    """Ranks on any hosts, which RANK, WORLD_SIZE and MASTER_ADDR, or Slurm's variables, name."""


def connected(rank: int, size: int, hub: Endpoint, settings: Settings) -> TcpProcessGroup:
    """The group of all ranks, of which rank 0 listens at `hub`. Collective.

    Raises BootstrapError when not all come within the start-up's time, and where rank 0 cannot
    listen there.
    """
    timeout, key = settings.startup_timeout, _key(rank, settings)
    names = [f"rank {r}" for r in range(size)]
    names[rank] = f"{who(rank)}:"
    with ExitStack() as stack:
        if rank == 0:
            listeners, calls, awaited = _listeners(hub, stack), {}, range(1, size)
        else:
            places = _places(rank, hub, timeout)
            listeners, calls, awaited = [], {0: Call(places, key, patient=True)}, range(0)
        made = meet(
            rank,
            listeners,
            key,
            calls=calls,
            awaited=awaited,
            names=names,
            watch=stack.enter_context(closing(PeerWatch({}))),
            timeout=timeout,
            advice=f"; they meet at {hub[0]}:{hub[1]}{_ADVICE}",
        )
    sockets = [made[peer] for peer in sorted(made)]
    for each in sockets:
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return TcpProcessGroup(rank, size, sockets, timeout=timeout)


def hub_of(environ: Mapping[str, str]) -> Endpoint:
    """Where rank 0 listens: as `spawn` says; as MASTER_ADDR and MASTER_PORT say; else the first
    host of Slurm's step, at a port that follows from its number. Raises BootstrapError where none
    of these is known, and where MASTER_PORT is not a port.
    """
    told, _, number = environ.get(f"{PREFIX}HUB", "").rpartition(":")
    if told and number.isdecimal():
        return told, int(number)
    step = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID")
    nodes = environ.get("SLURM_STEP_NODELIST")
    host = environ.get("MASTER_ADDR") or (nodes and first_host(nodes))
    if host and environ.get("SLURM_STEP_NUM_NODES") == "1" and "MASTER_ADDR" not in environ:
        host = "127.0.0.1"
    port = environ.get("MASTER_PORT", "")
    if not port and None not in step:
        digest = hashlib.blake2b(repr(step).encode(), digest_size=8).digest()
        port = str(_PORTS[int.from_bytes(digest) % len(_PORTS)])
    if not host or not port:
        raise BootstrapError(
            "where rank 0 listens is not known: set MASTER_ADDR and MASTER_PORT, the same on all "
            "ranks, or start the program with srun, which a batch script is not"
        )
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise BootstrapError(
            f"MASTER_PORT={port!r} is no port: set it to a number from 1 to 65535, the same on all "
            "ranks, at which rank 0 can listen"
        )
    return host, int(port)


def first_host(nodes: str) -> str:
    """The first of Slurm's list of hosts, such as `node[07-09,12],gpu3`."""
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return head.partition(",")[0]
    ranges, _, tail = rest.partition("]")
    return head + ranges.partition(",")[0].partition("-")[0] + tail.partition(",")[0]


def _listeners(hub: Endpoint, undo: ExitStack) -> list[socket.socket]:
    found, problem = [], "it has no address"
    for family, address in _addresses(hub):
        listener = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError as error:
            problem = error.strerror or str(error)
            if error.errno in _LOST:
                continue
            break
        found.append(listener)
    if not found:
        raise BootstrapError(
            f"{who(0)}: cannot listen at {hub[0]}:{hub[1]}, "
            f"where the other ranks look for it: {problem}; set MASTER_ADDR and MASTER_PORT to an "
            "address and a free port of this host"
        )
    return found


def _places(rank: int, hub: Endpoint, timeout: float) -> list[Place]:
    """Where rank 0 may listen, once its name resolves, which may be when its host is started."""
    deadline = time.monotonic() + timeout
    while not (found := _addresses(hub)):
        if time.monotonic() >= deadline:
            raise BootstrapError(
                f"{who(rank)}: waited {timeout:g} s, and the "
                f"name of rank 0's host, {hub[0]}, does not resolve: set MASTER_ADDR to an "
                "address of that host"
            )
        time.sleep(_LOOK)
    return [
        Place(f"{address[0]}:{hub[1]}", family, socket.SOCK_STREAM, address)
        for family, address in found
    ]


def _addresses(hub: Endpoint) -> list[tuple[int, Any]]:
    """The addresses that a name resolves to; none if it does not resolve yet."""
    with suppress(OSError):
        return resolved(*hub)
    return []


def resolved(host: str, port: int) -> list[tuple[int, Any]]:
    """The addresses of a host, each behind its family, as sockets take them. Raises OSError where
    the name does not resolve.
    """
    # Of text, Python would make an internationalised name, by a module that is slow to import.
    name = host.encode() if host.isascii() else host
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def leads_back(host: str) -> bool:
    """Whether the address means a host to itself only: loopback, any address, or link-local."""
    number = ipaddress.ip_address(host)
    scoped = number.version == 6 and number.is_link_local
    return number.is_loopback or number.is_unspecified or scoped


def is_known_to_itself_only() -> bool:
    """Whether this host's name has no address, or none by which others reach it."""
    try:
        return all(leads_back(address[0]) for _, address in resolved(socket.gethostname(), 0))
    except OSError:
        return True


def devices() -> list[tuple[str, str]]:
    """The names of this host's network devices that have an IPv4 address, each with the address."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                told = fcntl.ioctl(any_socket, _SIOCGIFADDR, _REQUEST.pack(name.encode()))
                found.append((name, socket.inet_ntoa(told[20:24])))
    return found


def device_towards(hub: Endpoint) -> str:
    """The name of the device by which this host reaches `hub` over IPv4; "" if there is none."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(hub)
        own = probe.getsockname()[0]
        return next((name for name, address in devices() if address == own), "")
    return ""


def has_key(rank: int, settings: Settings) -> bool:
    """Whether there is a key, or a file to keep it in. Raises BootstrapError where others could
    know it.
    """
    try:
        _key(rank, settings)
    except BootstrapError as error:
        if isinstance(error.__cause__, OSError):
            return False
        raise
    return True


def _key(rank: int, settings: Settings) -> bytes:
    """The key of this user's ranks. Raises BootstrapError where others could know it."""
    if settings.key:
        return hashlib.blake2b(settings.key.encode(), digest_size=KEY_BYTES).digest()
    folder = config_folder()
    path = os.path.join(folder, "key")
    try:
        with suppress(FileNotFoundError):
            return _read_key(path)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        new = f"{path}.{os.urandom(8).hex()}"
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(new_key())
            with suppress(FileExistsError):  # another rank was first
                os.link(new, path)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(new)
        return _read_key(path)
    except BootstrapError:
        raise
    except OSError as error:
        raise BootstrapError(
            f"rank {rank} ({process_name()}): the key of this user's ranks cannot be kept in "
            f"{path} ({error.strerror}): set SHARDMATH_KEY to a secret, the same on all ranks"
        ) from error


def _read_key(path: str) -> bytes:
    known = os.stat(path)
    if known.st_uid != os.geteuid() or stat.S_IMODE(known.st_mode) & 0o077:
        raise BootstrapError(f"{path} could be read by others than this user: chmod 600, or remove")
    with open(path, "rb") as file:
        data = file.read()
    if len(data) != KEY_BYTES:
        raise BootstrapError(f"{path} is no key of {KEY_BYTES} bytes: remove it")
    return data
