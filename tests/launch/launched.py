"""Start programs under a launcher and look at how they end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

RUN = [sys.executable, "-m", "shardmath", "run"]
RANK = "int(os.environ['SHARDMATH_RANK'])"
PREAMBLE = f"import os, signal, sys, time\nrank = {RANK}\n"


def write(folder: Path, program: str, name: str = "program.py") -> str:
    """The path of a script of `program`, which finds its number in `rank`."""
    path = folder / name
    path.write_text(PREAMBLE + textwrap.dedent(program))
    return str(path)


def run(
    script: str,
    *arguments: str,
    ranks: int = 3,
    options: Sequence[str] = (),
    stdin: str | None = None,
    environ: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `script` to its end."""
    return subprocess.run(
        [*RUN, "-n", str(ranks), *options, script, *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        input=stdin,
        env={**os.environ, **(environ or {})},
        check=False,
    )


@contextlib.contextmanager
def started(script: str, *, ranks: int = 3) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A running job and pidfds of its ranks, each of which has printed its process's number."""
    with subprocess.Popen(
        [*RUN, "-n", str(ranks), script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as launcher:
        assert launcher.stdout is not None
        lines = [launcher.stdout.readline() for _ in range(ranks)]
        pidfds = [os.pidfd_open(int(line.split()[1])) for line in lines]
        try:
            yield launcher, pidfds
        finally:
            for pidfd in pidfds:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                os.close(pidfd)
            launcher.kill()


def all_end(pidfds: Sequence[int], *, within: float) -> bool:
    """Whether the processes end before so many seconds have passed."""
    deadline = time.monotonic() + within
    return all(
        select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))[0] for pidfd in pidfds
    )
