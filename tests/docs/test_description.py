"""What a package index shows is README.md, without links that lead nowhere there."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import shardmath

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("shardmath_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("source", ["", "https://example.org/tree"])
def test_all_links_are_absolute(setup: ModuleType, source: str) -> None:
    made = setup.described((ROOT / "README.md").read_text(), source)
    links = re.findall(r"\]\(([^)]*)\)", made)
    assert all(link.startswith("https://") for link in links)
    assert bool(links) == bool(source)
    assert ("docs/tutorial.md" in made) and ("A first program" in made)
    assert (setup.WHERE in made) != bool(source)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](b.md#c), [d](#e)", "a (`b.md`), d"),
        ("[a](https://b)", "[a](https://b)"),
    ],
)
def test_links(setup: ModuleType, text: str, expected: str) -> None:
    made = setup.described(f"# T\n\nOne.\n\n{text}")
    assert made == f"# T\n\nOne.\n\n{setup.WHERE}\n{expected}"


def test_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert [shardmath.__version__] == citation == [project["version"]]
