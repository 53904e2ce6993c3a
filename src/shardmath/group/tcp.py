"""Ranks that know each other from environment variables alone, and meet over TCP.

Rank 0 listens where the variables say, and is the hub: in one exchange every rank sends it a frame
and receives those of all. Who connects proves first that it has the user's key, and so does rank 0:
see `handshake`. The key is SHARDMATH_KEY, or a file that only the user can read, made when it is
first needed; hosts that share the user's home share it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import select
import socket
import stat
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NoReturn

from shardmath.base.caller import caller_line, process_name
from shardmath.base.config import PREFIX, Settings, config_folder
from shardmath.errors import BootstrapError
from shardmath.group import handshake
from shardmath.group.base import rank_names
from shardmath.group.handshake import KEY_BYTES, Conversation, Stranger
from shardmath.group.local import LocalProcessGroup

Endpoint = tuple[str, int]  # host and port

_PORTS = range(61000, 65500)  # which systems give to nobody of themselves
_PATIENCE = 5.0  # seconds that a stranger has for its first words
_HELD = 64  # connections that have not proved themselves
_LOOK, _LONGEST_LOOK = 1e-3, 0.05  # seconds until the next call to rank 0, before it listens
_SHARE = 0.05  # of the seconds waited so far, within these limits
_LOST = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class TcpProcessGroup(LocalProcessGroup):
    """Ranks on any hosts, which RANK, WORLD_SIZE and MASTER_ADDR, or Slurm's variables, name."""

    def split(self, color: int | None, *, key: int = 0) -> NoReturn:
        """Raises NotImplementedError: sockets of other ranks cannot be handed on between hosts."""
        raise NotImplementedError("TcpProcessGroup cannot be split; split the context")


def connected(rank: int, size: int, hub: Endpoint, settings: Settings) -> TcpProcessGroup:
    """The group of all ranks, of which rank 0 listens at `hub`. Collective.

    Raises BootstrapError when not all come within the start-up's time, and where rank 0 cannot
    listen there.
    """
    timeout, key = settings.startup_timeout, _key(rank, settings)
    deadline = time.monotonic() + timeout
    with ExitStack() as undo:
        if rank == 0:
            sockets = _called(size, hub, key, deadline, timeout, undo)
        else:
            sockets = [_calling(rank, hub, key, deadline, timeout, undo)]
        for each in sockets:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        undo.pop_all()
    return TcpProcessGroup(rank, size, sockets, timeout=timeout)


