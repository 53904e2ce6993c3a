"""A process that has loaded what tests import, and forks one for each program that is started.

A Python takes two seconds to import torch, which every rank of every launcher's job would do.
Where a test is not about the start of a Python, launchers start `stand_in.py` instead, which takes
a few hundredths of a second, and has the program run in a fork of this process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import marshal
import os
import runpy
import secrets
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from shardmath.base import current
from shardmath.launch.ranks import die_with

__all__ = ["python"]

REQUEST = 1 << 18  # bytes, the most that words and environment may take


def python() -> list[str]:
    """The words that stand for `python`, before a script, `-m` and a module, or `-c` and code."""
    stub = Path(__file__).with_name("stand_in.py")
    return [sys.executable, "-IS", str(stub), _address(os.getpid())]


@cache
def _address(parent: int) -> str:
    """Where the process listens that this one has forked, which ends with it."""
    address = f"shardmath-preloaded-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind("\0" + address)
        door.listen(64)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if os.fork() == 0:
            try:
                die_with(parent)
                _Server(door).serve()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
    return address


class _Server:
    """Starts a program for each connection, and ends it with that."""

    def __init__(self, door: socket.socket) -> None:
        assert "mpi4py.MPI" not in sys.modules, "MPI has started here, and survives no fork"
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._door = door
        self._selector = selectors.DefaultSelector()
        self._pids: dict[socket.socket, int] = {}

    def serve(self) -> None:
        self._selector.register(self._door, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._door:
                    self._selector.register(self._door.accept()[0], selectors.EVENT_READ)
                elif isinstance(key.fileobj, socket.socket):
                    if key.fileobj.fileno() >= 0:  # or else its program's end came first
                        self._hear(key.fileobj)
                else:
                    self._bury(key.fd, key.data)

    def _hear(self, channel: socket.socket) -> None:
        """Start what the stand-in asks for, pass a signal on, or end what has no stand-in."""
        data, descriptors, _, _ = socket.recv_fds(channel, REQUEST, 250)
        if channel not in self._pids and data:
            words, environment, folder, numbers = marshal.loads(data)
            if words[0] == "-m":
                importlib.import_module(words[1])  # here, for all that are started so
                name_no_methods()
            pid = self._pids[channel] = self._fork(
                words, environment, folder, dict(zip(numbers, descriptors, strict=True))
            )
            self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, channel)
        elif channel in self._pids:
            os.kill(self._pids[channel], int(data or signal.SIGKILL))
        if not data:
            self._selector.unregister(channel)
            channel.close()

    def _bury(self, pidfd: int, channel: socket.socket) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(self._pids.pop(channel), 0)
        if channel.fileno() >= 0:
            self._selector.unregister(channel)
            with channel, contextlib.suppress(OSError):
                channel.send(b"%d" % os.waitstatus_to_exitcode(status))

    def _fork(
        self,
        words: Sequence[str],
        environment: dict[str, str],
        folder: str,
        descriptors: dict[int, int],
    ) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                die_with(parent)
                for key in list(self._selector.get_map().values()):
                    os.close(key.fd)
                _take(descriptors)
                os.chdir(folder)
                os.environ.clear()
                os.environ.update(environment)
                status = _run(words)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        for descriptor in descriptors.values():
            os.close(descriptor)
        return pid


def name_no_methods() -> None:
    """Let torchrun not look for the name of the method that calls, among all lines of all modules,
    for each event of a log that nobody reads.
    """
    rendezvous = sys.modules.get("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    if rendezvous is not None:
        setattr(rendezvous, "get_method_name", lambda depth=2: "")  # noqa: B010


def _take(descriptors: dict[int, int]) -> None:
    """Give descriptors the numbers that they have in the stand-in, and Python streams on them."""
    above = max(*descriptors, *descriptors.values()) + 1
    moved = {}
    for number, descriptor in descriptors.items():
        moved[number] = fcntl.fcntl(descriptor, fcntl.F_DUPFD, above)
        os.close(descriptor)
    for number, descriptor in moved.items():
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = open(number, "w", buffering=1, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(words: Sequence[str]) -> int:
    """Run a program as a new Python would: its status."""
    for signum in (signal.SIGINT, signal.SIGALRM):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    inherited: Any = current.forget()
    gc.freeze()  # what the parent had is not collected over and over
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    status: Any = 0
    try:
        if words[0] == "-m":
            sys.argv = list(words[1:])
            sys.path[:0] = ["", *folders]
            sys.modules.pop(words[1], None)  # or else it warns that it is there
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            sys.path[:0] = ["", *folders]
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = list(words)
            sys.path[:0] = [str(Path(words[0]).parent), *folders]
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as error:
        status = error.code
        if not isinstance(status, int | None):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if "mpi4py.MPI" in sys.modules:  # whose library says farewell to mpiexec as C programs end
        if not sys.modules["mpi4py.MPI"].Is_finalized():
            sys.modules["mpi4py.MPI"].Finalize()
        ctypes.CDLL(None).exit(int(status or 0))
    del inherited
    return int(status or 0)
