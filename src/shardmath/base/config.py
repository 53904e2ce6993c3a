"""Every environment variable of shardmath, in one typed table; the only reader of the environment.

Each field of `Settings` is a variable, `SHARDMATH_` and the name of the field in capitals. The
field also has its type, its default and its description. An unknown `SHARDMATH_*` name causes a
warning, once in a process, that suggests the nearest known one.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from shardmath.base.caller import caller_place
from shardmath.base.immutable import Immutable

PREFIX = "SHARDMATH_"


def _variable(default: Any, sentence: str) -> Any:
    return field(default=default, metadata={"sentence": sentence})


class Settings(Immutable):
    """The values in force, read once when a context is made."""

    timeout: float = _variable(60.0, "Seconds that an operation waits for its peers.")
    startup_timeout: float = _variable(120.0, "Seconds that start-up waits for all ranks.")
    notice: float = _variable(
        5.0, "Seconds until a waiting rank reports on stderr which ranks it waits for."
    )
    transport: str = _variable(
        "auto", "Transport to peers' memory: host, mpi or tcp; cuda or nvshmem; auto picks one."
    )
    fake_hosts: int = _variable(
        1, "Number of hosts that the ranks of this machine pretend to be on, for tests."
    )
    address: str = _variable(
        "", "Address at which other hosts reach this one; if empty, it is found."
    )
    heartbeat: float = _variable(
        2.0, "Seconds without an answer after which a host counts as lost."
    )
    key: str = _variable(
        "", "Secret of ranks that no library joins; if empty, it is read from a file."
    )
    segment_bytes: int = _variable(
        64 << 20, "Minimum number of bytes by which the symmetric heap grows."
    )
    gpu_heap_bytes: int = _variable(
        2 << 30, "Bytes of a GPU's symmetric heap with NVSHMEM, allocated at the start."
    )
    check: int = _variable(
        0, "1: finds races and differing copies on cores; on GPUs, ranks meet in each call."
    )
    digests: str = _variable(
        "", "Folder where, with SHARDMATH_CHECK=1, runs keep digests of results to compare."
    )
    cache: str = _variable(
        "", "Folder for compiled kernels; if empty, ~/.cache/shardmath; - for none."
    )
    threads: int = _variable(
        0, "Threads for this rank's arithmetic; 0: OMP_NUM_THREADS, else its share of cores."
    )
    compiled: int = _variable(
        1, "0 leaves out the parts built from C, to see whether a fault is in them."
    )
    fault: str = _variable("", "Faults in the ranks' messages, for tests: place=probability:kind.")
    rank: int = _variable(-1, "This process's rank; set by the launcher.")
    size: int = _variable(-1, "The number of ranks; set by the launcher.")
    hub: str = _variable("", "Where rank 0 listens for ranks on a cluster's workers; set by spawn.")
    launcher_fd: str = _variable(
        "", "File descriptors of this rank's sockets; set by the launcher."
    )
    pid: int = _variable(
        -1, "The rank's own process, to tell it from its children; set by the launcher."
    )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the `SHARDMATH_*` variables.

        Raises ValueError, naming the variable, when a value is not of the variable's type. Unknown
        names are left to `warn_of_unknown`.
        """
        environ = environment() if environ is None else environ
        known = {PREFIX + f.name.upper(): f for f in cls.__dataclass_fields__.values()}
        values: dict[str, Any] = {}
        for name, text in environ.items():
            if name not in known:
                continue
            entry = known[name]
            kind: Callable[[str], Any] = type(entry.default)
            try:
                values[entry.name] = kind(text)
                # NaN and infinity would be limits that no wait ever reaches.
                if kind is float and not 0 <= values[entry.name] < math.inf:
                    raise ValueError
            except ValueError:
                raise ValueError(f"{name}={text!r} is not {_ARTICLES[kind.__name__]}") from None
        return cls(**values)


def warn_of_unknown(environ: Mapping[str, str] | None = None) -> None:
    """Warn, at the user's line, of each `SHARDMATH_*` name that is no variable."""
    environ = environment() if environ is None else environ
    known = [name.upper() for name in Settings.__dataclass_fields__]
    for name in environ:
        ending = name.removeprefix(PREFIX)
        if ending != name and ending not in known:
            import difflib

            near = difflib.get_close_matches(ending, known, n=1)
            hint = f"; did you mean {PREFIX}{near[0]}?" if near else ""
            file, line = caller_place()
            warnings.warn_explicit(f"unknown variable {name}{hint}", UserWarning, file, line)


def environment() -> Mapping[str, str]:
    """The process's environment: the one place where it is read."""
    return os.environ


def export(values: Mapping[str, str]) -> None:
    """Set variables of this process and its children, for a rank that has just been started."""
    os.environ.update(values)


def cache_folder(settings: Settings) -> str | None:
    """The folder of compiled kernels; None where none are kept."""
    if settings.cache == "-":
        return None
    if settings.cache:
        return settings.cache
    return _users_folder("XDG_CACHE_HOME", "~/.cache")


def config_folder() -> str:
    """The folder of the user's own files for this package."""
    return _users_folder("XDG_CONFIG_HOME", "~/.config")


def _users_folder(variable: str, otherwise: str) -> str:
    base = environment().get(variable) or os.path.expanduser(otherwise)
    return os.path.join(base, "shardmath")


def table() -> list[tuple[str, str, str, str]]:
    """Rows of (variable, type, default, sentence), for the documentation and the command line."""
    return [
        (PREFIX + f.name.upper(), type(f.default).__name__, str(f.default), f.metadata["sentence"])
        for f in Settings.__dataclass_fields__.values()
    ]


_ARTICLES = {
    "int": "an integer",
    "float": "a number of seconds, finite and not negative",
    "str": "a string",
}
