"""`spawn` on the workers of Dask and of Ray, where these are installed, on one machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import shardmath
from shardmath.errors import OpTimeout, RankFailure


@pytest.fixture(scope="module")
def dask():
    distributed = pytest.importorskip("dask.distributed")
    options = {"n_workers": 2, "threads_per_worker": 2, "dashboard_address": None}
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as client:
        yield client


@pytest.fixture(scope="module")
def ray():
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture(params=["dask", "ray"])
def cluster(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_ranks_compute_together(cluster, size):
    """As NumPy says; twice, on the same workers."""

    def product(x, w):
        import numpy as np

        import shardmath
        from shardmath.distribution import Slab
        from shardmath.linalg.advanced import matmul

        context = shardmath.initialize("cpu")
        rows = x[Slab.X.slices(context.rank, x.shape)]
        part = w[Slab.X.slices(context.rank, w.shape)]
        y = matmul(rows, part, distributions=[Slab.X, Slab.X, Slab.X])
        return context.rank, context.size, np.asarray(y)

    x, w = np.random.default_rng(0).standard_normal((2, 7, 7))
    for _ in range(2):
        found = shardmath.spawn(product, size, x, w, on=cluster)
        assert [each[:2] for each in found] == [(rank, size) for rank in range(size)]
        np.testing.assert_allclose(np.concatenate([each[2] for each in found]), x @ w, rtol=1e-12)


@pytest.mark.parametrize("library", ["dask.distributed", "ray"])
def test_the_example(library):
    pytest.importorskip(library)
    example = Path(__file__).parents[2] / "examples" / "cluster.py"
    command = [sys.executable, str(example), library.partition(".")[0]]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "rows by rank: [100, 100, 100]" in done.stdout


def test_the_first_failure_is_raised(cluster):
    def fail():
        import shardmath

        context = shardmath.initialize("cpu")
        if context.rank == 1:
            raise KeyError("a name that is not there")
        context.barrier()

    with pytest.raises(KeyError, match="rank 1"):
        shardmath.spawn(fail, 3, on=cluster)


def test_a_rank_that_dies_is_named(cluster):
    def die(number):
        import os

        import shardmath

        context = shardmath.initialize("cpu")
        if context.rank == 2:
            os.kill(os.getpid(), number)
        context.barrier()

    with pytest.raises(RankFailure, match="rank 2"):
        shardmath.spawn(die, 3, int(signal.SIGKILL), on=cluster)


def test_time_is_up(cluster):
    def wait():
        import time

        import shardmath

        if shardmath.initialize("cpu").rank == 1:
            time.sleep(86400)

    with pytest.raises(OpTimeout, match="not finished: ranks") as caught:
        shardmath.spawn(wait, 2, timeout=5.0, on=cluster)
    assert 1 in caught.value.ranks


def test_more_ranks_than_the_cluster_has_room_for(cluster):
    with pytest.raises(ValueError, match="9 ranks need 9"):
        shardmath.spawn(os.getpid, 9, on=cluster)


@pytest.mark.parametrize("wrong", ["tcp://127.0.0.1:8786", sys, types.SimpleNamespace()])
def test_what_no_cluster_is(wrong):
    with pytest.raises(TypeError, match=r"on is a dask\.distributed\.Client, or the module ray"):
        shardmath.spawn(os.getpid, 2, on=wrong)
