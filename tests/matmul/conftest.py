from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranks import Pool
from shardmath.context.startup import new_context
from shardmath.program import binding, factors


def with_thin_panels(group):
    factors._THIN = 3
    binding._PANEL_ELEMENTS = 40
    binding._SHARED_BYTES = 1
    context = new_context("cpu", group)
    context._runtime.threads = 2
    return context


@pytest.fixture(scope="session")
def thin_contexts() -> Iterator[Pool]:
    """As `contexts`, with operands cut into several intervals at sizes where there would be one,
    and moves that two threads share.
    """
    with Pool(6, with_thin_panels) as ranks:
        yield ranks
