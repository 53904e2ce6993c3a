"""A product that comes again: one exchange, and little Python before it is multiplied."""

from __future__ import annotations

import itertools
from unittest.mock import patch

import numpy as np
import pytest

from arrangements import part_of
from counted import calls_before
from shardmath.arrays import library_named
from shardmath.base.compiled import extension
from shardmath.distribution import BlockCyclic, ProcessGrid, Replicated, Slab
from shardmath.handles.allocation import empty_on_heap
from shardmath.linalg.advanced import Matmul, matmul
from shardmath.local import gemm

X, Y, R = Slab.X, Slab.Y, Replicated()
BLOCKS = BlockCyclic(ProcessGrid(shape=(3, 1)), (5, 3))
SPLITS = {"gather": (X, X, X), "reduce": (Y, X, X), "share": (Y, X, R), "blocks": (BLOCKS,) * 3}
CALLS = 80 if extension("shardmath.call._direct") is not None else 110  # before BLAS
REPEATS = 32


def make(context, where, dists):
    """This rank's parts of two global matrices of ones."""
    parts = [np.array(part_of(np.ones((24, 24)), d, context.rank, context.size)) for d in dists[:2]]
    if where == "ordinary":
        return parts
    held = [empty_on_heap(context, library_named("numpy"), x.shape, "float64") for x in parts]
    for x, part in zip(held, parts, strict=True):
        x[...] = part
    return held


def exchanges(context, where, splits, form):
    """How many exchanges each of five calls in a row is."""
    found, dists = [], SPLITS[splits]
    with context:
        a, b = make(context, where, dists)
        with Matmul(a, b, distributions=dists) as product:
            product.plan()
            for turn in range(5):
                before = context.board.rounds
                a[...] = turn
                d = product.execute() if form == "object" else matmul(a, b, distributions=dists)
                assert (d == 24 * turn).all()
                found.append(context.board.rounds - before)
                context.barrier()
    return found


@pytest.mark.parametrize(
    ("where", "splits", "form"),
    [*itertools.product(("heap", "ordinary"), SPLITS, ("object", "function"))],
)
def test_a_repeated_product_is_one_exchange(contexts, where, splits, form):
    for found in contexts.run(exchanges, where, splits, form, ranks=3):
        assert found[1:] == [1] * 4


def calls(context):
    """The Python calls of a product before its BLAS, of the function and of an object."""
    original = gemm.bind

    def multiplied(function):
        function()

    def marked(*args, **named):
        function = original(*args, **named)
        return lambda: multiplied(function)

    found = []
    with context, patch.object(gemm, "bind", marked):
        a, b = make(context, "ordinary", (X, X))
        with Matmul(a, b, distributions=(X, X, X)) as product:
            product.plan()
            for call in (lambda: matmul(a, b, distributions=(X, X, X)), product.execute):
                tries = [calls_before("calls.<locals>.multiplied", call) for _ in range(REPEATS)]
                names = min(tries, key=len)  # a result may lie where none has lain before
                found.append((len(names), names))
    return found


def test_little_is_done_before_the_product(contexts):
    for found in contexts.run(calls, ranks=2):
        for count, names in found:
            assert count <= CALLS, names
