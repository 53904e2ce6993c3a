"""Libraries that were built from C when the package was installed, if there was a compiler.

The package is complete without them: whoever asks for one has another way.
"""

from __future__ import annotations

import ctypes
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

__all__ = ["library", "library_beside"]


def library_beside(module: str, name: str) -> ctypes.CDLL | None:
    """The library `name` in the folder of the file `module`; None where it was not built."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(module).parent / f"{name}{suffix}"
        if path.exists():
            return library(path)
    return None


def library(path: Path) -> ctypes.CDLL | None:
    """The library at `path`; None if it cannot be loaded."""
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None
