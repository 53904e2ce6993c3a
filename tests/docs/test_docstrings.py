"""Docstrings become reStructuredText for the site: docs/site/docstrings.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).parents[2] / "docs" / "site" / "docstrings.py"

CASES = {
    "a name is a link": ("As `fft`.", "As :py:obj:`fft`."),
    "a call is code": ("`f(x, *y)` does.", "``f(x, *y)`` does."),
    "letters beside code": ("two `Slab`s", "two :py:obj:`Slab`\\ s"),
    "code over two lines": ("a `x +\ny` b", "a ``x + y`` b"),
    "what would be markup": ("2 * n, |x|, *args, lock_", r"2 \* n, \|x\|, \*args, lock\_"),
    "a name within text": ("nvmath.local_fft is", "nvmath.local_fft is"),
    "a source": ("What it does.\nSource: numpy.", "What it does.\n\n\nSource: numpy."),
    "lines that go on": ("    `x`: an array\n  of numbers", ":py:obj:`x`: an array\nof numbers"),
    "code": ("So:\n\n    a = 1\n\n    b = `2`", "So:\n\n::\n\n    a = 1\n\n\n    b = `2`"),
    "two paragraphs": ("One.\n\n\nTwo.", "One.\n\nTwo."),
    "nothing": ("", ""),
}


@pytest.fixture(scope="module")
def docstrings() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docstrings", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("text", "expected"), CASES.values(), ids=CASES.keys())
def test_converted(docstrings: ModuleType, text: str, expected: str) -> None:
    made = "\n".join(docstrings.converted(text.split("\n")))
    assert made.strip("\n") == expected


def test_a_paragraph_after_code_is_none_of_it(docstrings: ModuleType) -> None:
    made = list(docstrings.converted(["    code", "", "Text."]))
    assert made.index("..") > made.index("    code")
    assert made.index("Text.") > made.index("..")
