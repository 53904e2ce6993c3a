"""The console commands, but for `run`, and `inspect`, which tests/reliability has."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import shardmath
from shardmath.__main__ import _parser, main
from shardmath.tools import doctor
from shardmath.tools.completion import SHELLS, completion
from shardmath.tools.tables import plain, show


def run(*arguments, **variables):
    command = [sys.executable, "-m", "shardmath", *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize("ranks", [1, 3])
def test_hello(ranks):
    done = run("hello", "-n", str(ranks))
    lines = [line.removeprefix("[0] ") for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert lines[0] == ("1 rank:" if ranks == 1 else f"{ranks} ranks:")
    assert [line.split()[0] for line in lines[2 : 2 + ranks]] == [*map(str, range(ranks))]
    assert all("cpu" in line for line in lines[2 : 2 + ranks])
    assert any("memory is reached by  host" in line for line in lines)


def test_hello_of_ranks_that_are_there():
    done = subprocess.run(
        [sys.executable, "-m", "shardmath", "run", "-n", "2", "-m", "shardmath", "hello"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("[0] 2 ranks:"), done.stderr


def test_what_an_operator_can_mend_is_one_line():
    """The first line of what each command says, and its status."""
    tries = {
        ("hello", "-n", "0"): (2, "usage: python -m shardmath hello"),
        ("hello", "-n", "9999999"): (1, "shardmath hello: 9999999 ranks take about 251658.2 GB"),
        ("hello", "--device", "gpu"): (
            1,
            "shardmath hello: rank 0 exited with status 1\nshardmath hel",
        ),
        ("trace", "-o", "/proc/no/t.json", __file__): (
            1,
            "shardmath trace: No such file or directory",
        ),
        ("trace", "--operations", "0", __file__): (2, "usage: python -m shardmath trace"),
        ("trace", "none.py"): (2, "shardmath trace: there is no file 'none.py'"),
    }
    for arguments, (status, says) in tries.items():
        done = run(*arguments)
        assert (done.returncode, done.stderr[: len(says)]) == (status, says)
        assert "Traceback" not in done.stderr


def test_doctor_without_numpy(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "numpy", None)
    monkeypatch.delitem(sys.modules, "shardmath.tools.doctor")
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == (
        "shardmath doctor: numpy is not installed: pip install numpy\n"
    )


def test_output_that_nobody_takes():
    """A reader that has gone, a full disk, and no stdout at all."""
    command = [sys.executable, "-m", "shardmath", "env"]
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as gone, Path("/dev/full").open("w") as full:
        for unbuffered in ("1", ""):
            environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
            for words, stdout, status, says in (
                (command, gone, 141, b""),
                (command, full, 1, b"shardmath env: No space left on device\n"),
                (["sh", "-c", '"$@" >&-', "sh", *command], None, 0, b""),
            ):
                streams = {"stdout": stdout, "stderr": subprocess.PIPE}
                done = subprocess.run(words, **streams, env=environment, check=False)
                assert (done.returncode, done.stderr) == (status, says)


def test_doctor(monkeypatch, capsys):
    monkeypatch.setenv("SHARDMATH_COMPILED", "0")
    monkeypatch.setattr(doctor, "_measured", lambda: [("a copy", "1 GB/s")])
    assert doctor.main() == 0
    text = capsys.readouterr().out
    for words in ("host (cpu)", "SHARDMATH_COMPILED=0 leaves it out", "numpy ", "a copy  1 GB/s"):
        assert words in text


@pytest.mark.parametrize("built", [0, 1, 8])
def test_what_was_not_built_is_said_once_where_nothing_was(monkeypatch, built):
    some = [*doctor.compiled.BUILT][:built]
    monkeypatch.setattr(doctor.compiled, "is_built", lambda name: name in some)
    monkeypatch.setattr(doctor.compiled, "is_wanted", lambda: True)
    monkeypatch.setattr(doctor.compiled, "other_pythons", lambda name: [])
    parts = doctor._in_brief({name: doctor._built(name) for name in doctor.compiled.BUILT})
    lacking = [found["reason"] for found in parts.values() if "reason" in found]
    assert len(lacking) == {0: 1, 1: 7, 8: 0}[built]
    assert all("compiler" in reason for reason in lacking)


def test_what_is_measured():
    rows = dict(doctor._measured())
    assert rows["a copy in memory"].endswith(" GB/s")
    assert len(rows) == (3 if len(os.sched_getaffinity(0)) > 1 else 2)


def test_configuration_is_plain_data():
    config = shardmath.show_config()
    assert set(config["packages"]["GPUs"]) in ({"version"}, {"reason", "mend"})
    assert config["transports"]["host (cpu)"] == {}
    for found in (*config["packages"].values(), *config["compiled"].values()):
        assert "reason" in found or "version" in found
    assert config["versions"]["numpy"] == doctor.np.__version__


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("no device", {"reason": "no device"}),
        (
            'GPUs need x (x is missing): pip install "a[b]"; with device_id "cpu" cores compute',
            {"reason": "GPUs need x (x is missing)", "mend": 'pip install "a[b]"'},
        ),
    ],
)
def test_reasons(said, expected):
    assert doctor._why(said) == expected


@pytest.mark.parametrize("shell", SHELLS)
def test_completion(shell):
    text = completion(_parser(), shell)
    for word in ("hello", "doctor", "inspect", "--device", "fish"):
        assert word in text
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=text, text=True, check=True)


def test_bash_completes():
    if not shutil.which("bash"):
        pytest.skip("there is no bash")
    tries = {"do": "doctor", "hello --d": "--device", "bench reco": "recorder", "env py": ""}
    for typed, expected in tries.items():
        words = ["shardmath", *typed.split()]
        script = f"""{completion(_parser(), "bash")}
COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}
_shardmath shardmath {words[-1]}; echo "${{COMPREPLY[@]}}" """
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected


def test_tables_of_narrow_terminals_are_whole(monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "14")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show("Two", ("name", "value"), [("a" * 9, "b" * 11)])
    text = capsys.readouterr().out
    assert (text.count("a"), text.count("b")) == (9 + 2, 11)
    assert text.count("\n") == 5


def test_tables_without_rich_fit_a_terminal(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.box", None)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show("Two", ("name", "what"), [("a" * 9, "word " * 20), ("b", "c")])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) in range(30, 41)
    assert "".join(lines).count("word") == 20
    assert lines[-1] == "  b          c"


def test_tables():
    assert (
        plain("Two", ("a", "long"), [("1", "x"), ("22", "")]) == "Two:\n  a   long\n  1   x\n  22"
    )
    rows = [("no", "so long a reason\na command")]
    assert plain("Cut", ("a", "b"), rows, most=10).split("\n")[2:] == [
        *("  no  so long a", "      reason", "      a command")
    ]
