"""Ranks from a notebook, or from any script: `spawn` forks them and returns their results.

python examples/notebook.py
"""

from __future__ import annotations

import numpy as np

import shardmath
from shardmath.distribution import Replicated, Slab, redistribute
from shardmath.linalg.advanced import matmul

a = np.random.default_rng(1).standard_normal((300, 200))  # ranks are forks: they see this
b = np.random.default_rng(2).standard_normal((200, 100))


def product() -> np.ndarray:
    """Return this rank's rows of a @ b."""
    shardmath.initialize("cpu")
    own_a = redistribute(a, Replicated(), Slab.X)
    own_b = redistribute(b, Replicated(), Slab.X)
    return matmul(own_a, own_b, distributions=[Slab.X, Slab.X, Slab.X])


if __name__ == "__main__":
    parts = shardmath.spawn(product, 3)
    print("rows by rank:", [len(part) for part in parts])
    assert np.allclose(np.concatenate(parts), a @ b)
