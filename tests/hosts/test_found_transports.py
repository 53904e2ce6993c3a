"""A transport is one file, found by its name; which one serves is found by asking their probes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mortal import run_job
from shardmath.context import startup
from shardmath.distribution import Slab, redistribute
from shardmath.transport import cores
from shardmath.transport.choice import candidates, names, transport_named
from shardmath.transport.cores.host import HostTransport

COLUMNS = 4000  # of which the elements are more than travel in an exchange
ALL = np.arange(3.0 * COLUMNS).reshape(3, COLUMNS)


@pytest.fixture(autouse=True)
def _found(monkeypatch):
    """One more folder of transports, for this process and the ranks that it forks."""
    folder = str(Path(__file__).parent / "found")
    monkeypatch.setattr(cores, "__path__", [*cores.__path__, folder])


def counts(group):
    """A redistribution on two pretended hosts: each rank copies what comes from the other."""
    with startup.new_context("cpu", group) as context:
        x = np.ascontiguousarray(ALL[:2] if context.rank == 0 else ALL[2:])
        y = redistribute(x, Slab.X, Slab.Y)
        same = np.array_equal(y, np.hsplit(ALL, 2)[context.rank])
        copies = getattr(context.heap.transport, "copies", 0)
        return context.transport, same, copies > 0


def refusing(ranks):
    """As `counts`, where the probe says no on `ranks`."""

    def body(group):
        if group.rank in ranks:
            transport_named("cpu", "counting").refuses = "it counts no more"
        return counts(group)

    return body


@pytest.mark.parametrize("asked", ["counting", "auto"])
def test_a_file_is_a_transport(asked):
    assert names("cpu") == ["counting", "host", "mpi", "tcp"]
    assert [each.name for each in candidates("cpu", "auto")] == ["counting", "host", "mpi", "tcp"]
    variables = {"SHARDMATH_TRANSPORT": asked, "SHARDMATH_FAKE_HOSTS": "2"}
    assert run_job(2, counts, variables) == [("counting", True, True)] * 2


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_no_rank_uses_what_does_not_work_on_one(ranks):
    assert run_job(2, refusing(ranks), {"SHARDMATH_FAKE_HOSTS": "2"}) == [("host", True, False)] * 2


@pytest.mark.parametrize(
    ("ranks", "why"), [((0, 1), "(counting: it"), ((1,), "(counting: rank 1: it")]
)
def test_a_transport_that_was_asked_for_and_does_not_work(ranks, why):
    outcomes = run_job(2, refusing(ranks), {"SHARDMATH_TRANSPORT": "counting"})
    assert {one.kind for one in outcomes} == {"BackendUnavailable"}
    assert all(f"{why} counts no more)" in one.text for one in outcomes), outcomes
    assert "leave SHARDMATH_TRANSPORT unset" in outcomes[0].text


def test_what_is_no_transport():
    with pytest.raises(ValueError, match="there are auto, counting, host, mpi, tcp"):
        candidates("cpu", "pigeons")
    assert transport_named("cpu", "host") is HostTransport
