"""One program under our launcher, mpiexec and torchrun: the same agreement."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BESIDE = Path(sys.executable).parent
PROGRAM = str(Path(__file__).parent / "agreeing.py")
LINE = "[0, 10] [0.0, 3.0, 6.0, 9.0, 12.0, 15.0, 18.0] [1.0, 1.0, 1.0, 1.0, 1.0, 1.0] ['0', '1']"

LAUNCHERS = [
    ("LocalProcessGroup", [sys.executable, "-m", "shardmath", "run", "-n", "2"]),
    ("MPIProcessGroup", [str(BESIDE / "mpiexec"), "-n", "2", sys.executable]),
    ("TorchProcessGroup", [str(BESIDE / "torchrun"), "--nproc-per-node", "2"]),
]


@pytest.mark.parametrize(("kind", "command"), LAUNCHERS)
def test_the_same_agreement(kind: str, command: list[str]) -> None:
    if not Path(command[0]).exists():
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(
        [*command, PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(line.removeprefix(f"[{line[1]}] ") for line in done.stdout.splitlines()) == [
        f"{kind}(rank={rank}, nranks=2) {LINE}" for rank in range(2)
    ]
