"""The ranks of `spawn`, forked off: each calls the function, reports how that went, and ends.

A rank never returns into its parent's code, and leaves alone the parent's exit hooks, its notebook
and its streams.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any, NoReturn

from shardmath.errors import OpTimeout
from shardmath.launch.failure import Failure, from_exception
from shardmath.launch.job import FAILURE, RESULT, Job
from shardmath.launch.output import Prefixer
from shardmath.launch.ranks import Place, fork_ranks, share_cores


def fork_job(
    size: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    first: int = 0,
    variables: Mapping[str, str] | None = None,
) -> Job:
    """The job of `size` ranks that call the function, numbered from `first` on. They are forks of
    this process, with these variables beside those that share its cores.

    Raises RuntimeError where this process has used CUDA, OSError where it cannot be forked.
    """
    _refuse_cuda()
    started = fork_ranks(size, variables={**share_cores(size), **(variables or {})})
    if isinstance(started, Place):
        _be_rank(replace(started, rank=started.rank + first), function, args)
    for rank in started:
        rank.number += first
    return Job(started, _text_prefixer(1), _text_prefixer(2), needs_results=True)


def late(timeout: float | None, ranks: Sequence[int]) -> OpTimeout:
    """The error where these ranks have not finished in time."""
    names = ", ".join(map(str, ranks))
    return OpTimeout(f"spawn: {timeout} s have passed; not finished: ranks {names}", ranks)


def _be_rank(place: Place, function: Callable[..., Any], args: tuple[Any, ...]) -> NoReturn:
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
    """Raise RuntimeError where this process has used CUDA."""
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
    """What writes the ranks' lines to this process's standard output (1) or error (2): to Python's
    stream, which in a notebook is not the descriptor.
    """

    def write(data: bytes) -> None:
        stream = sys.stdout if descriptor == 1 else sys.stderr
        stream.write(data.decode("utf-8", "replace"))
        stream.flush()

    return Prefixer(write)
