"""Ranks on two hosts, with a context each; and the other folders' test bodies.

The hosts are pretended; or two network namespaces, where those can be made.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from namespaces import Hosts, Unavailable, two_hosts
from ranks import Pool
from shardmath.base import config
from shardmath.context.startup import new_context

NAMESPACES = "TEST_NAMESPACES"  # the processes that hold them

for folder in ("collectives", "redistribution", "matmul", "fft", "symmetric"):
    sys.path.append(str(Path(__file__).parent.parent / folder))


def make_mapped(group):
    config.export({"SHARDMATH_FAKE_HOSTS": "2"})
    return new_context("cpu", group)


def make_tcp(group):
    """On two namespaces, if there are any: ranks move there, and find their addresses themselves.

    There is no way out, no MASTER_ADDR, and the name of both hosts is this machine's.
    """
    config.export({"SHARDMATH_TRANSPORT": "tcp"})
    pids = config.environment().get(NAMESPACES, "").split()
    if not pids:
        config.export({"SHARDMATH_FAKE_HOSTS": "2"})
        return new_context("cpu", group)
    Hosts([int(pid) for pid in pids]).enter(2 * group.rank // group.nranks)
    context = new_context("cpu", group)
    assert len(set(context.hosts)) == min(2, group.nranks)
    return context


@pytest.fixture(scope="session", params=[make_mapped, make_tcp], ids=["host", "tcp"])
def far_contexts(request) -> Iterator[Pool]:
    """Six ranks: `far_contexts.run(function, *args, ranks=k)` calls function(context, ...).

    Of 2, 3, 4, 5 and 6 ranks 1, 2, 2, 3 and 3 are on the first host.
    """
    with ExitStack() as stack:
        if request.param is make_tcp:
            with suppress(Unavailable):
                hosts = stack.enter_context(two_hosts())
                variables = stack.enter_context(pytest.MonkeyPatch.context())
                variables.setenv(NAMESPACES, " ".join(map(str, hosts.pids)))
        yield stack.enter_context(Pool(6, request.param))
