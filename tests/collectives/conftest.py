"""Ranks with a context each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranks import Pool
from shardmath.startup import new_context


def make_context(group):
    return new_context("cpu", group)


@pytest.fixture(scope="session")
def contexts() -> Iterator[Pool]:
    """Six ranks that stay: `contexts.run(function, *args, ranks=k)` calls function(context,
    ...)."""
    with Pool(6, make_context) as ranks:
        yield ranks
