"""`shardmath bench NAME`: a benchmark of the installed package, as a table, JSON and a picture.

A benchmark is a program of the folder `benchmarks`, which is part of the package. It runs in a
process of its own, and writes a JSON file of rows, which is read here.
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
from shardmath.tools.drawing import below, columns, save_beside
from shardmath.tools.tables import show

FOLDER = Path(__file__).parent.parent / "benchmarks"

Rows = Sequence[dict[str, Any]]


def names() -> dict[str, str]:
    """The names of the benchmarks, each with its first sentence."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        tree = ast.parse(path.read_text())
        if any(isinstance(each, ast.If) and "__name__" in ast.unparse(each) for each in tree.body):
            first = (ast.get_docstring(tree) or "").partition("\n\n")[0]
            words = re.split(r": `(?:python |benchmarks/)", " ".join(first.split()))[0]
            found[path.stem] = f"{words.rstrip(':.')}."
    return found


def missing(name: str) -> list[str]:
    """The packages that a benchmark imports at its top, and that are not installed."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    modules = [each.names[0].name for each in tree.body if isinstance(each, ast.Import)]
    modules += [each.module or "" for each in tree.body if isinstance(each, ast.ImportFrom)]
    packages = {each.partition(".")[0] for each in modules} - sys.stdlib_module_names
    siblings = {path.stem for path in FOLDER.glob("*.py")}
    return sorted(each for each in packages - siblings if find_spec(each) is None)


def bench(name: str, arguments: Sequence[str], *, output: Path, plot: bool) -> int:
    """Run the benchmark `name` with its own `arguments`; without a name, list them.

    Its JSON goes into the folder `output`, and with `plot` a picture of the same name. The result
    is the exit status: the benchmark's, 2 for a name that does not exist, 1 where a package is
    missing.
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
    """The titles of the rows' columns, and their cells. Values that are neither text nor numbers
    are left out; a dictionary becomes a column for each key, with its title before the key.
    """
    rows = [_flat(row) for row in rows]
    titles = [
        title
        for title in dict.fromkeys(title for row in rows for title in row)
        if all(isinstance(row.get(title, ""), str | int | float) for row in rows)
    ]
    return titles, [[_text(row.get(title, "")) for title in titles] for row in rows]


def picture(rows: Rows) -> Any:
    """Bars for each column of measured numbers: those that are not integers."""
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
    files = save_beside(path, lambda: picture(rows), "bench") if plot else [str(path)]
    print(f"written: {', '.join(files)}")


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row, with a column for each value in its dictionaries."""
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
