"""The program of docs/device-verbs.md runs as it stands, and the examples with kernels on GPUs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from visible import GPUS

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "device-verbs.md"


def launched(program, size):
    command = [sys.executable, "-m", "shardmath", "run", "-n", str(size), str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_program(gpus, tmp_path):
    if GPUS < 2:
        pytest.skip("the program takes a GPU for each of two ranks")
    path = tmp_path / "program.py"
    path.write_text(re.search(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)[1])
    lines = sorted(launched(path, 2).splitlines())
    wanted = [f"[{r}] rank {r}: {[float(r)] * 4 + [float(1 - r)] * 4}" for r in range(2)]
    assert lines == wanted


@pytest.mark.parametrize("example", ["ring_all_reduce", "one_shot_all_reduce"])
def test_examples(gpus, size, example):
    if size > GPUS:
        pytest.skip("the examples take a GPU for each rank")
    printed = launched(ROOT / "examples" / f"{example}.py", size)
    if "Triton" in printed:
        pytest.skip(printed)
    assert f"{size} rank(s)" in printed and printed.count("GB/s") >= 8
