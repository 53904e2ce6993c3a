"""Ranks that may be killed or stopped: started, watched and collected one by one.

A rank runs `body(group)` and reports one line of plain data, or how it ended. No test asks how long
that took, since a loaded machine is no defect: that a rank noticed something of itself, and not
because its time was up, shows where its deadlines are `ENDLESS`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import loaded  # noqa: F401  (before there are ranks)
import shipped
from huge_pages import before_forks
from ranks import PATIENCE, Pool
from shardmath.base import config, current, wire
from shardmath.context import startup
from shardmath.errors import ShardmathError
from shardmath.group.links import star
from shardmath.group.local import LocalProcessGroup
from shardmath.handles.rendezvous_state import PadSetting, change_pad_setting
from started import LAUNCHER

__all__ = ["ENDLESS", "Job", "Raised", "left_behind", "limit_waits", "on_ranks"]

# Variables of ranks that wait for longer than any test may take.
ENDLESS = {"SHARDMATH_TIMEOUT": "86400", "SHARDMATH_STARTUP_TIMEOUT": "86400"}


@dataclass(frozen=True)
class Raised:
    """How a rank failed: the exception's class, the ranks that it names, its text, and when."""

    kind: str
    ranks: tuple[int, ...]
    text: str
    at: float = field(default=0.0, compare=False)  # of time.monotonic


def run_job(
    size: int,
    body: Callable[[Any], Any],
    variables: Mapping[str, str] | None = None,
    *,
    timeout: float = PATIENCE,
) -> list[Any]:
    """The outcome of each rank of a job, which is over then; see `Job`."""
    with Job(size, body, variables) as job:
        return [job.outcome(rank, timeout) for rank in range(size)]


class Job:
    """`size` forked ranks, each of which runs `body(group)`. `pids` names the processes.

    `variables` are all ranks', `own[rank]` those of one.
    """

    def __init__(
        self,
        size: int,
        body: Callable[[Any], Any],
        variables: Mapping[str, str] | None = None,
        own: Sequence[Mapping[str, str]] = (),
    ) -> None:
        before_forks()
        self.pids: list[int] = []
        self._pipes: list[int] = []
        ends = star(size)
        for rank in range(size):
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                for other, sockets in enumerate(ends):
                    for sock in sockets if other != rank else ():
                        sock.close()
                for pipe in self._pipes:
                    os.close(pipe)
                config.export({**(variables or {}), **(own[rank] if own else {})})
                _be_rank(rank, size, ends[rank], writing, body)
            os.close(writing)
            self.pids.append(pid)
            self._pipes.append(reading)
        for sockets in ends:
            for sock in sockets:
                sock.close()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for pipe in self._pipes:
            os.close(pipe)

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank."""
        os.kill(self.pids[rank], number)

    def outcome(self, rank: int, timeout: float = PATIENCE) -> Any:
        """What the rank returned, a `Raised`, or None for a rank that died without a word."""
        text = b""
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            ready = select.select([self._pipes[rank]], [], [], max(0.0, left))[0]
            assert ready, f"rank {rank} hangs"
            chunk = os.read(self._pipes[rank], 1 << 16)
            if not chunk:
                break
            text += chunk
        if not text:
            return None
        kind, value = wire.decode(text)
        if kind == "returned":
            return value
        return Raised(*value)


def limit_waits(context: Any, seconds: float) -> None:
    """From now on give this rank's peers so long to come.

    Where a test is about what happens when time is up, this comes after all that must succeed.
    """
    context.board.policy = replace(context.board.policy, timeout=seconds)


def on_ranks(size: int, body: Callable[[Any], Any], timeout: float = PATIENCE) -> list[Any]:
    """`body(context)` on ranks with a new default context: the results in rank order.

    AssertionError, with all tracebacks, when a body raises. The ranks are new too, but where a
    launcher has started them: those stay, and the first that fails is heard.
    """
    if launched is not None:
        return launched.run(run_body, shipped.pack(body), ranks=size, timeout=timeout)

    def told(group: Any) -> tuple[str, Any]:
        try:
            context = startup.initialize("cpu", group)
            result = body(context)
            startup.finalize()
            return "", result
        except BaseException:
            return traceback.format_exc(), None

    with Job(size, told) as job:
        outcomes = [job.outcome(rank, timeout) or ("it died", None) for rank in range(size)]
    texts = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(outcomes) if text]
    assert not texts, "\n".join(texts)
    return [result for _, result in outcomes]


def run_body(group: Any, body: bytes) -> Any:
    """`body(context)` on this rank of a pool, as on a new one: with its own default context."""
    setting = PadSetting.setting
    context = startup.initialize("cpu", group)
    result = shipped.unpack(body)(context)
    startup.finalize()
    change_pad_setting(setting)
    return result


launched = Pool(8) if LAUNCHER else None
if launched is not None:
    atexit.register(launched.close)


def _be_rank(rank: int, size: int, sockets: Any, writing: int, body: Callable[[Any], Any]) -> None:
    current.forget()
    gc.freeze()  # what the parent had is not collected over and over
    try:
        result = ("returned", body(LocalProcessGroup(rank, size, sockets)))
    except BaseException as error:
        now = time.monotonic()
        if not isinstance(error, (ShardmathError, ValueError, RuntimeError)):
            traceback.print_exc()
        ranks = tuple(getattr(error, "ranks", ()))
        result = ("raised", (type(error).__name__, ranks, str(error), now))
    with contextlib.suppress(OSError):
        os.write(writing, wire.encode(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class left_behind:  # noqa: N801  (a context manager)
    """Asserts that nothing new is in /dev/shm and /tmp that names us, and no child is left."""

    def __enter__(self) -> None:
        self._before = self._names()

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is not None:
            return
        new = self._names() - self._before
        assert not new, new
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        assert not set(children.split()) - self._children, children

    def _names(self) -> set[str]:
        self._children = set(
            Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        ) | getattr(self, "_children", set())
        # MPICH leaves segments of its own behind, which a launcher's test may do at this moment.
        found = {str(p) for p in Path("/dev/shm").iterdir() if not p.name.startswith("mpich")}
        return found | {str(p) for p in Path("/tmp").iterdir() if "shardmath" in p.name}
