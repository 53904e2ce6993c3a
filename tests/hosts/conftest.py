"""Ranks on two pretended hosts, with a context each; and the other folders' test bodies."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ranks import Pool
from shardmath.base import config
from shardmath.context.startup import new_context

for folder in ("collectives", "redistribution", "matmul", "fft"):
    sys.path.append(str(Path(__file__).parent.parent / folder))


def make_mapped(group):
    config.export({"SHARDMATH_FAKE_HOSTS": "2"})
    return new_context("cpu", group)


def make_tcp(group):
    config.export({"SHARDMATH_FAKE_HOSTS": "2", "SHARDMATH_TRANSPORT": "tcp"})
    return new_context("cpu", group)


@pytest.fixture(scope="session", params=[make_mapped, make_tcp], ids=["host", "tcp"])
def far_contexts(request) -> Iterator[Pool]:
    """Six ranks: `far_contexts.run(function, *args, ranks=k)` calls function(context, ...).

    Of 2, 3, 4, 5 and 6 ranks 1, 2, 2, 3 and 3 are on the first host.
    """
    with Pool(6, request.param) as ranks:
        yield ranks
