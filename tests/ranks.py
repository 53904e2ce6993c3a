"""A pool of ranks for the tests: forked once, then told what to run.

A call runs one module-level function on the first k ranks and returns their results in order. The
pool is replaced after any failure, so that no test sees what another has broken. It dies with the
process that made it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import select
import selectors
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardmath import config, current, wire
from shardmath.errors import OpTimeout
from shardmath.group import LocalProcessGroup, SoloProcessGroup
from shardmath.group.links import star
from shardmath.launch.failure import Failure, died, from_exception, rebuild
from shardmath.launch.ranks import die_with

__all__ = ["Pool"]

HEADER = struct.Struct("<cQ")
LINGER = 0.2  # seconds that the others have to end after one rank has failed


def own_group(group: Any) -> Any:
    """The default set-up: functions get the group itself."""
    return group


class Pool:
    """`size` ranks that wait for functions to run.

    `setup(group)` makes, once for each number of ranks, the object that functions get as their
    first argument. It is called on every one of those ranks.
    """

    def __init__(self, size: int, setup: Callable[[Any], Any] = own_group) -> None:
        self.size = size
        self._setup = setup
        self._workers: list[_Worker] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: int | None = None,
        timeout: float = 60.0,
    ) -> list[Any]:
        """`function(setup(group), *args)` on the first `ranks` ranks: the results in order.

        Raises what the first failing rank raised, as `shardmath.launch.spawn` does, and OpTimeout
        after `timeout` seconds, when every rank's stack is printed.
        """
        size = self.size if ranks is None else ranks
        if not 1 <= size <= self.size:
            raise ValueError(f"{size} ranks of a pool of {self.size}")
        if "<" in function.__qualname__:
            raise TypeError(f"{function.__qualname__} is not a function of a module")
        if not self._workers:
            self._workers = _fork(self.size, self._setup)
        name = f"{function.__module__}:{function.__qualname__}"
        command = wire.encode((name, sys.path, size, args))
        workers = self._workers[:size]
        try:
            for worker in workers:
                worker.channel.sendall(HEADER.pack(b"C", len(command)) + command)
            replies = _collect(workers, time.monotonic() + timeout)
        except BaseException:
            self.close()
            raise
        failures = [reply for reply in replies.values() if isinstance(reply, Failure)]
        if failures or len(replies) < size:
            late = [worker for worker in workers if worker.rank not in replies]
            stacks = _stacks(late)
            self.close()
            if not failures:
                print(stacks, file=sys.stderr)
                names = [worker.rank for worker in late]
                raise OpTimeout(f"{name}: {timeout} s have passed; not finished: {names}", names)
            error = rebuild(min(failures, key=lambda failure: failure.order))
            if stacks:
                error.add_note(stacks)
            raise error
        return [wire.decode(replies[rank]) for rank in range(size)]

    def close(self) -> None:
        """End the ranks; the next `run` starts new ones."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.end()


class _Worker:
    """A rank as its parent sees it."""

    def __init__(self, rank: int, pid: int, channel: socket.socket, stack: int) -> None:
        self.rank = rank
        self.pid = pid
        self.channel = channel
        self.stack = stack

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.channel.close()
        os.close(self.stack)


def _fork(size: int, setup: Callable[[Any], Any]) -> list[_Worker]:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    stars = {k: star(k) for k in range(1, size + 1)}
    workers: list[_Worker] = []
    parent = os.getpid()
    for rank in range(size):
        ours, theirs = socket.socketpair()
        stack = os.memfd_create(f"stack of rank {rank}")
        pid = os.fork()
        if pid == 0:
            try:
                die_with(parent)
                ours.close()
                for worker in workers:
                    worker.channel.close()
                sockets = {k: ends[rank] for k, ends in stars.items() if rank < k}
                for k, ends in stars.items():
                    for number, others in enumerate(ends):
                        if number != rank or rank >= k:
                            _close(others)
                faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
                _serve(rank, theirs, sockets, setup)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        theirs.close()
        workers.append(_Worker(rank, pid, ours, stack))
    for ends in stars.values():
        for sockets_of_one in ends:
            _close(sockets_of_one)
    return workers


