"""Factorisations on pretended GPUs: the host's bodies, and all but the libraries of CUDA.

What ranks tell each other of their arrays, what they decide, and where results lie, is the
package's own; launches are NumPy's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from draws import drawn

sys.path.append(str(Path(__file__).parent.parent / "factorisations"))

import test_factorisations_any as bodies
from hypothesis import given
from pretended import pretended_gpu
from pretended_factorisations import factorisations_at_once
from pretended_products import products_at_once
from split_arrays import lists_of


def on_gpus(context, body, *args):
    context.barrier()
    with (
        pretended_gpu(context),
        products_at_once(),
        factorisations_at_once(),
        patch.object(bodies, "refined", lambda *_: None),  # takes collectives
    ):
        result = getattr(bodies, body)(context, *args)
        context.board.barrier("done")
    return result


@pytest.mark.parametrize("body", ["positive_definite", "general_matrices"])
def test_matrices_split_at_random(contexts, body):
    @drawn(3)
    @given(cases=lists_of(bodies.systems, most=4))
    def check(cases):
        size, calls = cases
        calls = [(*call[:3], (*call[3][:2], "numpy", call[3][3])) for call in calls]
        contexts.run(on_gpus, body, calls, ranks=size)

    check()


def test_factors_by_products_in_a_lower_precision(contexts):
    """Once more by graphs, which are captured the second time."""
    cases = [(1, 16), (65, 16)] * 3
    assert contexts.run(on_gpus, "in_precisions", cases, ranks=2) == [[]] * 2


def test_mistakes_are_the_same_error_on_all_ranks(contexts):
    first, second = contexts.run(on_gpus, "mistaken", ranks=2)
    assert first == second
