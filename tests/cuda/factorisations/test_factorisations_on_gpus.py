"""Factorisations and solutions on GPUs, of parts of CuPy, torch and NumPy: the host's bodies."""

from __future__ import annotations

import itertools
from unittest.mock import patch

import numpy as np
import pytest
import scipy.linalg
import test_factorisations_any as bodies
from hypothesis import given
from matrices import general, is_small, positive, right_sides
from split_arrays import array_of, lists_of
from visible import RANKS

from arrangements import part_of
from draws import drawn
from shardmath import linalg
from shardmath.distribution import Replicated, Slab


def without_refinement(context, body, cases):
    """The host's body, but for solutions by factors of a lower type."""
    with patch.object(bodies, "refined", lambda *_: None):
        getattr(bodies, body)(context, cases)


@pytest.mark.parametrize("body", ["positive_definite", "general_matrices"])
def test_matrices_split_at_random(gpus, body):
    @drawn(4)
    @given(cases=lists_of(bodies.systems, most=8, ranks=max(1, min(4, RANKS))))
    def check(cases):
        size, calls = cases
        gpus.run(without_refinement, body, calls, ranks=size)

    check()


def test_hard_matrices(gpus, size):
    assert gpus.run(bodies.hard_general, ranks=size) == [[]] * size
    assert gpus.run(bodies.hard_positive, ranks=size) == [[]] * size
    assert gpus.run(bodies.of_lapack, ranks=size) == [[]] * size


LOWER = (
    ("float64", "float32"),
    ("float64", "bfloat16"),
    ("complex128", "complex64"),
    ("complex128", "bfloat16"),
)


def refined(context):
    """Solutions by factors of a lower type, of parts of both libraries: their backward errors, and
    which type the factors had.
    """
    n, found = 700, []
    for library in ("numpy", "torch"):
        for kind, low in LOWER:
            for structure in ("gen", "pos"):
                a = general(n, kind) + 60 * np.eye(n) if structure == "gen" else positive(n, kind)
                b = right_sides(n, 5, kind)
                x, y = (
                    array_of(context, np.array(part_of(z, Slab.X, context.rank, context.size)),
                             library) for z in (a, b)
                )  # fmt: skip
                words = {"factor_dtype": low, "assume_a": structure, "options": {"block_size": 96}}
                with context:
                    whole = [Slab.X, Slab.X, Replicated()]
                    made = linalg.solve(x, y, distributions=whole, **words)
                left = np.linalg.norm(a @ bodies.host(made.x) - b)
                scale = np.linalg.norm(a) * np.linalg.norm(bodies.host(made.x))
                good = made.backward_error <= 2 * n**0.5 * 2.0**-52 and left <= 1e-14 * scale
                if not good or made.factor_dtype != low:
                    found.append((library, kind, low, structure, made[1:], left / scale))
    return found


def test_solutions_by_factors_of_a_lower_type(gpus, size):
    assert gpus.run(refined, ranks=size) == [[]] * size


@pytest.mark.parametrize("n", [1, 33, 700, 1100])
def test_factors_by_products_in_a_lower_precision(gpus, size, n):
    cases = [(n, block) for block in (16, 48, 512)]
    assert gpus.run(bodies.in_precisions, cases, ranks=size) == [[]] * size


def of_a_few_columns(context, n, block):
    """Which solutions of triangular systems are wrong, of (type, lower, unit, trans)."""
    wrong = []
    for dtype in ("float32", "float64", "complex64", "complex128"):
        whole = general(n, dtype) / n + 2 * np.eye(n, dtype=dtype)
        b = right_sides(n, 5, dtype)
        words = {"distributions": [Slab.X, Slab.X, Replicated()], "options": {"block_size": block}}
        x, y = (np.array(part_of(z, Slab.X, context.rank, context.size)) for z in (whole, b))
        for lower, unit, trans in itertools.product((True, False), (True, False), (0, 1, 2)):
            with context:
                made = linalg.solve_triangular(x, y, trans, lower, unit, **words)
            want = scipy.linalg.solve_triangular(whole, b, trans, lower, unit)
            if not is_small(made - want, want, n=n, dtype=dtype, growth=30):
                wrong.append((dtype, lower, unit, trans))
    return wrong


@pytest.mark.parametrize(("n", "block"), [(1, 16), (33, 48), (700, 16), (700, 48), (1100, 512)])
def test_triangles_for_a_few_columns(gpus, size, n, block):
    assert gpus.run(of_a_few_columns, n, block, ranks=size) == [[]] * size


def test_determinants_beyond_the_type(gpus, size):
    for made in gpus.run(bodies.determinants, ranks=size):
        assert made[:3] == [np.inf, 0, 0]
        assert made[5:] == [(0, -np.inf), (1, 0)]


def test_mistakes_are_the_same_error_on_all_ranks(gpus):
    if gpus.size < 2:
        pytest.skip("needs two ranks")
    first, second = gpus.run(bodies.mistaken, ranks=2)
    assert first == second
    words = {"not positive": "order 9", "not finite": "a has NaN", "singular": "pivot 12"}
    assert [word in first[name][1] for name, word in words.items()] == [True] * len(words)


def large(context, n, dtype):
    """What is wrong with factors of many panels, in which rows of several chunks are exchanged."""
    wrong, whole = [], Replicated()
    general_one, right, definite = general(n, dtype), right_sides(n, 40, dtype), positive(n, dtype)
    a, b, p = (
        array_of(context, np.array(part_of(x, Slab.X, context.rank, context.size)), "numpy")
        for x in (general_one, right, definite)
    )
    want, pivots = scipy.linalg.lu_factor(general_one)
    lower, upper = np.tril(want, -1) + np.eye(n), np.triu(want)
    for block in (None, 200):
        one = {"distributions": [Slab.X, whole], "options": {"block_size": block}}
        two = one | {"distributions": [Slab.X, Slab.X, whole]}
        three = one | {"distributions": [whole, Slab.X, whole]}
        with context:
            factors = linalg.lu_factor(a, **one)
            made = {
                "lu": factors[0],
                "lu again": linalg.lu_factor(a, **one)[0],
                "lu_solve": linalg.lu_solve(factors, b, **three),
                "again": linalg.lu_solve(factors, b, **three),
                "adjoint": linalg.lu_solve(factors, b, 2, **three),
                "solve": linalg.solve(a, b, **two),
                "cholesky": linalg.cholesky(p, **one),
                "positive": linalg.solve(p, b, assume_a="pos", **two),
            }
        made = {name: bodies.host(x) for name, x in made.items()}
        of_factors, factor = (lower, upper), made["cholesky"]
        residuals = {
            "lu": (made["lu"] - want, of_factors),
            "adjoint": (general_one.conj().T @ made["adjoint"] - right, of_factors),
            "lu_solve": (general_one @ made["lu_solve"] - right, of_factors),
            "solve": (general_one @ made["solve"] - right, of_factors),
            "cholesky": (definite - factor @ factor.conj().T, (definite,)),
            "positive": (definite @ made["positive"] - right, (definite, made["positive"])),
        }
        wrong += [
            (block, name)
            for name, (residual, scales) in residuals.items()
            if not is_small(residual, *scales, n=n, dtype=dtype)
        ]
        if bodies.host(factors[1]).tolist() != pivots.tolist():
            wrong.append((block, "pivots"))
        for first, again in (("lu_solve", "again"), ("lu", "lu again")):
            if made[again].tobytes() != made[first].tobytes():
                wrong.append((block, first, "bits"))
    return wrong


@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_many_panels(gpus, size, dtype):
    assert gpus.run(large, 1300, dtype, ranks=size) == [[]] * size
