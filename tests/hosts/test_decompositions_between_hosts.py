"""QR and what follows from it where the ranks are on two hosts: as on one."""

from __future__ import annotations

import numpy as np

import shardmath
from shardmath.distribution import Slab


def decompose(context):
    a = np.random.default_rng(1).standard_normal((60, 40))
    with context:
        x = shardmath.from_global(a, Slab.Y)
        q, r = shardmath.linalg.qr(x)
        u, s, vh = shardmath.linalg.svd(x)
        solution = shardmath.linalg.lstsq(x, a[:, 0] + x[:, 1])
        values, vectors = shardmath.linalg.eigh(x.T @ x)
        np.testing.assert_allclose((q @ r).numpy(), a, atol=1e-12)
        np.testing.assert_allclose(((u * s) @ vh).numpy(), a, atol=1e-12)
        np.testing.assert_allclose(solution.x.numpy()[:3], [1, 1, 0], atol=1e-12)
        np.testing.assert_allclose(values.numpy()[::-1], s.numpy() ** 2, atol=1e-10)
        np.testing.assert_allclose((vectors.T @ vectors).numpy(), np.eye(40), atol=1e-12)


def test_decompositions(far_contexts):
    far_contexts.run(decompose, ranks=3)
