"""Ranks on two pretended hosts, with a context each; and the other folders' test bodies."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ranks import Pool
from shardmath import config
from shardmath.startup import new_context

for folder in ("collectives", "redistribution", "matmul", "fft"):
    sys.path.append(str(Path(__file__).parent.parent / folder))


def make_context(group):
    config.export({"SHARDMATH_FAKE_HOSTS": "2"})
    return new_context("cpu", group)


@pytest.fixture(scope="session")
def far_contexts() -> Iterator[Pool]:
    """Six ranks: `far_contexts.run(function, *args, ranks=k)` calls function(context, ...).

    Of 2, 3, 4, 5 and 6 ranks 1, 2, 2, 3 and 3 are on the first host.
    """
    with Pool(6, make_context) as ranks:
        yield ranks
