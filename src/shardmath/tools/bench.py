"""`shardmath bench NAME`: a benchmark of the installed package, as a table, JSON and a picture.

A benchmark is a program of the folder `benchmarks`, which the package has too. It runs in a process
of its own, and writes a JSON file of rows, which is what is read here.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardmath.base import config
from shardmath.errors import BackendUnavailable
from shardmath.tools.drawing import below, columns, save
from shardmath.tools.tables import show

FOLDER = Path(__file__).parent.parent / "benchmarks"

Rows = Sequence[dict[str, Any]]


def names() -> dict[str, str]:
    """Each benchmark, and its first sentence."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        tree = ast.parse(path.read_text())
        if any(isinstance(each, ast.If) and "__name__" in ast.unparse(each) for each in tree.body):
            first = (ast.get_docstring(tree) or "").partition("\n\n")[0]
            words = re.split(r": `(?:python |benchmarks/)", " ".join(first.split()))[0]
            found[path.stem] = f"{words.rstrip(':.')}."
    return found


def missing(name: str) -> list[str]:
    """The packages that a benchmark imports first of all, and that are not here."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    modules = [each.names[0].name for each in tree.body if isinstance(each, ast.Import)]
    modules += [each.module or "" for each in tree.body if isinstance(each, ast.ImportFrom)]
    packages = {each.partition(".")[0] for each in modules} - sys.stdlib_module_names
    siblings = {path.stem for path in FOLDER.glob("*.py")}
    return sorted(each for each in packages - siblings if find_spec(each) is None)


def bench(name: str, arguments: Sequence[str], *, output: Path, plot: bool) -> int:
    """Run the benchmark `name` with its own `arguments`; without a name, list them.

    Its JSON goes into the folder `output`, and with `plot` a picture of the same name. The exit
    status: the benchmark's, or 2 for one that is not there, 1 for one that lacks a package.
    """
    known = names()
    if not name:
        show("Benchmarks", ("name", "what it measures"), list(known.items()))
        return 0
    if name not in known:
        print(f"shardmath bench: there is no {name!r} among {', '.join(known)}", file=sys.stderr)
        return 2
    lacks = missing(name)
    if lacks:
        words = " ".join(lacks)
        print(f"shardmath bench: {name} needs {words}: pip install {words}", file=sys.stderr)
        return 1
    output.mkdir(parents=True, exist_ok=True)
    before = _written(output)
    status = subprocess.run(
        [sys.executable, str((FOLDER / f"{name}.py").resolve()), *arguments],
        env={**config.environment(), "BENCHMARK_RESULTS": str(output.resolve())},
        check=False,
    ).returncode
    for path, when in sorted(_written(output).items()):
        if before.get(path) != when:
            _tell(path, plot=plot)
    return status


def table(rows: Rows) -> tuple[list[str], list[list[str]]]:
    """The titles of the rows' columns, and their cells. What is no text or number has no column; a
    dictionary has one for each of its keys, whose title follows its own.
    """
    rows = [_flat(row) for row in rows]
    titles = [
        title
        for title in dict.fromkeys(title for row in rows for title in row)
        if all(isinstance(row.get(title, ""), str | int | float) for row in rows)
    ]
    return titles, [[_text(row.get(title, "")) for title in titles] for row in rows]


def picture(rows: Rows) -> Any:
    """Bars of each column of numbers that were measured: those that are no whole numbers."""
    rows = [_flat(row) for row in rows]
    titles, cells = table(rows)
    measured = [title for title in titles if any(isinstance(row.get(title), float) for row in rows)]
    named = [i for i, title in enumerate(titles) if title not in measured]
    labels = [" ".join(row[i] for i in named if row[i]) for row in cells]
    images = []
    for title in measured:
        values = [(label, row.get(title)) for label, row in zip(labels, rows, strict=True)]
        drawn = [(label, float(x)) for label, x in values if isinstance(x, int | float) and x >= 0]
        images.append(columns(title, drawn))
    return below(images)


def _written(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.glob("*.json")}


def _tell(path: Path, *, plot: bool) -> None:
    rows: Rows = json.loads(path.read_text())["rows"]
    show(path.stem, *table(rows))
    files = [str(path)]
    if plot:
        try:
            save(picture(rows), path.with_suffix(".png"))
            files.append(str(path.with_suffix(".png")))
        except BackendUnavailable as error:
            print(f"shardmath bench: no picture: {error}", file=sys.stderr)
    print(f"written: {', '.join(files)}")


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row, with what is in its dictionaries in columns of their own."""
    flat: dict[str, Any] = {}
    for title, value in row.items():
        inner = isinstance(value, dict)
        flat |= (
            {f"{title} {key}": x for key, x in _flat(value).items()} if inner else {title: value}
        )
    return flat


def _text(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"
