"""Modules built from C when the package was installed, if there was a compiler.

The package is complete without it: whoever asks for a library or an extension has another way,
which `SHARDMATH_COMPILED=0` takes everywhere.
"""

from __future__ import annotations

import ctypes
from functools import partial
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from shardmath.base import config

# What each is for, by its module.
BUILT = {
    "shardmath.redistribution._box": "copies of rows and of few bytes",
    "shardmath.local._sum": "sums of long arrays",
    "shardmath.symmetric._board": "rounds of agreement",
    "shardmath.handles._fingerprint": "fingerprints of arrays",
    "shardmath.arrays._dlpack": "torch's arrays on the heap",
    "shardmath.base._record": "the record of operations",
    "shardmath.call._direct": "calls that come again",
    "shardmath.cuda._launch": "calls on GPUs that come again",
}

# The number that a module gives as its INTERFACE, 0 if none: it rises when calls of it change, and
# what was built from older sources is not used.
_INTERFACES = {
    "shardmath.redistribution._box": 1,
    "shardmath.symmetric._board": 3,
    "shardmath.call._direct": 10,
    "shardmath.cuda._launch": 1,
}


class CompiledStep(partial[Any]):
    """A call of compiled code in which no line of Python runs, and so no handler of a signal."""


def extension(name: str) -> Any:
    """The extension module of that name; None where it was not built, is for another Python or of
    other sources, or cannot be read, as in a process that may open no more files.
    """
    if not is_wanted():
        return None
    try:
        module = import_module(name)
    except (ImportError, OSError):
        return None
    return module if getattr(module, "INTERFACE", 0) == _INTERFACES.get(name, 0) else None


def is_built(name: str) -> bool:
    """Whether the module `name` of BUILT is there, and is used."""
    _, *folders, last = name.split(".")
    return is_wanted() and _path(Path(__file__).parent.parent.joinpath(*folders), last) is not None


def is_wanted() -> bool:
    """Whether what was built is used: SHARDMATH_COMPILED=0 says that it is not."""
    return config.environment().get(f"{config.PREFIX}COMPILED", "").strip() != "0"


def library_beside(module: str, name: str) -> ctypes.CDLL | None:
    """The library `name` in the folder of the file `module`; None where it was not built."""
    path = _path(Path(module).parent, name)
    return None if path is None or not is_wanted() else library(path)


def library(path: Path) -> ctypes.CDLL | None:
    """The library at `path`; None if it cannot be loaded."""
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def _path(folder: Path, name: str) -> Path | None:
    paths = (folder / f"{name}{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((path for path in paths if path.exists()), None)
