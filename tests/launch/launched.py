"""Start programs under a launcher and look at how they end.

No program has a limit of seconds: one that does not end is pytest's to report, and is killed then.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

RUN = [sys.executable, "-m", "shardmath", "run"]
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
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
        input=stdin,
        env={**os.environ, **(environ or {})},
        check=False,
    )


def hearing(ignored: Collection[int] = ()) -> Callable[[], None]:
    """What a process calls before a program, which then ignores these signals and no others.

    Else it would ignore what those who started pytest ignore: `nohup` does so, and a shell for jobs
    in the background.
    """

    def settle() -> None:
        for signum in END_SIGNALS:
            signal.signal(signum, signal.SIG_IGN if signum in ignored else signal.SIG_DFL)

    return settle


@contextlib.contextmanager
def started(
    script: str, *, ranks: int = 3, ignored: Collection[int] = ()
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A running job and pidfds of its ranks, each of which has printed its process's number.

    Its starter ignores the signals `ignored`.
    """
    with subprocess.Popen(
        [*RUN, "-n", str(ranks), script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hearing(ignored),  # noqa: PLW1509
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


def await_ends(pidfds: Sequence[int]) -> None:
    """Return when all these processes have ended. Nothing but a signal ends those of the tests."""
    for pidfd in pidfds:
        select.select([pidfd], [], [])
