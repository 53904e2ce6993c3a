"""Arrays that know how they are split, over parts of CuPy and torch on GPUs: the host's bodies."""

from __future__ import annotations

import pytest
import test_arithmetic
import test_creation
import test_decompositions
import test_functions_of_the_package
import test_indexing
import test_norms
import test_numpys_functions
import test_products_of_arrays
import test_reductions
import test_standard
from hypothesis import given
from split_arrays import lists_of
from visible import RANKS

from draws import drawn

SPLIT_AT_RANDOM = [
    (test_creation.whole, test_creation.arrays, 20),
    (test_arithmetic.body, test_arithmetic.operands, 20),
    (test_arithmetic.every_function, test_arithmetic.pairs, 4),
    (test_arithmetic.update, test_arithmetic.updates, 20),
    (test_reductions.body, test_reductions.reductions, 20),
    (test_indexing.body, test_indexing.indexings, 20),
    (test_indexing.body, test_indexing.array_indexings, 20),
    (test_indexing.mask, test_indexing.maskings, 20),
    (test_standard.body, test_standard.calls, 40),
    (test_numpys_functions.body, test_numpys_functions.calls, 40),
    (test_products_of_arrays.multiply, test_products_of_arrays.factors, 10),
    (test_products_of_arrays.transform, test_products_of_arrays.transforms, 6),
    (test_decompositions.take_apart, test_decompositions.matrices, 4),
    (test_decompositions.eigenvalues, test_decompositions.hermitian, 5),
    (test_decompositions.least_squares, test_decompositions.equations, 5),
    (test_norms.norms_of, test_norms.normed, 8),
    (test_norms.small_functions, test_norms.stacks, 5),
]
OF_TWO_RANKS = [
    test_arithmetic.moves,
    test_arithmetic.without_axes,
    test_decompositions.in_context,
    test_decompositions.refused,
    test_norms.vectors,
    test_reductions.distributions,
    test_indexing.follows,
    test_numpys_functions.follows,
    test_products_of_arrays.follows,
    test_functions_of_the_package.body,
]


def name_of(case):
    return f"{case.__module__}.{case.__name__}" if callable(case) else None


@pytest.mark.parametrize(("body", "case", "most"), SPLIT_AT_RANDOM, ids=name_of)
def test_functions_of_arrays_split_at_random(gpus, body, case, most):
    @drawn(4)
    @given(cases=lists_of(case, most=most, ranks=max(1, min(4, RANKS))))
    def check(cases):
        size, calls = cases
        gpus.run(body, calls, ranks=size)

    check()


@pytest.mark.parametrize("body", OF_TWO_RANKS, ids=name_of)
def test_what_moves_and_follows(gpus, body):
    if gpus.size < 2:
        pytest.skip("needs two ranks")
    gpus.run(body, ranks=2)
