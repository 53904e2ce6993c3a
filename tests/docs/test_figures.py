"""Tables of figures are those of `benchmarks/results`.

A comment before a table names the files that it is taken from: `<!-- gpu_fft_4, gpu_fft_2 -->`.
Each figure must be a value of theirs, times some power of 1000, rounded as it is written; "1.5 x"
may be a ratio of two values of a row, too. First columns, goals, sizes (`1 x 128`) and what was
before are no figures.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "benchmarks.md"]
TABLE = re.compile(r"^<!-- ([\w, ]+) -->\n((?:\|.*\n)+)", re.MULTILINE)
FIGURE = re.compile(r"(?<![\w.^])(\d+(?:\.\d+)?)( x)?(?![\w.^])")
NO_FIGURE = re.compile(r"[<>]= .*|\d+ x \d+")
LINK = re.compile(r"\]\([^)]*\)")


def tables() -> Iterator[tuple[str, list[str], str]]:
    """Where each marked table is, the files that its comment names, and its text."""
    for page in PAGES:
        text = page.read_text()
        for match in TABLE.finditer(text):
            line = text[: match.start()].count("\n") + 1
            yield f"{page.name}:{line}", match[1].split(", "), LINK.sub("]", match[2])


def figures(table: str) -> Iterator[tuple[str, str, bool]]:
    """Of each figure its row, what is written, and whether it is a ratio."""
    header, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()
    )
    for row in rows:
        for title, cell in zip(header[1:], row[1:], strict=True):
            if "goal" not in title and title != "before":
                for written, ratio in FIGURE.findall(NO_FIGURE.sub("", cell)):
                    yield row[0], written, bool(ratio)


def values(found: object) -> Iterator[float]:
    """All numbers of what a file holds."""
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, list):
        yield from itertools.chain.from_iterable(map(values, found))
    elif isinstance(found, int | float):
        yield abs(float(found))


def is_one_of(written: str, candidates: list[float]) -> bool:
    half = 0.501 * 10.0 ** -len(written.partition(".")[2])
    scales = (1e-9, 1e-6, 1e-3, 1.0, 1e3, 1e6)
    return any(abs(v * s - float(written)) <= half for v in candidates for s in scales)


@pytest.mark.parametrize(
    ("files", "table"), [t[1:] for t in tables()], ids=[t[0] for t in tables()]
)
def test_figures_are_the_results(files: list[str], table: str) -> None:
    results = ROOT / "benchmarks" / "results"
    rows = [
        row for name in files for row in json.loads((results / f"{name}.json").read_text())["rows"]
    ]
    numbers = [list(values(row)) for row in rows]
    taken = list(itertools.chain.from_iterable(numbers))
    ratios = [a / b for row in numbers for a, b in itertools.permutations(row, 2) if b]
    wrong = [
        f"{row}: {written}"
        for row, written, ratio in figures(table)
        if not is_one_of(written, taken) and not (ratio and is_one_of(written, ratios))
    ]
    assert not wrong


def test_all_tables_name_their_files() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    assert len(TABLE.findall(text)) == len(re.findall(r"^\| ---", text, re.MULTILINE))
