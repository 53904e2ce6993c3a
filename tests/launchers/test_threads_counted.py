"""Ranks of any launcher compute with their share of the cores, or with what the user says."""

from __future__ import annotations

import ast
import os
import subprocess
from pathlib import Path

import counted_threads
import pytest

from shardmath.base import config
from shardmath.launch.function import spawn
from started import command, missing

PROGRAM = str(Path(counted_threads.__file__))
VARIABLES = {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "SHARDMATH_THREADS"}
SHARE = 0  # a rank's share of the cores


def told(launcher: str, options: list[str], environ: dict[str, str]) -> list[list[object]]:
    """What each of two ranks says."""
    words = command(launcher, 2)
    variables = {n: v for n, v in config.environment().items() if n not in VARIABLES} | environ
    done = subprocess.run(
        [*words, *options, PROGRAM], capture_output=True, text=True, env=variables, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    marked = launcher == "shardmath"  # with "[0] "
    return [ast.literal_eval(line[4 * marked :]) for line in done.stdout.splitlines()]


# Launcher, its options, variables; the threads of libraries and transforms, and whether the
# libraries have them from the start, which then is what they keep.
CASES = [
    ("shardmath", [], {}, SHARE, True),
    ("shardmath", ["--threads", "2"], {}, 2, True),
    ("shardmath", [], {"OMP_NUM_THREADS": "2"}, 2, True),
    ("mpirun", [], {}, SHARE, False),
    ("mpirun", [], {"OMP_NUM_THREADS": "2"}, 2, True),
    ("mpirun", [], {"SHARDMATH_THREADS": "1"}, 1, False),
    ("torchrun", [], {}, 1, True),  # it sets OMP_NUM_THREADS itself
    ("torchrun", [], {"OMP_NUM_THREADS": "2"}, 2, True),
]


@pytest.mark.parametrize(("launcher", "options", "environ", "threads", "kept"), CASES)
def test_threads_are_as_the_user_says_or_a_share(
    launcher: str, options: list[str], environ: dict[str, str], threads: int, kept: bool
) -> None:
    if missing(launcher):
        pytest.skip(missing(launcher))
    for before, within, whole, alone, after, share in told(launcher, options, environ):
        expected = threads or share
        assert set(within) == {whole} == {alone} == {expected}
        assert after == before
        if kept:
            assert set(before) == {expected}


def test_ranks_of_spawn_compute_with_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for before, within, whole, alone, after, share in spawn(counted_threads.report, 2):
        assert max(within) <= share and whole == alone == share
        assert after == before
        assert share == max(1, len(os.sched_getaffinity(0)) // 2)
