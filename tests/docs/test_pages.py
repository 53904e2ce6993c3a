"""What README.md, docs/ and examples/ show is what happens.

A ```python block runs under our launcher, on n ranks if its first line says n=; the ```text block
after it is what it prints, lines in any order. In a ```console block "$ make demo" is followed by
what it prints. Times differ from run to run, and are left out.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import configuration
import pytest
from prepared import ROOT, Prepared

from started import missing

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Other examples run on 1 and 3 ranks, which share nothing evenly; the demo runs two on 4.
SIZES = {
    "grid": [1, 3, 4],  # this and the next two have grids of two axes on 4 ranks
    "heat_with_halos": [1, 3, 4],
    "redistribution": [1, 3, 4],
    "notebook": [1],
    "sequence_parallel": ["torchrun"],  # on 2 ranks
    "tensor_parallel": [1, 3, "torchrun"],
    "experts": [],  # torchrun starts it: see tests/launchers
    "cluster": [],  # it takes Dask or Ray: see tests/launch/test_clusters.py
    "jax_programs": [3],  # of which each loads JAX
}
EXAMPLES = [
    (path, size)
    for path in sorted((ROOT / "examples").glob("*.py"))
    for size in SIZES.get(path.stem, [1, 3])
]
FENCE = re.compile(r"^( *)```(\w*)([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
TIME = re.compile(r"\b\d+(\.\d+)? (ms|us|s)\b")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, what follows that in its first line, and its text."""

    page: Path
    line: int
    language: str
    note: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(page, text[: m.start()].count("\n") + 1, m[2], m[3].strip(), textwrap.dedent(m[4]))
        for m in FENCE.finditer(text)
    ]


def programs() -> list[tuple[Block, Block | None]]:
    """Every python block, with the text block that comes next, if it is the very next one."""
    found = []
    for page in PAGES:
        for block, after in itertools.pairwise([*blocks(page), None]):
            if block and block.language == "python":
                found.append((block, after if after and after.language == "text" else None))
    return found


@pytest.fixture(scope="module")
def prepared() -> Iterator[Prepared]:
    made = Prepared()
    yield made
    made.close()


def stable(text: str) -> list[str]:
    """The lines without times and without blanks at their ends."""
    return [TIME.sub("some time", line).rstrip() for line in text.splitlines()]


@pytest.mark.parametrize(("block", "printed"), programs(), ids=str)
def test_blocks_run(
    prepared: Prepared, block: Block, printed: Block | None, tmp_path: Path
) -> None:
    path = tmp_path / "block.py"
    path.write_text(block.text)
    ranks = re.fullmatch(r"n=(\d+)", block.note)
    assert ranks or not block.note
    many = ranks is not None and ranks[1] != "1"
    lines = stable(prepared.run(path, int(ranks[1]) if many else None))
    if printed is not None:
        assert sorted(lines) == sorted(stable(printed.text))


def test_the_readme_shows_the_demo(prepared: Prepared) -> None:
    (console,) = [block for block in blocks(ROOT / "README.md") if block.language == "console"]
    demo, test = console.text.split("$ make ")[1:]
    assert test == "test\n"
    name, _, printed = demo.partition("\n")
    assert name == "demo"
    parts = ["examples/digits.py", "examples/photograph.py"]
    steps = re.findall(r"-m shardmath run -n 4 (\S+)", (ROOT / "Makefile").read_text())
    assert steps == parts
    found = [stable(prepared.run(part, 4)) for part in parts]
    assert list(itertools.chain(*found)) == stable(printed)


@pytest.mark.parametrize(("example", "size"), EXAMPLES, ids=lambda x: getattr(x, "stem", str(x)))
def test_examples_run(prepared: Prepared, example: Path, size: int | str) -> None:
    """They check their results themselves."""
    if not isinstance(size, str):
        assert stable(prepared.run(example, size if size > 1 else None))
    elif missing(size):
        pytest.skip(missing(size))
    else:
        assert stable(prepared.run(example, 2, launcher=size))


def test_links_lead_somewhere() -> None:
    missing = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            if not (page.parent / target).exists():
                missing.append(f"{page.name}: {target}")
    assert not missing


def test_programs_are_as_short_as_pages_say() -> None:
    length = re.compile(r"\((\S*?examples/\w+\.py)\)\s+in\s+(\d+)\s+lines")
    said = [(page, *found) for page in PAGES for found in length.findall(page.read_text())]
    assert said
    for page, target, lines in said:
        assert len((page.parent / target).read_text().splitlines()) == int(lines), target
    tutorial = (ROOT / "docs" / "tutorial.md").read_text()
    (short,) = re.findall(r"Programs of less than (\d+) lines:(.*)\Z", tutorial, re.DOTALL)
    for target in re.findall(r"\((\S+\.py)\)", short[1]):
        assert len((ROOT / "docs" / target).read_text().splitlines()) < int(short[0]), target


def test_configuration_is_up_to_date() -> None:
    assert configuration.PAGE.read_text() == configuration.page()
