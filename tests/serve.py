"""A rank of a test pool: it runs what the parent says, and answers.

A forked rank calls `serve`; a launcher starts this file, `serve.py ADDRESS LIBRARY`, on every rank,
which then finds its group as a user's program would: from the environment, or, if a library is
named, from that library's communicator.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardmath.base import config, wire
from shardmath.group import as_process_group
from shardmath.group.environment import LaunchFacts
from shardmath.launch.failure import from_exception

__all__ = ["CALL", "END", "FAILED", "GREETING", "name_of", "receive", "send", "serve"]

GREETING, CALL, END, RETURNED, FAILED = b"G", b"C", b"E", b"R", b"F"
_HEADER = struct.Struct("<cQ")


def send(channel: socket.socket, kind: bytes, payload: bytes = b"") -> None:
    """Send one message."""
    channel.sendall(_HEADER.pack(kind, len(payload)) + payload)


def receive(channel: socket.socket) -> tuple[bytes, bytes] | None:
    """One message, or None at the end of the stream."""
    header = channel.recv(_HEADER.size, socket.MSG_WAITALL)
    if len(header) < _HEADER.size:
        return None
    kind, length = _HEADER.unpack(header)
    data = bytearray()
    while len(data) < length:
        part = channel.recv(min(length - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return kind, bytes(data)


def name_of(function: Callable[..., Any]) -> str:
    """What `find` takes: the module (of all the files conftest.py, which one) and the name."""
    module = function.__module__
    where = function.__code__.co_filename if module == "conftest" else module
    return f"{where}:{function.__qualname__}"


def find(name: str) -> Any:
    """The function of that name."""
    where, _, qualname = name.rpartition(":")
    if where.endswith(".py"):
        spec = importlib.util.spec_from_file_location(f"conftest of {Path(where).parent}", where)
        assert spec is not None and spec.loader is not None, where
        found: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    else:
        found = importlib.import_module(where)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def serve(
    rank: int,
    channel: socket.socket,
    group: Callable[[int], Any],
    known: dict[str, Callable[[Any], Any]],
) -> None:
    """Be a rank until the parent ends it or closes the channel.

    `group(size)` is that of the first `size` ranks. `known` has set-ups that need not be found.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    states: dict[tuple[str, int], Any] = {}
    while True:
        command = receive(channel)
        if command is None or command[0] == END:
            return
        try:
            name, path, size, setup, args = wire.decode(command[1])
            sys.path[:] = path
            if (setup, size) not in states:
                make = known[setup] if setup in known else find(setup)
                states[setup, size] = make(group(size))
            kind, payload = RETURNED, wire.encode(find(name)(states[setup, size], *args))
        except BaseException as error:
            failure = from_exception(rank, error, hide=(__file__,))
            kind, payload = FAILED, failure.encode()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        send(channel, kind, payload)


def communicator(library: str) -> Any:
    """What a program passes to `initialize`: nothing, or a communicator of all ranks."""
    if library == "mpi4py":
        from mpi4py import MPI

        return MPI.COMM_WORLD.Dup()
    if library == "torch":
        import torch.distributed

        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        return torch.distributed.new_group()
    return None


def main(address: str, library: str = "") -> None:
    """Be a rank that a launcher has started; the parent is told which, and where its stack is."""
    facts = LaunchFacts.from_mapping(config.environment(), pid=os.getpid())
    stack = os.memfd_create(f"stack of rank {facts.rank}")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect("\0" + address)
        send(channel, GREETING, wire.encode((facts.rank, facts.size, os.getpid(), stack)))
        serve(facts.rank, channel, lambda _: as_process_group(communicator(library)), {})
    if library == "torch" and sys.modules["torch"].distributed.is_initialized():
        sys.modules["torch"].distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
