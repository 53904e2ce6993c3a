"""Starting and ending: contexts are made here, from the environment or a group, and left at exit.

A call that makes a context makes nothing if it raises. A process that exits tells its peers. A
process that was forked off a rank is no rank, and cannot use the parent's contexts.
"""

from __future__ import annotations

import atexit
import operator
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import cache
from typing import Any

from shardmath.arrays import libraries
from shardmath.base import current
from shardmath.base.caller import process_name
from shardmath.base.collective_call import collective_call
from shardmath.base.config import Settings, warn_of_unknown
from shardmath.base.log import INFO, is_heard, package_logger
from shardmath.base.untraced import tell_compiler
from shardmath.context import agreement
from shardmath.context.context import DistributedContext, open_contexts, require_context
from shardmath.context.runtime import Runtime
from shardmath.errors import CollectiveMismatch, InvalidDevice, OpTimeout, RankFailure
from shardmath.group import ProcessGroup, as_process_group
from shardmath.group.base import rank_names
from shardmath.group.environment import local_rank, noticed
from shardmath.inspection import job
from shardmath.transport.choice import candidates, names


@collective_call
def initialize(
    device_id: Any,
    process_group: Any = None,
    backends: Sequence[str] | None = None,
) -> DistributedContext:
    """Make the default context, and return it. Collective.

    `device_id`: "cpu", or the index of this rank's CUDA device; also a `torch.device`, or its name.
    "cuda" is torch's current device where torch computes on one already, else that whose index is
    the number of this rank among those of its host. `process_group`: an mpi4py communicator, a
    torch.distributed group or DeviceMesh, or a ProcessGroup; None reads what the launcher has set
    (shardmath, torchrun, mpiexec, Slurm), and without one there is one rank. `backends` is accepted
    for programs written for nvmath.distributed; the transport is chosen by trying.

    Raises RuntimeError when there is a default context already, InvalidDevice, TypeError or
    ValueError for a bad argument, BootstrapError when the ranks cannot find each other.
    Source: nvmath.distributed.initialize.
    """
    if current.default() is not None:
        raise RuntimeError("shardmath is initialized already; call finalize() first")
    context = new_context(device_id, process_group, backends)
    current.set_default(context)
    return context


def begun(device_id: Any = None) -> DistributedContext:
    """The current context; in a program of torch.distributed the first call makes it, the default
    one, of the ranks of torch's default group. Collective then.

    `device_id` None is "cpu". Raises RuntimeError where there is no context and torch has no group.
    """
    if current.get() is None and (group := group_of_torch()) is not None:
        return initialize("cpu" if device_id is None else device_id, group)
    return require_context()


def group_of_torch() -> Any:
    """The default group of torch.distributed; None where the program has not initialized it."""
    torchs = sys.modules.get("torch.distributed")
    if torchs is None or not torchs.is_available() or not torchs.is_initialized():
        return None
    return torchs.group.WORLD


@collective_call
def new_context(
    device_id: Any,
    process_group: Any = None,
    backends: Sequence[str] | None = None,
) -> DistributedContext:
    """A context that is not the default one: for `with`, or to pass on. Arguments: `initialize`."""
    settings = Settings.from_environment()
    tell_compiler()
    device_id = _index_or_name(device_id)
    group = as_process_group(process_group, settings, device_id=device_id)
    _watch_process()
    with ExitStack() as undo:

        def awaited() -> str:
            return rank_names(group.awaited) if group.awaited else "the other ranks"

        with noticed(group.rank, settings.notice, awaited):
            runtime = Runtime(group, settings)
        undo.callback(runtime.close)
        ranks = range(group.nranks)
        board = runtime.board(ranks, group.rank, "board")

        def describe() -> tuple[str, str, int]:
            ordinal = _ordinal(device_id, backends)
            kind = "cpu" if ordinal is None else "cuda"
            candidates(kind, settings.transport)
            libraries()  # read now, while this process can open their files
            runtime.compute_on(ordinal)
            if settings.digests:
                _compare_runs(settings, group, kind)
            return kind, settings.transport, settings.check

        def check(told: list[tuple[str, str, int]]) -> None:
            kinds, transports, checks = zip(*told, strict=True)
            agreement.require_equal("the kind of device_id", kinds)
            agreement.require_equal("SHARDMATH_TRANSPORT", transports)
            agreement.require_equal("SHARDMATH_CHECK", checks)

        agreement.agree(board, "initialize", describe, check)
        runtime.open(board, group)
        if settings.check:
            runtime.log_accesses(board, "board")
        team = runtime.team(board, ranks)
        undo.pop_all()
    made = DistributedContext(
        runtime, board, team, ranks=ranks, device_id=device_id, process_group=group
    )
    if is_heard(INFO):
        package_logger().info(
            "rank %d of %d (%s) computes on %s over %s, with %d threads; found by %s",
            *(made.rank, made.size, process_name(), made.device_id, made.transport, made.threads),
            type(group).__name__,
        )
    return made


