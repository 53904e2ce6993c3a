"""Sharing cores: limits go down, never up, and are undone."""

import sys

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from shardmath.local import share_cores, threads


def blas_threads():
    np.ones((2, 2)) @ np.ones((2, 2))
    return [library["num_threads"] for library in threadpool_info()]


@pytest.mark.parametrize(
    ("cores", "ranks", "share"), [(8, 1, 8), (8, 3, 2), (8, 8, 1), (2, 5, 1), (1, 1, 1), (4, 0, 4)]
)
def test_a_share_is_at_least_one_core(monkeypatch, cores, ranks, share):
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: range(cores))
    assert threads.threads_per_rank(ranks) == share


def test_limits_hold_inside_and_are_undone(monkeypatch):
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: range(4))
    with threadpool_limits(3):
        with share_cores(2) as share:
            assert share == 2 and set(blas_threads()) == {2}
        assert set(blas_threads()) == {3}
        with share_cores(1) as share:
            assert share == 4 and set(blas_threads()) == {3}
    with threadpool_limits(1), share_cores(2):
        assert set(blas_threads()) == {1}


def test_without_threadpoolctl_nothing_changes(monkeypatch):
    before = blas_threads()
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    with share_cores(64) as share:
        assert share == 1
    monkeypatch.undo()
    assert blas_threads() == before
