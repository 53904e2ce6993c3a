"""Modules built from C when the package was installed, if there was a compiler.

The package is complete without them: each caller has another way in Python, which all callers take
with `SHARDMATH_COMPILED=0`.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from typing import Any

from shardmath.base import config
from shardmath.base.immutable import Immutable


class Built(Immutable):
    """What a module is for, and the number that it gives as its INTERFACE, 0 if it gives none.

    The number rises when the calls of the module change: one built from older sources is not used.
    """

    purpose: str
    interface: int = 0


BUILT = {
    "shardmath.redistribution._box": Built("copies of rows and of few bytes", 2),
    "shardmath.local._sum": Built("sums of long arrays"),
    "shardmath.symmetric._board": Built("rounds of agreement", 3),
    "shardmath.handles._fingerprint": Built("fingerprints of arrays", 1),
    "shardmath.arrays._dlpack": Built("torch's arrays on the heap"),
    "shardmath.base._record": Built("the record of operations", 1),
    "shardmath.call._direct": Built("calls that come again", 12),
    "shardmath.cuda._launch": Built("calls on GPUs that come again", 4),
}


class CompiledStep(partial[Any]):
    """A call of compiled code during which no line of Python runs, so no signal handler either."""


def extension(name: str) -> Any:
    """The extension module `name` of BUILT.

    None where it was not built, was built for another Python or from other sources, or cannot be
    read, as in a process that may open no more files.
    """
    if not is_wanted():
        return None
    try:
        module = import_module(name)
    except (ImportError, OSError):
        return None
    return module if getattr(module, "INTERFACE", 0) == BUILT[name].interface else None


def is_built(name: str) -> bool:
    """Whether the module `name` of BUILT was built and is used."""
    return is_wanted() and _path(*_place(name)) is not None


def other_pythons(name: str) -> list[str]:
    """The Pythons, such as "3.12", for which the module `name` of BUILT was built, where it is
    missing for this one.
    """
    folder, last = _place(name)
    start = f"{last}.cpython-3"
    files = os.listdir(folder) if os.path.isdir(folder) else []
    built = [file for file in files if file.startswith(start) and file.endswith(".so")]
    minors = {file.removeprefix(start).partition("-")[0] for file in built}
    return [f"3.{minor}" for minor in sorted(minors, key=lambda m: (int(m.rstrip("t")), m))]


def is_wanted() -> bool:
    """Whether built modules are used: not with SHARDMATH_COMPILED=0."""
    return config.environment().get(f"{config.PREFIX}COMPILED", "").strip() != "0"


def library_beside(module: str, name: str) -> ctypes.CDLL | None:
    """The library `name` beside the file `module`; None where there is none or it is not loaded."""
    path = _path(os.path.dirname(module), name)
    if path is not None and is_wanted():
        with suppress(OSError):
            return ctypes.CDLL(path)
    return None


def _place(name: str) -> tuple[str, str]:
    """The folder of the module `name` of BUILT, and its name there."""
    _, *folders, last = name.split(".")
    return os.path.join(os.path.dirname(os.path.dirname(__file__)), *folders), last


def _path(folder: str, name: str) -> str | None:
    paths = (os.path.join(folder, name + suffix) for suffix in EXTENSION_SUFFIXES)
    return next((path for path in paths if os.path.exists(path)), None)
