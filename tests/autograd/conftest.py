"""Ranks with a context each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranks import Pool
from shardmath.startup import new_context


def with_context(group):
    return new_context("cpu", group)


@pytest.fixture(scope="session")
def contexts() -> Iterator[Pool]:
    """Four ranks whose functions get a context."""
    with Pool(4, with_context) as ranks:
        yield ranks
