"""What every test may use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import one_thread  # noqa: F401  (before NumPy)
from ranks import Pool
from shardmath.startup import new_context


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Six ranks that stay: `pool.run(function, *args, ranks=k)`."""
    with Pool(6) as ranks:
        yield ranks


def with_context(group):
    return new_context("cpu", group)


@pytest.fixture(scope="session")
def contexts() -> Iterator[Pool]:
    """Six ranks that stay, each with a context: functions get it before their arguments."""
    with Pool(6, with_context) as ranks:
        yield ranks
