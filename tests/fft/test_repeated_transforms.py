"""A transform that comes again: one exchange, and little Python before its first byte moves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.fft

from counted import calls_before
from shardmath.arrays import library_named
from shardmath.base.compiled import extension
from shardmath.distribution import Slab
from shardmath.fft import FFT, fft
from shardmath.handles.allocation import empty_on_heap

SHAPE = (12, 10)


def make(context, where):
    """This rank's rows of the global array, on the heap or not; and a place for its result."""
    rows = np.arange(120.0).reshape(SHAPE) * (1 + 2j)
    rows = rows[
        SHAPE[0] * context.rank // context.size : SHAPE[0] * (context.rank + 1) // context.size
    ]
    if where == "ordinary":
        return rows.copy(), np.empty_like(rows)
    x, out = (
        empty_on_heap(context, library_named("numpy"), rows.shape, "complex128") for _ in "xo"
    )
    x[...] = rows
    return x, out


def exchanges(context, where, given, form):
    """How many exchanges each of five calls in a row is, and whether their results are right."""
    found = []
    with context:
        x, out = make(context, where)
        target = out if given else None
        with FFT(x, distribution=Slab.X) as transform:
            transform.plan()
            for _ in range(5):
                before = context.board.rounds
                if form == "object":
                    y = transform.execute(out=target)
                else:
                    y = fft(x, distribution=Slab.X, out=target)
                found.append(context.board.rounds - before)
                whole = scipy.fft.fft2(np.arange(120.0).reshape(SHAPE) * (1 + 2j))
                rows = slice(
                    *(SHAPE[0] * r // context.size for r in (context.rank, context.rank + 1))
                )
                assert np.allclose(y, whole[rows])
    return found


@pytest.mark.parametrize(
    ("where", "given", "form"),
    [*itertools.product(("heap", "ordinary"), (True, False), ("object", "function"))],
)
def test_a_repeated_transform_is_one_exchange(contexts, where, given, form):
    for found in contexts.run(exchanges, where, given, form, ranks=3):
        assert found[1:] == [1] * 4


def barriers(context, source, target):
    """How many barriers each of three executions has, of which each result is right."""
    whole, found = np.arange(120.0).reshape(SHAPE) * (1 + 2j), []
    slabs = getattr(Slab, source), getattr(Slab, target)
    with context:
        x, _ = make(context, "heap")
        cut, place = (slab.slices(context.rank, SHAPE, size=context.size) for slab in slabs)
        with FFT(x, distribution=slabs) as transform:
            transform.plan()
            for factor in range(1, 4):
                x[...] = factor * whole[cut]
                before = context.board.barriers
                y = transform.execute()
                found.append(context.board.barriers - before)
                assert np.allclose(y, factor * scipy.fft.fft2(whole)[place])
    return found


WAITS = [
    # To the others and back: what peers read last is written only after the next exchange.
    ("X", "X", 1),
    # Along what each rank has, and then to the others: the next call writes before its exchange.
    ("X", "Y", 1),
]


@pytest.mark.parametrize(("source", "target", "count"), WAITS)
def test_a_transform_waits_for_readers_only_where_they_may_come_late(
    contexts, source, target, count
):
    for found in contexts.run(barriers, source, target, ranks=3):
        assert found == [count] * 3


def calls(context):
    """The Python calls before the first copy, of operands on the heap: by an object, by `fft`."""
    with context:
        x, out = make(context, "heap")

        def call():
            return fft(x, distribution=[Slab.X, Slab.X], axes=[0, 1], out=out)

        for _ in range(5):
            call()
        by_function = calls_before("copyto", call)
        with FFT(x, distribution=Slab.X) as transform:
            transform.plan()
            for _ in range(5):
                transform.execute(out=out)
            return calls_before("copyto", lambda: transform.execute(out=out)), by_function


def test_little_is_done_before_the_first_byte_moves(contexts):
    """It was 291 calls; those that wait for peers are not counted."""
    built = extension("shardmath.call._direct") is not None
    for by_object, by_function in contexts.run(calls, ranks=2):
        assert len(by_object) <= (15 if built else 70), by_object
        assert len(by_function) <= (40 if built else 90), by_function
