"""What is freed is not given back to the system, unless the user wants it so."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys

import numpy as np
import pytest

from shardmath.local import freed_memory

TURNS, NBYTES = 20, 3 << 20


def faults_of_pages():
    """Pages that the system gives while arrays come and go, in arrays."""
    x = np.ones(NBYTES // 8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(TURNS):
        held = [x + 1 for _ in range(4)]
        del held
    pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return pages * resource.getpagesize() / NBYTES


def main():
    """Print the faults before and after memory is kept, in a process whose heap has no room yet."""
    mallopt = ctypes.CDLL(None).mallopt
    for option in (freed_memory._MMAP_THRESHOLD, freed_memory._TRIM_THRESHOLD):
        mallopt(option, 128 << 10)  # as glibc begins
    given_back = faults_of_pages()
    freed_memory.keep_freed_memory()
    print(given_back, faults_of_pages())


@pytest.mark.parametrize(
    ("variables", "kept"),
    [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False),
     ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, False)],
)  # fmt: skip
def test_arrays_that_come_and_go(variables, kept):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | variables
    program = [sys.executable, "-c", f"import {__name__} as test; test.main()"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    before, after = map(float, done.stdout.split())
    assert before > 2 * TURNS  # of the 4 arrays in a turn
    assert (after < TURNS) == kept
