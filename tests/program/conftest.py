"""Ranks on which programs are performed: of one host, and of two pretended ones."""

from __future__ import annotations

import pytest

from ranks import Pool
from shardmath.base import config
from shardmath.context.startup import new_context


def make_far(group):
    config.export({"SHARDMATH_FAKE_HOSTS": "2"})
    return new_context("cpu", group)


@pytest.fixture(scope="module", params=["one host", "two hosts"])
def ranks(request, contexts):
    """Six ranks that stay, each with a context: functions get it before their arguments."""
    if request.param == "one host":
        yield contexts
        return
    with Pool(6, make_far) as far:
        yield far
