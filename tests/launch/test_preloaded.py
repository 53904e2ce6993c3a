"""What launchers start in place of a Python: programs do there what they do in a new one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launched import await_ends

import preloaded

PROGRAMS = {
    "what it is given": "print(__name__, sys.argv, os.environ['NAME'], os.getcwd(), input())",
    "a descriptor": "os.write(int(sys.argv[1]), b'written')",
    "output without an end": "sys.stdout.write('no end')",
    "what comes last": "atexit.register(print, 'last'); threading.Timer(0.01, print, 'a').start()",
    "a status": "sys.exit(3)",
    "a reason": "sys.exit('a reason')",
    "an exception": "1 / 0",
    "a signal": "os.kill(os.getpid(), signal.SIGKILL)",
    "a signal by default": "os.kill(os.getpid(), signal.SIGTERM)",
}
IMPORTS = "import atexit, os, signal, sys, threading\n"


def ended(words: list[str], folder: Path) -> tuple[int, str, list[str], bytes]:
    """The status, the output, the last line of the errors, and what came through a pipe."""
    reading, writing = os.pipe()
    done = subprocess.run(
        [*words, str(writing), "--x"],
        env={"NAME": "value", "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=folder,
        input="line\n",
        capture_output=True,
        text=True,
        check=False,
        pass_fds=[writing],
    )
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        # The numbers of two pipes may differ.
        output = done.stdout.replace(f"'{writing}'", "a number")
        return done.returncode, output, done.stderr.splitlines()[-1:], pipe.read()


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_does_what_a_new_python_does(tmp_path: Path, name: str) -> None:
    program = ["-c", IMPORTS + PROGRAMS[name]]
    expected = ended([sys.executable, *program], tmp_path)
    assert ended([*preloaded.python(), *program], tmp_path) == expected


def test_a_script_and_a_module(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("name = 'beside'\n")
    path = tmp_path / "script.py"
    path.write_text("import sys, beside\nprint(__name__, sys.argv[1:], sys.path[0], beside.name)\n")
    for program in ([str(path)], ["-m", "timeit", "-n", "1", "-r", "1", "-s", "print(1)"]):
        found = ended([*preloaded.python(), *program], tmp_path)
        expected = ended([sys.executable, *program], tmp_path)
        assert found[0] == expected[0]
        assert found[1].splitlines()[0] == expected[1].splitlines()[0]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_program_ends_with_what_stands_for_it(signum: signal.Signals) -> None:
    code = (
        "import os, signal\n"
        "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        "print(os.getpid(), flush=True)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen(
        [*preloaded.python(), "-c", code], stdout=subprocess.PIPE, text=True
    ) as stand_in:
        assert stand_in.stdout is not None
        pid = int(stand_in.stdout.readline())
        assert pid != stand_in.pid
        pidfd = os.pidfd_open(pid)
        stand_in.send_signal(signum)
        await_ends([pidfd])
        os.close(pidfd)
        assert stand_in.wait() == -signum
