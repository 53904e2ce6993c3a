"""Start ranks on this host by forking, each joined to the others and to the one that started it.

A started rank dies when the process that started it dies, holds no descriptor of another rank, and
finds in its environment who it is. Its output and its reports go through pipes to the starter.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import gc
import io
import os
import resource
import signal
import socket
import struct
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TextIO

from shardmath.base import config, current
from shardmath.base.immutable import Immutable
from shardmath.group.links import star

REPORT_HEADER: Final = struct.Struct("<cQ")  # kind, length

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_HELD_BACK = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_PR_SET_PDEATHSIG = 1


@dataclass
class Rank:
    """A started rank, as its starter sees it: the process and the reading ends of its pipes."""

    number: int
    pid: int
    pidfd: int
    stdout: int
    stderr: int
    report: int
    leads_group: bool

    def send_signal(self, signum: int) -> None:
        """Signal the rank and what it started. It must not have been reaped."""
        with contextlib.suppress(ProcessLookupError):
            if self.leads_group:
                os.killpg(self.pid, signum)
            else:
                os.kill(self.pid, signum)

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in (self.pidfd, self.stdout, self.stderr, self.report):
            os.close(descriptor)


class Place(Immutable):
    """A started rank, as it knows itself. `inherited` keeps the starter's contexts untouched."""

    rank: int
    size: int
    descriptor: int
    inherited: tuple[current.CurrentContext, ...]

    def report(self, kind: bytes, payload: bytes) -> None:
        """Tell the starter; silent when it is gone."""
        with contextlib.suppress(BrokenPipeError):
            for part in (REPORT_HEADER.pack(kind, len(payload)), payload):
                view = memoryview(part)
                while view:
                    view = view[os.write(self.descriptor, view) :]


def fork_ranks(
    size: int, *, variables: Mapping[str, str], share_stdin: bool = False
) -> list[Rank] | Place:
    """Start `size` ranks. Returns them in the starter, and its own `Place` in each of them.

    `variables` are added to their environment. With `share_stdin` rank 0 reads the starter's
    standard input; all others read nothing. Starts no rank if it raises: OSError where the system
    refuses, saying what to raise where descriptors or processes are too few.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # or else every rank would write what is buffered here once more
    _fill_standard_descriptors()
    sockets: list[list[socket.socket]] = []
    started: list[Rank] = []
    try:
        sockets = star(size)
        with _signals_held_back():
            for number in range(size):
                place = _fork_one(number, sockets, started, share_stdin and number == 0)
                if place is not None:
                    config.export(variables)
                    return place
    except BaseException as error:
        for rank in started:
            rank.send_signal(signal.SIGKILL)
            os.waitpid(rank.pid, 0)
            rank.close()
        code = getattr(error, "errno", 0)
        if code == errno.EMFILE:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            why = f"{size} ranks need more descriptors than {limit}: raise ulimit -n"
            raise OSError(code, why) from error
        if code == errno.EAGAIN:
            why = f"{size} ranks are more processes than may start: raise ulimit -u, or the "
            raise OSError(code, f"{why}container's limit of processes") from error
        raise
    finally:
        for ends in sockets:  # in a rank, its own are detached by now
            for sock in ends:
                sock.close()
    return started


def _fill_standard_descriptors() -> None:
    """Open closed ones of descriptors 0 to 2 on /dev/null, so that no rank's socket gets there."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def share_cores(size: int, threads: int | None = None) -> dict[str, str]:
    """The variables that give each of `size` ranks its part of this process's cores, or `threads`.

    Libraries that a rank loads read them; those that it has already are limited by `initialize`.
    Without `threads`, what the user has set stays as it is.
    """
    share = threads or max(1, len(os.sched_getaffinity(0)) // size)
    ours, common = config.PREFIX + "THREADS", _THREAD_VARIABLES[0]
    present = () if threads else config.environment()
    if ours in present or common in present:
        return {}
    return {name: str(share) for name in (ours, *_THREAD_VARIABLES) if name not in present}


def _fork_one(
    number: int, sockets: list[list[socket.socket]], started: list[Rank], share_stdin: bool
) -> Place | None:
    """Start one rank and add it to `started`; in the rank itself, return its place."""
    reading, writing = zip(*(os.pipe() for _ in ("stdout", "stderr", "report")), strict=True)
    # A rank that reads the terminal stays in the terminal's foreground group, or it would be
    # stopped at its first read. The others lead groups of their own: what they start ends with
    # them, and Ctrl-C reaches them once, through their starter.
    leads_group = not (share_stdin and os.isatty(0))
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the fork of a threaded notebook
        pid = os.fork()
    if pid == 0:
        try:
            die_with(parent)
            if leads_group:
                os.setpgid(0, 0)
            for rank in started:
                rank.close()
            for descriptor in reading:
                os.close(descriptor)
            _take_streams(writing[0], writing[1], share_stdin)
            return _settle(number, sockets, writing[2])
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    for descriptor in writing:
        os.close(descriptor)
    if leads_group:
        with contextlib.suppress(OSError):  # the rank does the same, and may be gone already
            os.setpgid(pid, pid)
    stdout, stderr, report = reading
    started.append(Rank(number, pid, os.pidfd_open(pid), stdout, stderr, report, leads_group))
    return None


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread of `parent` that started it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL)) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent:  # it ended before the kernel was asked
        os._exit(128 + signal.SIGKILL)


def _take_streams(stdout: int, stderr: int, share_stdin: bool) -> None:
    """Make the pipes this process's output, written line by line as on a terminal."""
    if not share_stdin:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
    for descriptor, number in ((stdout, 1), (stderr, 2)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = _text_stream(0, sys.stdin, "r")
    sys.stdout = _text_stream(1, sys.stdout, "w")
    sys.stderr = _text_stream(2, sys.stderr, "w")
    faulthandler.enable(2)  # a crash in native code shows where Python was


def _text_stream(number: int, present: TextIO | None, mode: Literal["r", "w"]) -> TextIO:
    """`present` if it is Python's own stream on descriptor `number`, else a new one.

    A notebook or a test puts objects of its own there, which write elsewhere.
    """
    originals = (sys.__stdin__, sys.__stdout__, sys.__stderr__)
    if present is originals[number] and isinstance(present, io.TextIOWrapper):
        if mode == "w":
            present.reconfigure(line_buffering=True)
        return present
    return open(number, mode, buffering=1, encoding="utf-8", errors="replace", closefd=False)


def _settle(number: int, sockets: list[list[socket.socket]], report: int) -> Place:
    """Make this fork rank `number`: drop the starter's state, and set the rank's variables."""
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # which nohup and shells set on purpose
            by_default = signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
            signal.signal(signum, by_default)
    mine = [sock.detach() for sock in sockets[number]]
    config.export(
        {
            config.PREFIX + "RANK": str(number),
            config.PREFIX + "SIZE": str(len(sockets)),
            config.PREFIX + "LAUNCHER_FD": ",".join(map(str, mine)),
            config.PREFIX + "PID": str(os.getpid()),
        }
    )
    inherited = current.forget()
    gc.freeze()  # the starter's garbage is not this rank's to collect
    return Place(number, len(sockets), report, inherited)


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Hold signals back inside; they are delivered on leaving, in the starter and in the ranks."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
