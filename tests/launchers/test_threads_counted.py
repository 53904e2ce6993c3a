"""Ranks of any launcher compute with their share of the cores, or with what the user says."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import counted_threads
import pytest

from shardmath.base import config
from shardmath.launch.function import spawn
from started import command, missing

PROGRAM = str(Path(counted_threads.__file__))
VARIABLES = {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "SHARDMATH_THREADS"}
SHARE = 0  # a rank's share of the cores


# The program of a rank, with the variables that FOR_r has for rank r.
OWN = ["sh", "-c", 'eval "exec env \\$FOR_${PMI_RANK:-$RANK} \\"\\$@\\""', "sh", sys.executable]

# Launcher, its options, and of each job's ranks, or of all of one, the variables; the threads of
# libraries and transforms, and whether the libraries have them from the start, which they then
# keep. Our launcher gives all ranks the same; other launchers' ranks may differ, and start once.
JOBS = {
    "shardmath": ("shardmath", [], [("", SHARE, True)]),
    "shardmath, threads": ("shardmath", ["--threads", "2"], [("", 2, True)]),
    "shardmath, OpenMP": ("shardmath", [], [("OMP_NUM_THREADS=2", 2, True)]),
    "mpirun": (
        "mpirun",
        [],
        [("", SHARE, False), ("OMP_NUM_THREADS=2", 2, True), ("SHARDMATH_THREADS=1", 1, False)],
    ),
    # It sets OMP_NUM_THREADS to 1 where the user has not set it.
    "torchrun": ("torchrun", [], [("", 1, True), ("OMP_NUM_THREADS=2", 2, True)]),
}


def told(launcher: str, options: list[str], own: list[str]) -> list[list[Any]]:
    """What each rank says, in their order: of two ranks of ours, or of one for each of `own`."""
    kept = {n: v for n, v in config.environment().items() if n not in VARIABLES}
    ours = launcher == "shardmath"
    if ours:
        words, variables = command(launcher, 2), dict([own[0].split("=")] if own[0] else [])
    else:
        words = command(launcher, len(own), OWN)
        variables = {f"FOR_{rank}": given for rank, given in enumerate(own)}
    done = subprocess.run(
        [*words, *options, PROGRAM],
        capture_output=True,
        text=True,
        env={**kept, **variables},
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    lines = [line[4 * ours :] for line in done.stdout.splitlines()]  # without "[0] "
    return sorted(map(ast.literal_eval, lines))


@pytest.mark.parametrize("name", JOBS)
def test_threads_are_as_the_user_says_or_a_share(name: str) -> None:
    launcher, options, ranks = JOBS[name]
    if missing(launcher):
        pytest.skip(missing(launcher))
    facts = told(launcher, options, [own for own, *_ in ranks])
    for rank, before, within, whole, alone, after, share in facts:
        _, threads, kept = ranks[rank % len(ranks)]
        expected = threads or share
        assert set(within) == {whole} == {alone} == {expected}
        assert after == before
        if kept:
            assert set(before) == {expected}
    assert [rank for rank, *_ in facts] == list(range(max(2, len(ranks))))


def test_ranks_of_spawn_compute_with_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for _, before, within, whole, alone, after, share in spawn(counted_threads.report, 2):
        assert max(within) <= share and whole == alone == share
        assert after == before
        assert share == max(1, len(os.sched_getaffinity(0)) // 2)