@collective_call
def finalize() -> None:
    """End the default context. Collective; does nothing when there is none.

    It ends a context in any state: it does not fail where peers have ended, do not come in time, or
    are in another call.
    Source: nvmath.distributed.finalize.
    """
    context = current.default()
    if not isinstance(context, DistributedContext):
        return
    why = "finalize() has ended it"
    try:
        context.announce_close(why)
        with suppress(RankFailure, OpTimeout, CollectiveMismatch):
            context.board.exchange("finalize", b"")
    finally:
        context.close(why)


def _index_or_name(device_id: Any) -> Any:
    """The index of the CUDA device that `device_id` means, or "cpu"; anything else unchanged."""
    kind = type(device_id)
    is_torchs = (kind.__module__, kind.__name__) == ("torch", "device")
    name = str(device_id) if is_torchs or isinstance(device_id, str) else ""
    if name in ("cpu", "cpu:0"):
        return "cpu"
    if name == "cuda":
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            return torch.cuda.current_device()
        return max(0, local_rank())
    number = name.removeprefix("cuda:")
    return int(number) if number != name and number.isdecimal() else device_id


def _ordinal(device_id: object, backends: Sequence[str] | None) -> int | None:
    """The index of a CUDA device, or None for "cpu".

    Raises InvalidDevice for anything else, ValueError for unknown backends.
    """
    if backends is not None:
        known = [*names("cpu"), *names("cuda"), "nccl"]
        given = [backends] if isinstance(backends, str) else list(backends)
        unknown = [name for name in given if name not in known]
        if unknown or not given or isinstance(backends, str):
            raise ValueError(
                f"backends is a sequence of names among {', '.join(known)}, at least one; not "
                f"{backends!r}"
            )
    if device_id == "cpu":
        return None
    if not isinstance(device_id, bool):
        with suppress(TypeError):
            if (ordinal := operator.index(device_id)) >= 0:  # type: ignore[arg-type]
                return ordinal
    raise InvalidDevice(
        f'device_id is "cpu", or a CUDA device: its index, or a name such as "cuda:1"; not '
        f"{device_id!r}"
    )


def _compare_runs(settings: Settings, group: ProcessGroup, kind: str) -> None:
    """Compare this run with an earlier one, for SHARDMATH_DIGESTS. Raises ValueError, OSError."""
    if not settings.check or kind != "cpu":
        raise ValueError("SHARDMATH_DIGESTS takes SHARDMATH_CHECK=1, and ranks on cores")
    from shardmath.inspection import digests

    digests.start(settings.digests, group.rank, group.nranks)


@cache
def _watch_process() -> None:
    """Once per process: leave at exit, keep a forked child from using the parent's contexts, and
    warn of unknown variables.
    """
    warn_of_unknown()
    atexit.register(_at_exit)
    os.register_at_fork(after_in_child=_in_forked_child)
    job.show_on_request(_show)


def _at_exit() -> None:
    crashed = getattr(sys, "last_value", None)
    for context in open_contexts():
        if crashed is not None:
            context.board.fail(f"{type(crashed).__name__}: {crashed}")
        context.close("the process is ending")


def _show() -> bool:
    """Show where all ranks are; False where this process has no context."""
    contexts = open_contexts()
    for context in contexts[:1]:
        context.show("asked by SIGQUIT")
    return bool(contexts)


def _in_forked_child() -> None:
    job.forget()
    contexts = open_contexts()
    for context in contexts:
        context.abandon("this process was forked after initialize(); initialize it anew")
    current.set_default(None)
    if contexts:
        current.set_forked()
