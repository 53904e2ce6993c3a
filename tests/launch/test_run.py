"""`python -m shardmath run`: what the user sees, and how a job ends."""

from __future__ import annotations

import errno
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launched import END_SIGNALS, RUN, await_ends, hearing, run, started, write

import shardmath
from shardmath.launch.ranks import fork_ranks

FOREVER = """
while True:
    signal.pause()
"""


def test_every_rank_runs_the_script_as_python_would(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("name = 'beside the script'\n")
    script = write(
        tmp_path,
        """
        import beside
        print(sys.argv[1:], __name__, __file__, sys.path[0], beside.name)
        kept = open(f"{sys.argv[1]}.{rank}", "w")
        kept.write("never closed")
        """,
    )
    done = run(script, str(tmp_path / "out"), "-x", "--n=5", ranks=3)
    line = f"['{tmp_path}/out', '-x', '--n=5'] __main__ {script} {tmp_path} beside the script"
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {line}" for rank in range(3)]
    assert {(tmp_path / f"out.{rank}").read_text() for rank in range(3)} == {"never closed"}


def test_a_module_and_the_environment(tmp_path: Path) -> None:
    """Of the current folder, also by the console script, which no stack of the program shows."""
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "shardmath"
    script.write_text("import sys\nfrom shardmath.__main__ import main\nsys.exit(main())\n")
    write(
        tmp_path,
        """
        from shardmath.inspection.stacks import answers, stack_of
        frames = [os.path.basename(each.file) for each in stack_of(os.getpid(), answers())]
        print(sys.argv[1:], __name__, os.environ['SHARDMATH_SIZE'], frames[-1])
        """,
        "program.py",
    )
    command = [sys.executable, script, "run", "-n", "2", "-m", "program", "a"]
    environ = {**os.environ, "PYTHONPATH": str(Path(shardmath.__file__).parents[1])}
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    line = "['a'] __main__ 2 program.py"
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {line}" for rank in range(2)]
    assert (done.returncode, done.stderr) == (0, "")


SHARE = str(max(1, len(os.sched_getaffinity(0)) // 2))


NAMES = ["SHARDMATH_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"]


@pytest.mark.parametrize(
    ("options", "environ", "expected"),
    [
        ([], {}, [SHARE] * 4),
        ([], {"OMP_NUM_THREADS": "7"}, ["", "7", "", ""]),
        ([], {"MKL_NUM_THREADS": "7"}, [SHARE, SHARE, SHARE, "7"]),
        ([], {"SHARDMATH_THREADS": "7"}, ["7", "", "", ""]),
        (["--threads", "3"], {"MKL_NUM_THREADS": "7"}, ["3"] * 4),
    ],
)
def test_cores_are_shared_unless_the_user_says(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    environ: dict[str, str],
    expected: list[str],
) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    script = write(tmp_path, f"print([os.environ.get(name, '') for name in {NAMES}])")
    done = run(script, ranks=2, options=options, environ=environ)
    assert sorted(done.stdout.splitlines()) == [f"[0] {expected}", f"[1] {expected}"]


def test_lines_stay_whole(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        for number in range(500):
            print(str(rank) * 300, number)
        sys.stdout.write("10%\\r20%\\r")
        sys.stdout.write("no end")
        """,
    )
    done = run(script, ranks=3)
    lines = done.stdout.splitlines()
    for rank in range(3):
        mine = [line for line in lines if line.startswith(f"[{rank}] ")]
        text = str(rank) * 300
        assert mine == [
            *(f"[{rank}] {text} {number}" for number in range(500)),
            *(f"[{rank}] {part}" for part in ("10%", "20%", "no end")),
        ]
    assert len(lines) == 3 * 503


def test_standard_input_is_rank_0s(tmp_path: Path) -> None:
    script = write(tmp_path, "print(repr(sys.stdin.read()))")
    done = run(script, ranks=2, stdin="one\ntwo\n")
    assert sorted(done.stdout.splitlines()) == [r"[0] 'one\ntwo\n'", "[1] ''"]


@pytest.mark.parametrize("number", ["0", "-1", "two", "2.0", ""])
def test_the_number_of_ranks_is_a_positive_number(tmp_path: Path, number: str) -> None:
    done = run(write(tmp_path, "print(rank)"), options=["-n", number])
    assert done.returncode == 2 and "is not a positive number" in done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_standard_streams_may_be_closed(tmp_path: Path, closed: str) -> None:
    is_all = closed.count("-") > 1  # then with all sockets that a rank has
    made = "initialize('cpu').process_group" if is_all else "as_process_group(None)"
    script = write(
        tmp_path,
        f"""
        from shardmath import initialize
        from shardmath.group import as_process_group
        group = {made}
        size = len(group.allgather_bytes(b"here"))
        print("lost, perhaps")
        open(f"{{sys.argv[1]}}.{{rank}}", "w").write(str(size))
        """,
    )
    command = shlex.join([*RUN, "-n", "2", script, str(tmp_path / "out")])
    done = subprocess.run(f"{command} {closed}", shell=True, check=False)
    assert done.returncode == 0
    assert [(tmp_path / f"out.{rank}").read_text() for rank in range(2)] == ["2", "2"]


ENDS = [
    # what rank 2 does, the job's status, the last line, how many tracebacks
    ("raise ValueError('bad')", 1, "ValueError: bad", 1),
    ("raise MemoryError('too much')", 1, "MemoryError: too much", 1),
    ("raise KeyboardInterrupt", 130, "KeyboardInterrupt", 1),
    ("sys.exit(3)", 3, "rank 2 exited with status 3", 0),
    ("sys.exit('a reason')", 1, "a reason", 0),
    ("os._exit(7)", 7, "rank 2 exited with status 7", 0),
    ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 2 was killed by SIGKILL", 0),
    ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "rank 2 was killed by SIGSEGV", 0),
    ("os.abort()", 134, "rank 2 was killed by SIGABRT", 0),
    ("os.kill(os.getpid(), signal.SIGTERM)", 143, "rank 2 was killed by SIGTERM", 0),
]


@pytest.mark.parametrize(("action", "status", "last", "tracebacks"), ENDS)
def test_the_first_failing_rank_ends_the_job(
    tmp_path: Path, action: str, status: int, last: str, tracebacks: int
) -> None:
    script = write(tmp_path, f"if rank == 2:\n    {action}\n{FOREVER}")
    done = run(script, ranks=3)
    assert done.returncode == status
    assert done.stderr.splitlines()[-1].endswith(last)
    assert done.stderr.count("Traceback") == tracebacks
    assert "shardmath run: rank 2 " in done.stderr
    assert "launch/" not in done.stderr or status in (134, 139)  # faulthandler shows all frames


def test_a_syntax_error_is_shown_without_our_frames(tmp_path: Path) -> None:
    done = run(write(tmp_path, "x = = 1\n"), ranks=2)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "SyntaxError: invalid syntax"
    assert "runpy" not in done.stderr


def test_a_dead_rank_is_named_and_not_those_who_noticed(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        from shardmath.group import as_process_group
        group = as_process_group(None)
        group.allgather_bytes(b"all are here")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        group.allgather_bytes(b"rank 1 is not")
        """,
    )
    done = run(script, ranks=3)
    assert done.returncode == 137
    assert done.stderr == "shardmath run: rank 1 was killed by SIGKILL\n"


def test_a_rank_that_left_is_noticed(tmp_path: Path) -> None:
    """No rank failed of its own: the first consequence is the failure, shown once and last."""
    script = write(
        tmp_path,
        """
        from shardmath.group import as_process_group
        group = as_process_group(None)
        if rank != 1:
            group.allgather_bytes(b"")
        """,
    )
    done = run(script, ranks=3)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "RankFailure: rank" in done.stderr.splitlines()[-1]


def test_ranks_that_go_on_after_sigterm_are_killed(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        from shardmath.group import as_process_group
        signal.signal(signal.SIGTERM, lambda *_: print("asked to end"))
        as_process_group(None).allgather_bytes(b"all go on")
        if rank == 0:
            raise RuntimeError("over")
        """
        + FOREVER.replace("\n", "\n        "),
    )
    done = run(script, ranks=2)
    assert (done.returncode, done.stdout) == (1, "[1] asked to end\n")


@pytest.mark.parametrize("times", [5, pytest.param(50, marks=pytest.mark.torture)])
def test_no_orphans_when_the_launcher_is_killed(tmp_path: Path, times: int) -> None:
    script = write(
        tmp_path, f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(os.getpid())\n{FOREVER}"
    )
    for _ in range(times):
        with started(script, ranks=4) as (launcher, pidfds):
            launcher.kill()
            await_ends(pidfds)


@pytest.mark.parametrize("signum", END_SIGNALS)
def test_a_signal_ends_the_job(tmp_path: Path, signum: signal.Signals) -> None:
    script = write(tmp_path, f"print(os.getpid())\n{FOREVER}")
    with started(script) as (launcher, pidfds):
        launcher.send_signal(signum)
        await_ends(pidfds)
        _, errors = launcher.communicate()
    assert launcher.returncode == 128 + signum
    assert errors == f"shardmath run: ended by {signum.name}\n"


@pytest.mark.parametrize("ignored", [signal.SIGHUP, signal.SIGINT])
def test_what_the_starter_ignores_stays_ignored(tmp_path: Path, ignored: signal.Signals) -> None:
    """As under `nohup`: the hang-up, or Ctrl-C, passes by; the request to end does not."""
    script = write(tmp_path, f"print(os.getpid(), flush=True)\n{FOREVER}")
    with started(script, ignored=[ignored]) as (launcher, pidfds):
        launcher.send_signal(ignored)
        for pidfd in pidfds:
            signal.pidfd_send_signal(pidfd, ignored)
        launcher.terminate()
        await_ends(pidfds)
        _, errors = launcher.communicate()
    assert launcher.returncode == 128 + signal.SIGTERM
    assert errors == "shardmath run: ended by SIGTERM\n"


def test_ctrl_c_twice_kills(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        signal.signal(signal.SIGINT, lambda *_: print("interrupted"))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(os.getpid())
        """
        + FOREVER.replace("\n", "\n        "),
    )
    with started(script) as (launcher, pidfds):
        launcher.send_signal(signal.SIGINT)
        assert launcher.stdout is not None
        assert sorted(launcher.stdout.readline() for _ in pidfds) == [
            f"[{rank}] interrupted\n" for rank in range(3)
        ]
        launcher.send_signal(signal.SIGINT)
        await_ends(pidfds)
        launcher.communicate()
    assert launcher.returncode == 130


def test_on_a_terminal_rank_0_asks_and_ctrl_c_interrupts_once(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        if rank == 0:
            print("hello", input("name? "))
        """
        + FOREVER.replace("\n", "\n        "),
    )
    pid, terminal = pty.fork()
    if pid == 0:
        hearing()()
        os.execv(sys.executable, [*RUN, "-n", "2", script])
    seen = b""
    for expected, answer in ((b"[0] name? ", b"Ada\n"), (b"hello Ada\r\n", b"\x03")):
        while expected not in seen:
            seen += os.read(terminal, 1024)
        os.write(terminal, answer)
    with os.fdopen(terminal, "rb", buffering=0) as rest:
        try:
            while data := rest.read(1024):
                seen += data
        except OSError:  # the terminal's other side is closed
            pass
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert seen.count(b"ended by SIGINT") == 1
    assert b"Traceback" not in seen


def test_a_reader_that_goes_away_ends_the_job(tmp_path: Path) -> None:
    script = write(tmp_path, "while True:\n    print('more')\n")
    with subprocess.Popen(
        [*RUN, "-n", "2", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as job:
        assert job.stdout is not None and job.stderr is not None
        assert re.fullmatch(rb"\[\d\] more\n", job.stdout.readline())
        job.stdout.close()
        assert job.stderr.read() == b""
        assert job.wait() == 141


def test_output_that_cannot_be_written_ends_the_job(tmp_path: Path) -> None:
    script = write(tmp_path, "print('some')\n" + FOREVER)
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*RUN, "-n", "2", script], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == 1
    text = b"shardmath run: stdout takes no more output: No space left on device; the job was ended"
    assert done.stderr.splitlines() == [text]


def test_a_pipe_that_does_not_block_gets_all_output(tmp_path: Path) -> None:
    script = write(tmp_path, "print('x' * 300_000)")
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with subprocess.Popen([*RUN, "-n", "2", script], stdout=writing, stderr=subprocess.PIPE) as job:
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            lines = sorted(pipe.read().splitlines())
        assert lines == [b"[%d] " % rank + b"x" * 300_000 for rank in (0, 1)]
        assert job.wait() == 0


def test_too_few_descriptors(tmp_path: Path) -> None:
    script = write(tmp_path, "print('never')")
    limited = f"ulimit -n 32; exec {shlex.join([*RUN, '-n', '20', script])}"
    done = subprocess.run(["bash", "-c", limited], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    words = "shardmath run: no rank was started: 20 ranks need more descriptors than 32"
    assert done.stderr == f"{words}: raise ulimit -n\n"


def test_too_few_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refused)
    with pytest.raises(OSError, match="20 ranks are more processes than may start: raise ulimit"):
        fork_ranks(20, variables={})


def test_bad_calls(tmp_path: Path) -> None:
    missing = run(str(tmp_path / "none.py"))
    assert missing.returncode == 2 and "there is no file" in missing.stderr
    assert run("x.py", ranks=0).returncode == 2
    script = write(tmp_path, "print('never')")
    twice = run("python", script)
    assert (twice.returncode, twice.stdout) == (2, "")
    assert "run starts Python itself: leave 'python' out" in twice.stderr


def test_the_number_of_ranks_behind_the_script_is_the_scripts(tmp_path: Path) -> None:
    script = write(tmp_path, "print(sys.argv[1:], os.environ['SHARDMATH_SIZE'])")
    done = subprocess.run([*RUN, script, "-n", "4"], capture_output=True, text=True, check=True)
    assert done.stdout == "[0] ['-n', '4'] 1\n"
    assert done.stderr.startswith("shardmath run: 1 rank: options of run stand before the script")


def test_start_is_fast(tmp_path: Path) -> None:
    """Every rank is a fork of the one Python that is started, and imports what its program does."""
    script = write(
        tmp_path,
        """
        from pathlib import Path
        words = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (os.getppid(), os.getpid())]
        print(os.getppid(), words[0] == words[1], "numpy" in sys.modules)
        """,
    )
    lines = run(script, ranks=4).stdout.splitlines()
    launcher = lines[0].split()[1]
    assert sorted(lines) == [f"[{rank}] {launcher} True False" for rank in range(4)]


def test_the_launcher_imports_no_numpy() -> None:
    code = "import shardmath.__main__, shardmath.launch.program, sys; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_what_a_rank_starts_is_no_rank(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import subprocess
        from shardmath.group import as_process_group
        print(as_process_group(None))
        if len(sys.argv) == 1:
            subprocess.run([sys.executable, __file__, "again"], check=True)
        """,
    )
    lines = sorted(run(script, ranks=2).stdout.splitlines())
    assert lines == [
        "[0] LocalProcessGroup(rank=0, nranks=2)",
        "[0] SoloProcessGroup(rank=0, nranks=1)",
        "[1] LocalProcessGroup(rank=1, nranks=2)",
        "[1] SoloProcessGroup(rank=0, nranks=1)",
    ]


def test_env_and_version() -> None:
    for arguments, expected in ((["env"], "SHARDMATH_TIMEOUT"), (["--version"], "0.1.0")):
        done = subprocess.run(
            [sys.executable, "-m", "shardmath", *arguments],
            capture_output=True,
            text=True,
            check=True,
        )
        assert expected in done.stdout
