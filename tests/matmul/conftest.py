from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranks import Pool
from shardmath.operators.matmul import host, panels
from shardmath.startup import new_context


def with_context(group):
    return new_context("cpu", group)


@pytest.fixture(scope="session")
def contexts() -> Iterator[Pool]:
    """Six ranks whose functions get a context."""
    with Pool(6, with_context) as ranks:
        yield ranks


def with_thin_panels(group):
    panels._THIN, host._PANEL_ELEMENTS = 3, 40
    return new_context("cpu", group)


@pytest.fixture(scope="session")
def thin_contexts() -> Iterator[Pool]:
    """The same, with operands cut into several intervals at sizes where there would be one."""
    with Pool(6, with_thin_panels) as ranks:
        yield ranks
