"""One program under our launcher, mpirun and torchrun: the same agreement."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import preloaded
from started import command, missing

PROGRAM = str(Path(__file__).parent / "agreeing.py")
LINE = "[0, 10] [0.0, 3.0, 6.0, 9.0, 12.0, 15.0, 18.0] [1.0, 1.0, 1.0, 1.0, 1.0, 1.0] ['0', '1']"

KINDS = {
    "shardmath": "LocalProcessGroup",
    "mpirun": "MPIProcessGroup",
    "torchrun": "TorchProcessGroup",
}


@pytest.mark.parametrize("launcher", KINDS)
def test_the_same_agreement(launcher: str) -> None:
    if missing(launcher):
        pytest.skip(missing(launcher))
    done = subprocess.run(
        [*command(launcher, 2, preloaded.python()), PROGRAM],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(line.removeprefix(f"[{line[1]}] ") for line in done.stdout.splitlines()) == [
        f"{KINDS[launcher]}(rank={rank}, nranks=2) {LINE}" for rank in range(2)
    ]
