"""Tables of figures are those of `benchmarks/results`.

A comment before a table names the files that it is taken from: `<!-- gpu_fft_4, gpu_fft_2 -->`.
Each figure of a row must be a value of the entry of that row's case, times some power of 1000,
rounded as it is written; "1.5 x" may be a ratio of two values of one entry, too. Which case a row
is, its words say that are no figures, and for what they leave out the row before: see `numbers_of`.
First columns, goals, sizes (`1 x 128`) and what was before are no figures.

`<!-- any of matmul, fft -->`: rows sum up several cases, and any value of the files will do.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{n}.md" for n in ("benchmarks", "linear-algebra"))]
TABLE = re.compile(r"^<!-- (any of )?([\w, ]+) -->\n((?:\|.*\n)+)", re.MULTILINE)
FIGURE = re.compile(r"(?<![\w.^])(\d+(?:\.\d+)?)( x)?(?![\w.^])")
NO_FIGURE = re.compile(r"[<>]= .*|\d+ x \d+")
LINK = re.compile(r"\]\([^)]*\)")
NO_FIGURES = re.compile(r"goal|^before$")  # titles
CASE = "m n k share what case operation epilog dtype result memory transport a b grid bytes gpus"
THREE = re.compile(r"(?<!\w)\d+, \d+, \d+")
JOINED = {r"(\d+) x (?=\d)": r"\1x", r"\b([XYZ]) to (?=[XYZ]\b)": r"\1to", r" ?\(out\)": "_out"}
SAID = {  # otherwise than in the files
    "GEMM+RS": "GEMM ReduceScatter",
    "GEMM+AR": "GEMM AllReduce",
    "transposed": "X to Y",
    "back": "X to X",
    "outer": "row column",
    "result bfloat16": "",
    "b 1 x 128": "128 x 1",
    "float8_e4m3fn": "float8",
    "cuda": "mapped",
    "nvshmem": "NVSHMEM",
}


def words_of(text: str) -> Counter[str]:
    """`1 x 128`, `X to Y` and `execute(out)` are words; `8, 9, 7` are three, and one more."""
    for pattern, joined in JOINED.items():
        text = re.sub(pattern, joined, text)
    return Counter(re.findall(r"[\w.]+", text)) + Counter(THREE.findall(text))


def case_of(entry: dict[str, object]) -> Counter[str]:
    """The words that say which case an entry of a file is."""
    found = []
    for name in CASE.split():
        value = entry.get(name, "")
        if name == "bytes" and isinstance(value, int):
            small = next((i for i in (0, 10, 20) if value >> i < 1024), 20)
            value = f"{value >> small} {['', 'KiB', 'MiB'][small // 10]}"
        elif name == "grid" and isinstance(value, list):
            value = "{} x {}".format(*value)
        found.append(SAID.get(f"{name} {value}", SAID.get(str(value), str(value))))
    return words_of(", ".join(filter(None, found)))


@dataclass
class Cell:
    """A cell of figures. `said`: the words of its case, of all titles, and of the rows before."""

    row: str
    text: str
    said: list[Counter[str]]

    @property
    def figures(self) -> list[tuple[str, bool]]:
        """What is written, and whether it is a ratio."""
        return [(text, bool(ratio)) for text, ratio in FIGURE.findall(self.text)]

    def numbers_of(self, entries: list[tuple[Counter[str], list[float]]]) -> list[list[float]]:
        """Those of the entries of its case: which share most words with its row; of these, with all
        titles, then with the row before, ...; and of these, which have least that is not said.
        """
        for said in self.said:
            shared = [(case & said).total() for case, _ in entries]
            most = max(shared)
            entries = [one for one, count in zip(entries, shared, strict=True) if count == most]
            if len(entries) == 1:
                break
        least = min(case.total() for case, _ in entries)
        return [numbers for case, numbers in entries if case.total() == least]


def rows_of(table: str) -> Iterator[dict[int, tuple[str, str]]]:
    """Of each row, and of the titles first, title and text of each cell that is looked at."""
    header, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()
    )
    for row in (header, *rows):
        cells = enumerate(zip(header, row, strict=True))
        yield {i: (t, c) for i, (t, c) in cells if not NO_FIGURES.search(t)}


def is_key(number: int, title: str, text: str) -> bool:
    """Whether a cell says which case its row is."""
    return number == 0 or title == "m, n, k" or not FIGURE.search(NO_FIGURE.sub("", text))


def cells_of(rows: Iterable[dict[int, tuple[str, str]]]) -> Iterator[Cell]:
    titles, before = Counter[str](), list[Counter[str]]()
    for number, row in enumerate(rows):
        key = words_of(" ".join(text for i, (t, text) in row.items() if is_key(i, t, text)))
        if number == 0:
            titles = words_of(" ".join(title for title, _ in row.values()))
            continue
        for i, (title, text) in row.items():
            if not is_key(i, title, text):
                own = key + words_of(title) + words_of(FIGURE.sub("", text))
                yield Cell(row[0][1], NO_FIGURE.sub("", text), [own, titles, *before])
        before.insert(0, key)


def tables() -> Iterator[tuple[str, bool, list[str], str]]:
    """Where each marked table is, whether its rows sum up, its files, and its text."""
    for page in PAGES:
        text = page.read_text()
        for match in TABLE.finditer(text):
            line = text[: match.start()].count("\n") + 1
            files = match[2].split(", ")
            yield f"{page.name}:{line}", bool(match[1]), files, LINK.sub("]", match[3])


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


@cache
def entries_of(file: str) -> list[tuple[Counter[str], list[float]]]:
    """The case of each entry of a file, and its numbers."""
    found = json.loads((RESULTS / f"{file}.json").read_text())["rows"]
    return [(case_of(entry), list(values(entry))) for entry in found]


def wrong_figures(
    sums_up: bool, files: list[str], rows: Iterable[dict[int, tuple[str, str]]]
) -> list[str]:
    entries = list(itertools.chain.from_iterable(map(entries_of, files)))
    wrong = []
    for cell in cells_of(rows):
        numbers = [each for _, each in entries] if sums_up else cell.numbers_of(entries)
        taken = list(itertools.chain.from_iterable(numbers))
        for written, ratio in cell.figures:
            if is_one_of(written, taken):
                continue
            pairs = itertools.chain(*(itertools.permutations(row, 2) for row in numbers))
            if not ratio or not is_one_of(written, [a / b for a, b in pairs if b]):
                wrong.append(f"{cell.row}: {written}")
    return wrong


@pytest.mark.parametrize(
    ("sums_up", "files", "table"), [t[1:] for t in tables()], ids=[t[0] for t in tables()]
)
def test_figures_are_the_results(sums_up: bool, files: list[str], table: str) -> None:
    assert not wrong_figures(sums_up, files, rows_of(table))


ONE_CASE = [table for table in tables() if not table[1]]


@pytest.mark.parametrize(
    ("files", "table"), [t[2:] for t in ONE_CASE], ids=[t[0] for t in ONE_CASE]
)
def test_figures_of_another_row_are_wrong(files: list[str], table: str) -> None:
    """Any two rows next to each other, their figures exchanged."""
    rows = list(rows_of(table))
    for at in range(1, len(rows) - 1):
        one, other = rows[at : at + 2]
        figures = [i for i in one if not is_key(i, *one[i]) or not is_key(i, *other[i])]
        for each, source in ((one, other), (other, one)):
            changed = {**each, **{i: source[i] for i in figures}}
            if changed != each:
                assert wrong_figures(False, files, [*rows[:at], changed])


def test_all_tables_name_their_files() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    assert len(TABLE.findall(text)) == len(re.findall(r"^\| ---", text, re.MULTILINE))
