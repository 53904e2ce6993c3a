"""A user's program loses no types on its way through ours, and does what its types say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import preloaded

PROGRAM = Path(__file__).parent / "program.py"
SOURCE = Path(__file__).parents[2] / "src"


def run(python: list[str], *words: str) -> str:
    """What it prints."""
    environment = {"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [*python, *words], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_mypy_is_content_with_a_program_of_a_user(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    run([sys.executable], "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), str(PROGRAM))


def test_the_program_runs() -> None:
    printed = run(preloaded.python(), "-m", "shardmath", "run", "-n", "2", str(PROGRAM))
    assert printed.count("DistributedArray") == 2