def hub_of(environ: Mapping[str, str]) -> Endpoint:
    """Where rank 0 listens: as `spawn` says; as MASTER_ADDR and MASTER_PORT say; else the first
    host of Slurm's step, at a port that follows from its number. Raises BootstrapError where none
    of these is known, and where MASTER_PORT is no port.
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


# -- rank 0 ----------------------------------------------------------------------------------------


def _called(
    size: int, hub: Endpoint, key: bytes, deadline: float, timeout: float, undo: ExitStack
) -> list[socket.socket]:
    """Accept all other ranks, and return their connections in the order of the ranks."""
    came: dict[int, socket.socket] = {}
    held: dict[socket.socket, Conversation] = {}
    undo.callback(lambda: _close([*came.values(), *held]))
    nonces: set[bytes] = set()

    def expects(rank: int) -> bool:
        return 0 < rank < size and rank not in came

    with ExitStack() as listening:
        listeners = _listeners(hub, listening)
        while len(came) < size - 1:
            now = time.monotonic()
            if now >= deadline:
                missing = [rank for rank in range(1, size) if rank not in came]
                raise _late(0, f"for {rank_names(missing)}", hub, timeout)
            for connection in [each for each, talk in held.items() if talk.until < now]:
                del held[connection]
                connection.close()
            for ready in _readable([*listeners, *held], min(deadline, now + 1)):
                if ready in held:
                    _hear(ready, held, came)
                elif len(held) < _HELD:
                    with suppress(OSError):
                        connection, _ = ready.accept()
                        side = handshake.answer(key, expects, nonces)
                        until = now + _PATIENCE
                        held[connection] = Conversation(connection, side, until=until)
                        _hear(connection, held, came)
        _close([*held])
        held.clear()
    return [came[rank] for rank in range(1, size)]


def _hear(
    connection: socket.socket,
    held: dict[socket.socket, Conversation],
    came: dict[int, socket.socket],
) -> None:
    """Continue a handshake: move a proven rank from `held` to `came`, and drop a stranger."""
    talk = held[connection]
    try:
        talk.go_on()
    except (Stranger, OSError):
        del held[connection]
        connection.close()
        return
    if talk.result is not None:
        del held[connection]
        came[talk.result] = connection


def _listeners(hub: Endpoint, undo: ExitStack) -> list[socket.socket]:
    found, problem = [], "it has no address"
    for family, address in _addresses(hub):
        listener = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            listener.bind(address)
            listener.listen(_HELD)
        except OSError as error:
            problem = error.strerror or str(error)
            if error.errno in _LOST:
                continue
            break
        listener.setblocking(False)
        found.append(listener)
    if not found:
        raise BootstrapError(
            f"rank 0 ({process_name()}), {caller_line()}: cannot listen at {hub[0]}:{hub[1]}, "
            f"where the other ranks look for it: {problem}; set MASTER_ADDR and MASTER_PORT to an "
            "address and a free port of this host"
        )
    return found


# -- the others ------------------------------------------------------------------------------------


def _calling(
    rank: int, hub: Endpoint, key: bytes, deadline: float, timeout: float, undo: ExitStack
) -> socket.socket:
    """Connect to rank 0, again and again until it listens."""
    problem, start = "it does not answer", time.monotonic()
    while (now := time.monotonic()) < deadline:
        for family, address in _addresses(hub):
            with ExitStack() as attempt:
                connection = attempt.enter_context(socket.socket(family, socket.SOCK_STREAM))
                connection.settimeout(
                    min(_PATIENCE, max(_LONGEST_LOOK, deadline - time.monotonic()))
                )
                try:
                    connection.connect(address)
                    side = handshake.call(key, rank=rank, peer=0)
                    talk = Conversation(connection, side, until=deadline)
                    talk.go_on()
                    # Its words come at once where it is rank 0, unless that has others to hear.
                    while talk.result is None and time.monotonic() < deadline:
                        if _readable([connection], deadline):
                            talk.go_on()
                except Stranger:
                    problem = "what answers there has another key, or is not rank 0"
                    continue
                except OSError as error:
                    problem = error.strerror or str(error)
                    continue
                if talk.result is not None:
                    attempt.pop_all()
                    undo.callback(connection.close)
                    return connection
        time.sleep(min(max(_LOOK, _SHARE * (now - start)), _LONGEST_LOOK))
    raise _late(rank, f"for rank 0: {problem}", hub, timeout)


# -- both ------------------------------------------------------------------------------------------


def _addresses(hub: Endpoint) -> list[tuple[socket.AddressFamily, tuple[object, ...]]]:
    """The addresses that a name resolves to; none if it does not resolve yet."""
    host, port = hub
    try:
        # Of text, Python would make an internationalised name, by a module that is slow to import.
        name = host.encode() if host.isascii() else host
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _readable(sockets: list[socket.socket], until: float) -> list[socket.socket]:
    """The sockets that can be read or have ended; waits for one until the time `until`."""
    waiting, by_descriptor = select.poll(), {each.fileno(): each for each in sockets}
    for descriptor in by_descriptor:
        waiting.register(descriptor, select.POLLIN)
    milliseconds = 1e3 * max(0.0, until - time.monotonic())
    return [by_descriptor[descriptor] for descriptor, _ in waiting.poll(milliseconds)]


def _late(rank: int, what: str, hub: Endpoint, timeout: float) -> BootstrapError:
    return BootstrapError(
        f"rank {rank} ({process_name()}), {caller_line()}: waited {timeout:g} s at {hub[0]}:"
        f"{hub[1]} {what}; does every rank call shardmath.initialize()? SHARDMATH_STARTUP_TIMEOUT "
        "sets how long they are waited for; hosts that share no home need the same SHARDMATH_KEY"
    )


def _close(sockets: list[socket.socket]) -> None:
    for each in sockets:
        each.close()


def _key(rank: int, settings: Settings) -> bytes:
    """The key of this user's ranks. Raises BootstrapError where others could know it."""
    if settings.key:
        return hashlib.blake2b(settings.key.encode(), digest_size=KEY_BYTES).digest()
    path = config_folder() / "key"
    try:
        with suppress(FileNotFoundError):
            return _read_key(path)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = path.with_name(f"key.{os.urandom(8).hex()}")
        new.touch(0o600, exist_ok=False)
        try:
            new.write_bytes(handshake.new_key())
            with suppress(FileExistsError):  # another rank was first
                os.link(new, path)
        finally:
            new.unlink()
        return _read_key(path)
    except BootstrapError:
        raise
    except OSError as error:
        raise BootstrapError(
            f"rank {rank} ({process_name()}): the key of this user's ranks cannot be kept in "
            f"{path} ({error.strerror}): set SHARDMATH_KEY to a secret, the same on all ranks"
        ) from error


def _read_key(path: Path) -> bytes:
    known = path.stat()
    if known.st_uid != os.geteuid() or stat.S_IMODE(known.st_mode) & 0o077:
        raise BootstrapError(f"{path} could be read by others than this user: chmod 600, or remove")
    data = path.read_bytes()
    if len(data) != KEY_BYTES:
        raise BootstrapError(f"{path} is no key of {KEY_BYTES} bytes: remove it")
    return data
