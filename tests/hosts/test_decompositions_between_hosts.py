"""Factorisations where the ranks are on two hosts: as on one."""

from __future__ import annotations

import numpy as np
import pytest

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


def solve(context):
    a, b = np.random.default_rng(2).standard_normal((70, 70)), np.arange(210.0).reshape(70, 3)
    options = {"block_size": 8}
    with context:
        x, y = shardmath.from_global(a, Slab.X), shardmath.from_global(b, Slab.Y)
        square = x @ x.T + 70 * shardmath.eye(70, distribution=Slab.X)
        lower = shardmath.linalg.cholesky(square, options=options)
        np.testing.assert_allclose((lower @ lower.T).numpy(), square.numpy(), atol=1e-11)
        solution = shardmath.linalg.solve(x, y, options=options).numpy()
        np.testing.assert_allclose(a @ solution, b, atol=1e-9)
        factors = shardmath.linalg.lu_factor(x, options=options)
        again = shardmath.linalg.lu_solve(factors, y, options=options).numpy()
        np.testing.assert_allclose(again, solution, atol=1e-9)
        with pytest.raises(np.linalg.LinAlgError, match="order 1 "):
            shardmath.linalg.cholesky(-square, options=options)


def test_systems_of_equations(far_contexts):
    far_contexts.run(solve, ranks=3)
