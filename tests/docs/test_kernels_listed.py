"""The table of kernels in docs/architecture.md is the tree's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "shardmath"
ROW = re.compile(r"^\| `(\w+)\.cu` \| [^|]+ \| ([^|]+) \| ([^|]*)\|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "docs" / "architecture.md").read_text())


def test_all_are_listed_once():
    sources = sorted(path.stem for path in (SOURCE / "kernels").glob("*.cu"))
    assert sorted(name for name, _, _ in ROWS) == sources


@pytest.mark.parametrize(("name", "launchers", "headers"), ROWS, ids=[row[0] for row in ROWS])
def test_a_row(name, launchers, headers):
    text = (SOURCE / "kernels" / f"{name}.cu").read_text()
    assert re.findall(r"\w+", headers) == sorted(re.findall(r'#include "(\w+)\.cuh"', text))
    for launcher in re.findall(r"`([^`]+)`", launchers) or [""]:
        assert f'"{name}"' in (SOURCE / launcher).read_text()
