"""What every benchmark needs: medians, and a table and a JSON file of them, with where and when.

BENCHMARK_RESULTS names another folder for the file. `shardmath bench` uses this for the user's
folder, and shows the table itself.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from shardmath.tools.bench import table
from shardmath.tools.tables import show

Given = TypeVar("Given", int, str)

RESULTS = Path(os.environ.get("BENCHMARK_RESULTS") or Path(__file__).parent / "results")


def argument(place: int, default: Given) -> Given:
    """The argument of the command line at a place, 1 being the first; `default` if it has fewer."""
    return type(default)(sys.argv[place]) if len(sys.argv) > place else default


def beside_python(tool: str) -> str | None:
    """The program of that name in the environment of this interpreter, if it is there."""
    return shutil.which(tool, path=str(Path(sys.executable).parent))


def reason(error: Exception) -> str:
    """Why a program could not run: the last line of its errors, or that of the exception."""
    return (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1]


def timed(call: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each of so many calls in a row."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def mean_seconds(call: Callable[[], object], count: int) -> float:
    """The mean time of so many calls in a row, for which the clock is read but twice."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def write(name: str, rows: Iterable[dict[str, Any]], **facts: Any) -> Path:
    """Write `<name>.json` into RESULTS: the rows, the facts, and where they were measured. Shows
    the rows.
    """
    RESULTS.mkdir(exist_ok=True)
    path, rows = RESULTS / f"{name}.json", list(rows)
    record = {"benchmark": name, **circumstances(), **facts, "rows": rows}
    path.write_text(json.dumps(record, indent=1) + "\n")
    if "BENCHMARK_RESULTS" not in os.environ:
        show(name, *table(rows))
        print(f"written: {path}")
    return path


def keep(name: str, rows: Iterable[dict[str, Any]], commit: str, **facts: Any) -> None:
    """Write as `write` does, and once more into the folder that $OUT names, if it names one.

    `commit` is the source's, where it has no repository; empty where it has.
    """
    if commit:
        facts["commit"] = commit
    path = write(name, rows, **facts)
    out = os.environ.get("OUT")
    if out:
        Path(out, path.name).write_text(path.read_text())


def circumstances() -> dict[str, Any]:
    """Date, commit, machine and versions, of the libraries that are loaded."""
    loaded = {
        name: sys.modules.get(name) for name in ("shardmath", "numpy", "scipy", "torch", "mpi4py")
    }
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "--short", "HEAD")
        + ("+" if _git("status", "--short", "src") else ""),
        "machine": {
            "system": platform.system(),
            **_cpu(),
            "cores": len(os.sched_getaffinity(0)),
        },
        "python": platform.python_version(),
        "versions": {k: str(getattr(m, "__version__", "")) for k, m in loaded.items() if m},
    }


def _git(*arguments: str) -> str:
    here = Path(__file__).parent.parent
    return subprocess.run(
        ["git", *arguments], check=False, cwd=here, capture_output=True, text=True
    ).stdout.strip()


def _cpu() -> dict[str, str]:
    """What the processor calls itself, which may be a maker's name alone, and what it is."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    kind = ", ".join(
        f"{what} {found[key]}"
        for what, key in (("family", "cpu family"), ("model", "model"))
        if key in found
    )
    return {"cpu": found.get("model name", ""), "cpu kind": kind}
