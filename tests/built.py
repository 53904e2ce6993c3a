"""Libraries made from the package's C files, whether or not it was built with them."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from shardmath.compiled import library


def built_from_c(module: ModuleType, source: str, folder: Path) -> ctypes.CDLL:
    """The library of `source`, a file beside `module`, made in `folder`."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip(f"no C compiler here: the package works without {source}")
    assert module.__file__ is not None
    path, made = Path(module.__file__).parent / source, folder / "made.so"
    command = [compiler, "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*command, str(path), "-o", str(made)], check=True)
    loaded = library(made)
    assert loaded is not None
    return loaded
