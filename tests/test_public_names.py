"""What `dir()` and `help()` show of a public module are its public names."""

from __future__ import annotations

import importlib
import pydoc
import re
from pathlib import Path
from types import ModuleType

import pytest

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
MODULES = sorted(
    name
    for page in REFERENCE.glob("*.md")
    for name in re.findall(r"automodule:: (\S+)", page.read_text())
)
# What help shows of a module, and how it begins there. Below PACKAGE CONTENTS it lists files.
NAMES = {
    "CLASSES": r"^    class (\w+)",
    "FUNCTIONS": r"^    (?:async )?(\w+)(?: lambda .*|\(.*| = .*\()",
    "DATA": r"^    (\w+)(?: = |: )",
}


@pytest.fixture(params=MODULES)
def module(request: pytest.FixtureRequest) -> ModuleType:
    if request.param.endswith("triton"):
        pytest.importorskip("triton")
    return importlib.import_module(request.param)


def test_dir(module: ModuleType) -> None:
    assert dir(module) == sorted(set(module.__all__))
    assert len(module.__all__) == len(dir(module))
    assert all(hasattr(module, name) for name in dir(module))


def test_help(module: ModuleType) -> None:
    text = pydoc.plain(pydoc.render_doc(module))
    sections = re.split(r"^([A-Z][A-Z ]*)\n", text, flags=re.MULTILINE)
    found = {
        name
        for title, lines in zip(sections[1::2], sections[2::2], strict=True)
        for name in re.findall(NAMES.get(title, "(?!)"), lines, re.MULTILINE)
    }
    assert found
    assert found <= {*module.__all__, "__all__", "__version__"}
