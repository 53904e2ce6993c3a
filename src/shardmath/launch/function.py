"""`spawn`: one function on n ranks forked from this process, for notebooks and scripts.

Ranks are forked, so closures work and the parent's data is there without a copy. A rank never
returns into the parent's code: it ends in `os._exit`, whatever the function does.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any, NoReturn

from shardmath.errors import OpTimeout
from shardmath.geometry.integers import index
from shardmath.launch.failure import Failure, from_exception, rebuild
from shardmath.launch.job import FAILURE, RESULT, Job
from shardmath.launch.output import Prefixer
from shardmath.launch.ranks import Place, fork_ranks, share_cores


def spawn(
    function: Callable[..., Any], n: int, *args: Any, timeout: float | None = None
) -> list[Any]:
    """Call `function(*args)` on `n` ranks of this host; their results, in the order of the ranks.

        def columns(x):
            context = shardmath.initialize("cpu")
            return x[:, context.rank :: context.size].sum()

        shardmath.spawn(columns, 3, np.ones((4, 7)))

    Each rank is a fork of this process: it sees the variables that exist here, and
    `shardmath.initialize("cpu")` finds its rank. Results are numbers, strings, bytes, tuples,
    lists, dictionaries, NumPy arrays and torch CPU tensors. Each line that a rank prints is shown
    with the rank in front. NumPy's global random state is the parent's on every rank: seed it by
    rank.

    The first rank that fails ends all ranks. Its exception is raised here, with the rank in the
    message and the rank's traceback as a note: of the same class if that is built-in or one of
    shardmath's, RankFailure if the rank died, else RuntimeError. Raises OpTimeout after `timeout`
    seconds, TypeError when `function` cannot be called or a result cannot be sent, ValueError for
    `n` below 1, RuntimeError when this process has used CUDA, which does not survive a fork.
    """
    n = index(n, "n")
    if not callable(function):
        raise TypeError(
            f"function is called on every rank, and {function!r} cannot be called: pass the "
            "function itself, and its arguments after n"
        )
    if n < 1:
        raise ValueError(f"n is {n}; a job has at least one rank")
    from shardmath.base import wire  # NumPy: loaded once, before the ranks are forked

    _refuse_cuda()
    deadline = None if timeout is None else time.monotonic() + timeout
    started = fork_ranks(n, variables=share_cores(n))
    if isinstance(started, Place):
        run_after_fork(started, function, args)
    job = Job(started, _text_prefixer(1), _text_prefixer(2), needs_results=True)
    if not job.watch(deadline=deadline):
        late = [rank for rank in range(n) if rank not in job.results]
        names = ", ".join(map(str, late))
        raise OpTimeout(f"spawn: {timeout} s have passed; not finished: ranks {names}", late)
    failure = job.first_failure
    if failure is not None:
        raise rebuild(failure)
    return [wire.decode(job.results[rank]) for rank in range(n)]


def run_after_fork(place: Place, function: Callable[..., Any], args: tuple[Any, ...]) -> NoReturn:
    """Be a rank: call the function, report how it went, end this process."""
    atexit._clear()  # the parent's exit hooks are the parent's
    _leave_notebook()
    failure = _call(place, function, args)
    status = 0 if failure is None else failure.status or 1
    if failure is not None:
        place.report(FAILURE, failure.encode())
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for the rank's threads
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


def _leave_notebook() -> None:
    """Undo what a notebook has put into Python's place: it talks to the notebook's own process."""
    sys.excepthook = sys.__excepthook__
    if not isinstance(builtins.input, BuiltinFunctionType):
        builtins.input = _no_input
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None:
        type(shell).clear_instance()  # without one, `display` prints


def _no_input(prompt: object = "", /) -> NoReturn:
    raise EOFError("ranks of spawn read no input: ask before spawn, and pass the answer on")


def _call(place: Place, function: Callable[..., Any], args: tuple[Any, ...]) -> Failure | None:
    from shardmath.base import wire

    try:
        torch: Any = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
        result = function(*args)
        place.report(RESULT, wire.encode(result))
    except BaseException as error:
        return from_exception(place.rank, error, hide=(__file__,))
    return None


def _refuse_cuda() -> None:
    torch: Any = sys.modules.get("torch")
    if _holds_cuda() or (torch is not None and torch.cuda.is_initialized()):
        raise RuntimeError(
            "spawn forks this process, which has used CUDA, and CUDA does not survive a fork; call "
            "spawn before any GPU work, or put the function into a script for "
            "python -m shardmath run"
        )


def _holds_cuda() -> bool:
    """Whether any library in this process has started CUDA: the driver keeps its device open."""
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if link.readlink().name == "nvidia-uvm":
                return True
    return False


def _text_prefixer(descriptor: int) -> Prefixer:
    """Lines to this process's Python stream, which in a notebook is not the descriptor."""

    def write(data: bytes) -> None:
        stream = sys.stdout if descriptor == 1 else sys.stderr
        stream.write(data.decode("utf-8", "replace"))
        stream.flush()

    return Prefixer(write)
