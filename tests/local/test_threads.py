"""How many threads a rank computes with: what the user says, or a share of the cores."""

import sys

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from shardmath.local import threads
from shardmath.local.threads import ThreadLimit, threads_per_rank

NAMES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def many_cores(monkeypatch):
    """More than a limit of the test's."""
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: set(range(64)))


def blas_threads():
    np.ones((2, 2)) @ np.ones((2, 2))
    return {library["num_threads"] for library in threadpool_info()}


ALL = set(range(8))


@pytest.mark.parametrize(
    ("setting", "said", "cores", "expected"),
    [
        (0, None, [ALL], 8),
        (0, None, [ALL] * 3, 2),
        (0, None, [ALL] * 9, 1),
        (0, None, [{0, 1}, {2, 3}, {4, 5}], 2),  # a launcher has bound each to cores of its own
        (0, None, [{0, 1, 2, 3}, {0, 1, 2, 3}, {4, 5}], 2),
        (0, None, [ALL, None], 4),  # of another namespace: it may be on the same cores
        (0, "3", [ALL] * 8, 3),
        (0, "4,2", [ALL] * 8, 4),
        (0, "", [ALL] * 2, 4),
        (0, "all", [ALL] * 2, 4),
        (5, "3", [ALL] * 2, 5),
    ],
)
def test_the_number(monkeypatch, setting, said, cores, expected):
    """`cores[pid]` are those of each process on this machine, this one's the first."""

    def affinity(pid):
        if cores[pid] is None:
            raise ProcessLookupError
        return cores[pid]

    monkeypatch.setattr(threads.os, "sched_getaffinity", affinity)
    if said is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert threads_per_rank(setting, range(len(cores))) == expected


def test_limits_only_lower_and_the_last_to_end_restores(many_cores):
    with threadpool_limits(3):
        first, none = ThreadLimit(2, 0), ThreadLimit(8, 0)
        assert blas_threads() == {2}
        second = ThreadLimit(1, 0)
        assert blas_threads() == {1}
        first.end()
        none.end()
        first.end()
        assert blas_threads() == {1}
        second.end()
        assert blas_threads() == {3}


def test_what_the_user_has_set_stays(monkeypatch, many_cores):
    with threadpool_limits(3):
        limit = ThreadLimit(1, 0)
        threadpool_limits(2)  # later
        limit.end()
        assert blas_threads() == {2}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with threadpool_limits(3):
        limit = ThreadLimit(1, 0)
        assert blas_threads() == {3}
        limit.end()
        limit = ThreadLimit(3, 3)  # our launcher has set both
        assert blas_threads() == {3}
        limit.end()
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with threadpool_limits(3):
        limit = ThreadLimit(1, 1)
        kinds = {library["internal_api"]: library["num_threads"] for library in threadpool_info()}
        assert kinds["openblas"] == 3 and kinds.get("openmp", 1) == 1
        limit.end()
        assert blas_threads() == {3}


def test_libraries_are_not_looked_for_where_each_core_has_a_thread(monkeypatch):
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: {0, 1, 5})
    monkeypatch.setattr(threads, "_libraries", lambda: pytest.fail("looked for"))
    ThreadLimit(3, 0).end()
    ThreadLimit(4, 0).end()
    with pytest.raises(pytest.fail.Exception):
        ThreadLimit(2, 0)
    ThreadLimit._open.clear()


def test_without_threadpoolctl_nothing_changes(monkeypatch, many_cores):
    before = blas_threads()
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    limit = ThreadLimit(1, 0)
    monkeypatch.undo()
    assert blas_threads() == before
    limit.end()
    assert blas_threads() == before
