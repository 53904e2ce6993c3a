"""`shardmath bench`: benchmarks by their names, and what is made of what they write."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from PIL import Image

from shardmath.__main__ import main
from shardmath.tools import bench
from shardmath.tools.bench import missing, names, picture, table

ROOT = Path(__file__).parents[2]
BENCHMARK = """
'''What {name} takes: `python benchmarks/{name}.py`.

More of it.
'''
import os, sys
from pathlib import Path
import json
import sibling

if __name__ == "__main__":
    rows = [{{"what": each, "s": 0.5 * i}} for i, each in enumerate(sys.argv[1:])]
    Path(os.environ["BENCHMARK_RESULTS"], "{name}.json").write_text(json.dumps({{"rows": rows}}))
    sys.exit({status})
"""
NEEDS = """
import no_such_package.x
def measure():
    import none_such
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of two benchmarks and what they share."""
    made = tmp_path / "benchmarks"
    made.mkdir()
    for name, status in {"one": 0, "two": 3}.items():
        text = BENCHMARK.format(name=name, status=status).lstrip()
        (made / f"{name}.py").write_text(text)
    (made / "sibling.py").write_text("")
    (made / "needy.py").write_text((made / "one.py").read_text() + NEEDS)
    (made / "gpu.py").write_text((made / "one.py").read_text() + "from on_gpus import Ranks\n")
    (made / "on_gpus.py").write_text("")
    (made / "far.py").write_text((made / "one.py").read_text() + "FOLDER = 'tests'\n")
    cut = (made / "one.py").read_text().replace("one.json", "cut.json").replace("json.dumps(", "(")
    (made / "cut.py").write_text(cut.replace('{"rows": rows}', "'{'"))
    monkeypatch.setattr(bench, "FOLDER", made)
    return tmp_path


def test_all_benchmarks_have_names_and_say_what_they_measure():
    programs = {
        path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()
    }
    assert programs - set(names()) == {"gpu_before_after", "gpu_pictures", "navier_stokes_peers"}
    assert all(len(sentence) > 10 for sentence in names().values())


def test_the_list(folder, capsys):
    assert main(["bench"]) == 0
    text = capsys.readouterr().out
    assert "one" in text
    assert "What two takes" in text
    assert "python" not in text
    assert "sibling" not in text


@pytest.mark.parametrize(
    "arguments", ["--plot -o {} one apples pears", "-o {} one --plot apples pears"]
)
def test_a_benchmark(folder, capfd, monkeypatch, arguments):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    other = folder / "out" / "other.json"
    other.parent.mkdir()
    other.write_text("no JSON: it is none of this benchmark")
    assert main(["bench", *arguments.format(other.parent).split()]) == 0
    out, err = capfd.readouterr()
    assert re.fullmatch(r"(one has run for \d+ s\r)+ +\r", err)
    lines = out.splitlines()
    assert lines[:4] == ["one:", "  what    s", "  apples  0", "  pears   0.5"]
    assert json.loads((folder / "out" / "one.json").read_text())["rows"][1]["s"] == 0.5
    with Image.open(folder / "out" / "one.png") as image:
        assert image.size[1] > 3 * 34


@pytest.mark.parametrize(
    ("name", "status", "says"),
    [
        ("two", 3, ""),
        ("three", 2, "one, two"),
        ("needy", 1, "pip install no_such_package none_such"),
        ("cut", 1, "cut.json is not whole: is the disk full?"),
        ("far", 1, "shardmath bench: far uses the folder tests of the source: run it there\n"),
        ("gpu", 1, "shardmath bench: gpu needs GPUs, and there is none here\n"),
    ],
)
def test_failures(folder, capfd, monkeypatch, name, status, says):
    monkeypatch.setattr(bench, "DEVICES", folder)
    assert main(["bench", "-o", str(folder), name]) == status
    assert says in capfd.readouterr().err
    assert main(["bench", "-o", "/proc/none", "one"]) == 1
    assert "shardmath bench: No such file or directory: /proc/none" in capfd.readouterr().err


def test_what_is_here_is_not_missing():
    here = {"departing", "namespaces", "numpy", "record", "shardmath"}
    assert [name for name in names() if here & {*missing(name)}] == []


def test_tables_leave_out_what_is_no_cell():
    rows = [{"a": 1, "b": 0.123456, "c": [1]}, {"a": "x", "d": True}]
    assert table(rows) == (["a", "b", "d"], [["1", "0.1235", ""], ["x", "", "True"]])
    assert table([]) == ([], [])


@pytest.mark.parametrize("name", ["calls", "matmul", "starting"])
def test_pictures_of_results(name):
    rows = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["rows"]
    assert picture(name, rows).size[1] > 34 * len(rows)
