"""Programs that run with a changed copy of the package: what someone adds is added there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import shardmath

__all__ = ["run_with"]


def run_with(folder: Path, added: Mapping[str, Mapping[str, str]], program: str, *args: str) -> str:
    """What `program` prints with a copy of the package, made in `folder`, in which lines are added.

    `added` has for each file of the package what comes before which line. The program must end
    well.
    """
    copy = folder / "shardmath"
    shutil.copytree(Path(shardmath.__file__).parent, copy)
    for name, lines in added.items():
        text = (copy / name).read_text()
        for line, before in lines.items():
            assert text.count(line) == 1, f"{name} has one {line!r}"
            text = text.replace(line, before + line)
        (copy / name).write_text(text)
    (folder / "program.py").write_text(program)
    others = os.environ.get("PYTHONPATH", "")
    done = subprocess.run(
        [sys.executable, str(folder / "program.py"), *args],
        env=os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{others}"},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
