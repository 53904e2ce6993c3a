"""Libraries made from the package's C files, whether or not it was built with them."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sysconfig
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest


def module_from_c(
    beside: ModuleType, source: str, name: str, folder: Path, *more: str
) -> ModuleType:
    """The module `name` of CPython's that `source` makes, given `more` flags."""
    path = folder / f"{name}.so"
    include = f"-I{sysconfig.get_paths()['include']}"
    made_from_c(beside, source, path, include, *more)
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built_from_c(module: ModuleType, source: str, folder: Path) -> ctypes.CDLL:
    """The library of `source`, a file beside `module`, made in `folder`."""
    return ctypes.CDLL(str(made_from_c(module, source, folder / "made.so")))


def made_from_c(module: ModuleType, source: str, made: Path, *more: str) -> Path:
    """The file `made`, from `source`. Skips the test where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip(f"no C compiler here: the package works without {source}")
    assert module.__file__ is not None
    path = Path(module.__file__).parent / source
    command = [compiler, "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *more]
    subprocess.run([*command, str(path), "-o", str(made)], check=True)
    return made
