"""Ranks that srun starts, under a Slurm of the tests' own: see tests/slurm.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import slurm

RANKS = 2
MEETING = """
import sys
import numpy as np
import shardmath
from shardmath.collectives import all_reduce

context = shardmath.initialize("cpu")
assert not {"torch", "mpi4py"} & set(sys.modules)
print(context.rank, context.size, all_reduce(np.ones(2))[0], type(context.process_group).__name__)
"""
DYING = """
import os, signal
import shardmath

context = shardmath.initialize("cpu")
if context.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    context.barrier()
except shardmath.errors.RankFailure as error:
    print(context.rank, error.ranks)
"""
WITH_MPI = """
from mpi4py import MPI
import shardmath

context = shardmath.initialize("cpu")
print(context.rank, context.size, type(context.process_group).__name__)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Cluster]:
    try:
        with slurm.cluster(tmp_path_factory.mktemp("slurm")) as made:
            yield made
    except slurm.Unavailable as why:
        pytest.skip(str(why))


def srun(
    cluster: slurm.Cluster, script: Path, program: str, kind: str = "none", ranks: int = RANKS
) -> list[str]:
    """The lines that the ranks print, in order."""
    script.write_text(program)
    done = cluster.run("srun", f"--mpi={kind}", "-n", str(ranks), sys.executable, str(script))
    print(done.stderr)
    return sorted(done.stdout.splitlines())


@pytest.mark.parametrize("kind", ["none", "pmi2", "pmix"])
def test_ranks_meet_without_any_library(cluster: slurm.Cluster, tmp_path: Path, kind: str) -> None:
    """Whatever srun offers to an MPI."""
    if cluster.run("srun", f"--mpi={kind}", "true").returncode:
        pytest.skip(f"this srun has no {kind}")
    lines = srun(cluster, tmp_path / "program.py", MEETING, kind)
    assert lines == [f"{rank} {RANKS} {RANKS:.1f} TcpProcessGroup" for rank in range(RANKS)]


def test_a_program_that_has_started_mpi_meets_by_it(cluster: slurm.Cluster, tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    lines = srun(cluster, tmp_path / "program.py", WITH_MPI, "pmi2")
    assert lines == [f"{rank} {RANKS} MPIProcessGroup" for rank in range(RANKS)]


def test_survivors_name_a_rank_that_is_killed(cluster: slurm.Cluster, tmp_path: Path) -> None:
    assert srun(cluster, tmp_path / "program.py", DYING, ranks=3) == ["0 (1,)", "2 (1,)"]


def test_a_batch_script_calls_srun(cluster: slurm.Cluster, tmp_path: Path) -> None:
    """A program in it that srun does not start is one of several ranks, and says what to do."""
    program, script, output = (tmp_path / name for name in ("program.py", "job.sh", "output"))
    program.write_text(MEETING)
    command = f"{sys.executable} {program}"
    script.write_text(f"#!/bin/sh\n{command}\necho then\nsrun {command} | sort\n")
    done = cluster.run("sbatch", "--wait", "-n", str(RANKS), "-o", str(output), str(script))
    assert done.returncode == 0, done.stderr
    alone, _, together = output.read_text().partition("then\n")
    assert "start the program with srun, which a batch script is not" in alone
    lines = [f"{rank} {RANKS} {RANKS:.1f} TcpProcessGroup" for rank in range(RANKS)]
    assert together.splitlines() == lines
