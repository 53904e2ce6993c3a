"""simd_fft.c as a library, for tests that compare it with others."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from shardmath.local import simd_fft

SOURCE = Path(simd_fft.__file__).parent / "simd_fft.c"


def compiled(folder: Path) -> Path:
    """The path of the library, made in `folder`."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here: the package works without simd_fft.c")
    made = folder / "simd_fft.so"
    command = [compiler, "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*command, str(SOURCE), "-o", str(made)], check=True)
    return made
