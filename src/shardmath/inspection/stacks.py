"""Where a process is in its Python program, asked from outside, also while it sleeps or computes.

A process that `answers` has faulthandler write its stack into its own memory when SIGURG comes.
That takes no thread and none of Python's locks. Other processes ignore the signal by default.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import re
import signal
import time
from contextlib import suppress

from shardmath.base.caller import PACKAGE
from shardmath.base.immutable import Immutable

_NAME = "shardmath-stack"
_HERE = os.path.dirname(__file__)
_SIGNAL = signal.SIGURG
_MOST_BYTES = 1 << 20  # after which the memory is emptied
_PATIENCE = 0.25  # seconds for an answer
_LOOK = 2e-3
_FRAME = r'  File "(.*)", line (\d+) in (.+)'


class Frame(Immutable):
    """One line of a stack."""

    file: str
    line: int
    function: str


def answers() -> int:
    """Answer from now on, and return the descriptor of the memory.

    -1 where the program handles the signal itself, or the system has no memory.
    """
    if signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
        return -1
    with suppress(OSError):
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
        faulthandler.register(_SIGNAL, descriptor, all_threads=False)
        return descriptor
    return -1


def silence(descriptor: int) -> None:
    """Stop answering: the memory is the parent process's."""
    if descriptor >= 0:
        faulthandler.unregister(_SIGNAL)
        os.close(descriptor)


def state_of(pid: int) -> str:
    """What keeps a process from going on: "died", "is stopped", or "" for nothing."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state = file.read().rpartition(") ")[2][:1]
    except OSError:
        return "died"
    return {"Z": "died", "X": "died", "T": "is stopped", "t": "is stopped"}.get(state, "")


def stack_of(pid: int, descriptor: int) -> list[Frame]:
    """The stack of the main thread of a process, the innermost frame first.

    Empty where the process does not answer; `descriptor` is what `answers` returned there.
    """
    path = f"/proc/{pid}/fd/{descriptor}"
    try:
        if _NAME not in os.readlink(path) or not _catches(pid):
            return []
        memory = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        begin = os.fstat(memory).st_size
        os.kill(pid, _SIGNAL)
        end = _end_of_answer(memory, begin)
        text = os.pread(memory, end - begin, begin).decode(errors="replace")
        if end > _MOST_BYTES:
            os.ftruncate(memory, 0)
    except OSError:
        return []
    finally:
        os.close(memory)
    frames = [Frame(file, int(line), name) for file, line, name in re.findall(_FRAME, text)]
    shows = [place for place, frame in enumerate(frames) if frame.file.startswith(_HERE)]
    frames = frames[shows[-1] + 1 :] if shows else frames  # it was asked for the table itself
    while frames and _starts_programs(frames[-1].file):
        frames.pop()
    return frames


def _starts_programs(file: str) -> bool:
    """Whether a file is Python's, this package's or its console script's: they start the user's."""
    return file.startswith(("<frozen ", *PACKAGE)) or os.path.basename(file) == "shardmath"


def _catches(pid: int) -> bool:
    """Whether a process has a handler for the signal."""
    with open(f"/proc/{pid}/status") as file:
        caught = file.read().partition("SigCgt:")[2].split()[0]
    return bool(int(caught, 16) >> (_SIGNAL - 1) & 1)


def _end_of_answer(memory: int, begin: int) -> int:
    """Where the answer ends that begins at `begin`: when nothing more has come for a while."""
    deadline, end = time.monotonic() + _PATIENCE, begin
    while time.monotonic() < deadline:
        time.sleep(_LOOK)
        before, end = end, os.fstat(memory).st_size
        if end == before > begin:
            break
    return end
