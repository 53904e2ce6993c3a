"""Ranks on the workers of a Dask or Ray cluster, which the program has already: `spawn` with `on`.

python examples/cluster.py dask
python examples/cluster.py ray
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import shardmath
from shardmath.distribution import Slab
from shardmath.linalg.advanced import matmul


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return this rank's rows of a @ b. The cluster has sent the function, a and b here."""
    context = shardmath.initialize("cpu")
    own_a, own_b = (x[Slab.X.slices(context.rank, x.shape)] for x in (a, b))
    return matmul(own_a, own_b, distributions=[Slab.X, Slab.X, Slab.X])


def on_dask(*arguments: Any) -> list[np.ndarray]:
    """Return the results of three ranks on two workers."""
    from dask.distributed import Client, LocalCluster

    # On a real cluster: Client("its address").
    options = {"n_workers": 2, "threads_per_worker": 2, "dashboard_address": None}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        return shardmath.spawn(product, 3, *arguments, on=client)


def on_ray(*arguments: Any) -> list[np.ndarray]:
    """Return the results of three ranks, each in a task of Ray's."""
    import ray

    ray.init(num_cpus=4, include_dashboard=False)  # on a real cluster: ray.init("auto")
    return shardmath.spawn(product, 3, *arguments, on=ray)


if __name__ == "__main__":
    a = np.random.default_rng(1).standard_normal((300, 200))
    b = np.random.default_rng(2).standard_normal((200, 100))
    start = {"dask": on_dask, "ray": on_ray}[sys.argv[1]]
    parts = start(a, b)
    print("rows by rank:", [len(part) for part in parts])
    assert np.allclose(np.concatenate(parts), a @ b)
