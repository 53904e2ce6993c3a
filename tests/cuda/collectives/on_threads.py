"""Kernels that work with peers, compiled for this computer's threads in place of a GPU's.

`device_threads.hh` has what CUDA gives them, and `device_words.hh` what they say in assembly.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from shardmath.cuda.compile import KERNELS

SECONDS = 3600  # a kernel's deadline: nobody waits in vain here
NONE = 0xFFFFFFFF  # no thread is late
_HERE = Path(__file__).parent


def source_of(name, behind="// The threads of a block in a row.", words=None):
    """A kernel's source for the host. Its words end where `behind` begins; `words` stand for them,
    by default those that kernels exchange with peers.
    """
    text = (KERNELS / name).read_text()
    before, _, after = text.partition("// -- words ---")
    if after:
        _, later, rest = after.partition(behind)
        words = (_HERE / "device_words.hh").read_text() if words is None else words
        text = before + words + later + rest
    return re.sub(r"__shared__ (\w+) (\w+);", r"\1& \2 = *(\1*)block_of_thread->shared;", text)


def with_constants(text, constants):
    """The source with other values of constants, by type and name; each is there once."""
    for name, value in constants.items():
        text, count = re.subn(rf"(constexpr {name} =)[^;]*;", rf"\1 {value};", text)
        assert count == 1, name
    return text


def compiled(folder, text, headers, run, **defines):
    """The library of a kernel whose source for the host is `text`, with a function `run`."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    for name in headers:
        (folder / name).write_text(source_of(name))
    source, made = folder / "kernel.cc", folder / "kernel.so"
    source.write_text(f'#include "{_HERE}/device_threads.hh"\n{text}{run}')
    command = [compiler, "-std=c++20", "-O0", "-w", "-shared", "-fPIC", "-pthread", "-msse2"]
    command += [f"-D{name}={value}" for name, value in defines.items()]
    subprocess.run([*command, str(source), "-o", str(made)], check=True)
    return ctypes.CDLL(str(made))


def aligned(nbytes, value=0):
    """Bytes at a multiple of 64; with None for their value as they come."""
    whole = np.empty(nbytes + 64, np.uint8)
    if value is not None:
        whole.fill(value)
    start = -whole.ctypes.data % 64
    return whole[start : start + nbytes]
