"""`shardmath bench NAME`: a benchmark of the installed package, as a table, JSON and a picture.

A benchmark is a program of the folder `benchmarks`, which is part of the package. It runs in a
process of its own, and writes a JSON file of rows, which is read here.
"""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardmath.base import config
from shardmath.tools.drawing import below, columns, save_beside
from shardmath.tools.tables import show

FOLDER = Path(__file__).parent.parent / "benchmarks"
DEVICES = Path("/dev")
_OTHERS = {"examples", "tests"}  # folders of the source
_TICK = 1.0  # seconds between two looks at a benchmark that runs

Rows = Sequence[dict[str, Any]]


def names() -> dict[str, str]:
    """The names of the benchmarks, each with its first sentence.

    They are the programs that use one of their neighbours, such as `record`; the others help them.
    """
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        tree = _parsed(path.stem)
        is_program = any(
            isinstance(each, ast.If) and "__name__" in ast.unparse(each) for each in tree.body
        )
        if is_program and _imported(tree) & _neighbours():
            first = (ast.get_docstring(tree) or "").partition("\n\n")[0]
            words = re.split(r": `(?:python |benchmarks/)", " ".join(first.split()))[0]
            found[path.stem] = f"{words.rstrip(':.')}."
    return found


def missing(name: str) -> list[str]:
    """The packages that a benchmark imports, at its top or in any case where one of its functions
    is called, and that are not installed.
    """
    tree = _parsed(name)
    ours = {path.stem for folder in _folders(tree) for path in folder.rglob("*.py")}
    functions = (each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef))
    imported = _imported(tree).union(*map(_imported, functions))
    packages = imported - _neighbours() - ours - sys.stdlib_module_names
    return sorted(each for each in packages if find_spec(each) is None)


def _parsed(name: str) -> ast.Module:
    return ast.parse((FOLDER / f"{name}.py").read_text())


def _neighbours() -> set[str]:
    return {path.stem for path in FOLDER.glob("*.py")}


def _imported(tree: ast.Module | ast.FunctionDef) -> set[str]:
    """The packages that a benchmark, or a function of it, imports first of all; its neighbours are
    among them.
    """
    modules = [each.names[0].name for each in tree.body if isinstance(each, ast.Import)]
    modules += [each.module or "" for each in tree.body if isinstance(each, ast.ImportFrom)]
    return {each.partition(".")[0] for each in modules}


def _folders(tree: ast.Module) -> list[Path]:
    """The other folders of the source that a benchmark names, because it takes modules from there.

    An installed package has none of them.
    """
    texts = {each.value for each in ast.walk(tree) if isinstance(each, ast.Constant)}
    return [FOLDER.resolve().parent / each for each in sorted(_OTHERS & texts)]


def bench(name: str, arguments: Sequence[str], *, output: Path, plot: bool) -> int:
    """Run the benchmark `name` with its own `arguments`; without a name, list them.

    Its JSON goes into the folder `output`, and with `plot` a picture of the same name. The result
    is the exit status: the benchmark's, 2 for a name that does not exist, 1 where a package, a
    folder of the source, or a GPU is missing. Raises OSError where nothing can be written there.
    """
    known = names()
    if not name:
        show("Benchmarks", ("name", "what it measures"), list(known.items()))
        return 0
    if name not in known:
        print(f"shardmath bench: there is no {name!r} among {', '.join(known)}", file=sys.stderr)
        return 2
    absent = [folder.name for folder in _folders(_parsed(name)) if not folder.is_dir()]
    if absent:
        words = f"{name} uses the folder {' and '.join(absent)} of the source: run it there"
        print(f"shardmath bench: {words}", file=sys.stderr)
        return 1
    lacks = missing(name)
    if lacks:
        words = " ".join(lacks)
        print(f"shardmath bench: {name} needs {words}: pip install {words}", file=sys.stderr)
        return 1
    if "on_gpus" in _imported(_parsed(name)) and not [*DEVICES.glob("nvidia[0-9]*")]:
        print(f"shardmath bench: {name} needs GPUs, and there is none here", file=sys.stderr)
        return 1
    output.mkdir(parents=True, exist_ok=True)
    (output / f".{name}").touch()  # raises now where no file can be written
    (output / f".{name}").unlink()
    before = _written(output)
    # Ctrl-C reaches it through this process alone: of itself it would show where it was.
    with subprocess.Popen(
        [sys.executable, str((FOLDER / f"{name}.py").resolve()), *arguments],
        env={**config.environment(), "BENCHMARK_RESULTS": str(output.resolve())},
        process_group=0,
    ) as program:
        try:
            status = _watched(program, name)
        except KeyboardInterrupt:
            os.killpg(program.pid, signal.SIGTERM)
            raise
    for path, when in sorted(_written(output).items()):
        if before.get(path) == when:
            continue
        try:
            rows: Rows = json.loads(path.read_text())["rows"]
        except ValueError:
            print(f"shardmath bench: {path} is not whole: is the disk full?", file=sys.stderr)
            status = status or 1
        else:
            _tell(path, rows, plot=plot)
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


def picture(name: str, rows: Rows) -> Any:
    """Bars for each column of numbers that benchmark `name` has measured: those with fractions.

    The others name the bars: texts as they are, integers with the title of their column. Columns
    that are one dictionary in the rows, such as the times of several libraries, have one scale.
    """
    families = {
        title: column
        for row in rows
        for column, value in row.items()
        for title in _flat({column: value})
    }
    rows = [_flat(row) for row in rows]
    titles, cells = table(rows)
    measured = [title for title in titles if any(isinstance(row.get(title), float) for row in rows)]
    labels = [
        ", ".join(
            text if isinstance(row[title], str) else f"{title} {text}"
            for title, text in zip(titles, line, strict=True)
            if text and title not in measured and not isinstance(row[title], bool)
        )
        for row, line in zip(rows, cells, strict=True)
    ]
    drawn: dict[str, list[tuple[str, float]]] = {}
    for title in measured:
        values = [(label, row.get(title)) for label, row in zip(labels, rows, strict=True)]
        drawn[title] = [
            (label, float(x)) for label, x in values if isinstance(x, int | float) and x >= 0
        ]
    images = []
    for title, bars in drawn.items():
        family = [other for other in measured if families[other] == families[title]]
        others = [bar for other in family for bar in drawn[other]]
        images.append(columns(f"{name}: {title}", bars, others=others))
    return below(images)


def _watched(program: subprocess.Popen[bytes], name: str) -> int:
    """The exit status of a benchmark. On a terminal, stderr shows meanwhile how long it has run.

    Its own output begins at the start of that line, and so replaces it.
    """
    if not sys.stderr.isatty():
        return program.wait()
    begun, words = time.monotonic(), ""
    while (status := program.poll()) is None:
        words = f"{name} has run for {time.monotonic() - begun:.0f} s"
        print(words, end="\r", file=sys.stderr, flush=True)
        with suppress(subprocess.TimeoutExpired):
            program.wait(_TICK)
    print(" " * len(words), end="\r", file=sys.stderr, flush=True)
    return status


def _written(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.glob("*.json")}


def _tell(path: Path, rows: Rows, *, plot: bool) -> None:
    show(path.stem, *table(rows))
    files = save_beside(path, lambda: picture(path.stem, rows), "bench") if plot else [str(path)]
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