def _close(sockets: list[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


def _serve(
    rank: int,
    channel: socket.socket,
    sockets: dict[int, list[socket.socket]],
    setup: Callable[[Any], Any],
) -> None:
    """Be a rank: run what the parent says until it closes the channel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    inherited = current.forget()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    states: dict[int, Any] = {}
    while True:
        command = _receive(channel)
        if command is None:
            del inherited
            os._exit(0)
        try:
            name, path, size, args = wire.decode(command[1])
            sys.path[:] = path
            if size not in states:
                states[size] = setup(_group(rank, size, sockets[size]))
            module, _, qualname = name.partition(":")
            function: Any = importlib.import_module(module)
            for part in qualname.split("."):
                function = getattr(function, part)
            kind, payload = b"R", wire.encode(function(states[size], *args))
        except BaseException as error:
            failure = from_exception(rank, error, hide=(__file__,))
            kind, payload = b"F", failure.encode()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        channel.sendall(HEADER.pack(kind, len(payload)) + payload)


def _group(rank: int, size: int, sockets: list[socket.socket]) -> Any:
    """The group of the first `size` ranks; the environment says the same."""
    names = {"RANK": rank, "SIZE": size, "PID": os.getpid()}
    names["LAUNCHER_FD"] = ",".join(str(sock.fileno()) for sock in sockets)
    config.export({config.PREFIX + name: str(value) for name, value in names.items()})
    return SoloProcessGroup() if size == 1 else LocalProcessGroup(rank, size, sockets)


def _receive(channel: socket.socket) -> tuple[bytes, bytes] | None:
    """One message, or None at the end of the stream."""
    header = channel.recv(HEADER.size, socket.MSG_WAITALL)
    if len(header) < HEADER.size:
        return None
    kind, length = HEADER.unpack(header)
    data = bytearray()
    while len(data) < length:
        part = channel.recv(min(length - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return kind, bytes(data)


def _collect(workers: list[_Worker], deadline: float) -> dict[int, Any]:
    """Replies by rank: bytes or a Failure. Without those that did not come in time."""
    replies: dict[int, Any] = {}
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.channel, selectors.EVENT_READ, worker)
        while len(replies) < len(workers):
            events = selector.select(max(0.0, deadline - time.monotonic()))
            if not events:
                break
            for key, _ in events:
                worker = key.data
                selector.unregister(worker.channel)
                replies[worker.rank] = _reply(worker)
                reply = replies[worker.rank]
                if isinstance(reply, Failure):
                    linger = 10 * LINGER if reply.is_consequence else LINGER
                    deadline = min(deadline, time.monotonic() + linger)
    return replies


def _reply(worker: _Worker) -> Any:
    message = _receive(worker.channel)
    if message is None:
        info = os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        assert info is not None
        killed = info.si_code != os.CLD_EXITED
        status = -info.si_status if killed else info.si_status
        # A rank that died without a word is dated before those that noticed.
        return died(worker.rank, status, when=0.0)
    kind, payload = message
    return Failure.decode(payload) if kind == b"F" else payload


def _stacks(workers: list[_Worker]) -> str:
    """Where each of the ranks is, as faulthandler sees it."""
    texts = []
    for worker in workers:
        os.kill(worker.pid, signal.SIGUSR1)
        give_up = time.monotonic() + 1.0
        text = ""
        # The dump is complete when it ends in the outermost frame; a stopped rank writes none.
        while "<module>" not in text and time.monotonic() < give_up:
            select.select([], [], [], 0.01)
            text = Path(f"/proc/self/fd/{worker.stack}").read_text()
        texts.append(f"rank {worker.rank} was here:\n{text}")
    return "\n".join(texts)
