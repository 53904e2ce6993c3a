"""Collectives and redistributions on cores that come again: what each reads and finds."""

from __future__ import annotations

import numpy as np
import pytest
import torch as library

from counted import calls_before
from shardmath.base.compiled import extension
from shardmath.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from shardmath.distribution import Slab, redistribute
from shardmath.handles.allocation import allocate_symmetric_memory as allocate
from shardmath.handles.allocation import free_symmetric_memory as free

CALLS = {
    "all_reduce": lambda x, parts, rank: (all_reduce(x), sum(parts)),
    "all_gather": lambda x, parts, rank: (all_gather(x), np.concatenate(parts)),
    "broadcast": lambda x, parts, rank: (broadcast(x, root=1), parts[1]),
    "reduce_scatter": lambda x, parts, rank: (
        reduce_scatter(x),
        np.array_split(sum(parts), len(parts))[rank],
    ),
    "all_to_all": lambda x, parts, rank: (
        all_to_all(x),
        np.concatenate([np.array_split(each, len(parts))[rank] for each in parts]),
    ),
}
FORMS = {
    "as it lies": lambda whole: whole[:],
    "turned": lambda whole: whole.T,
    "every second": lambda whole: whole[::2],
}
EXTENTS = (6, 60, 600)  # sent along, staged, and lent
TURNS = 4


def repeat(context, name, form, extent, torch):
    """Whether each call has read what lay there then. Ranks write between two calls."""
    wrong = []
    whole, scratch = np.zeros((extent, extent)), np.zeros((extent, extent))
    x = FORMS[form](library.from_numpy(whole) if torch else whole)
    for turn in range(TURNS):
        whole[:] = np.arange(extent * extent).reshape(extent, extent) + 1000 * context.rank + turn
        parts = []
        for rank in range(context.size):
            scratch[:] = np.arange(extent * extent).reshape(extent, extent) + 1000 * rank + turn
            parts.append(FORMS[form](scratch).copy())
        with context:
            found, wanted = CALLS[name](x, parts, context.rank)
        if not np.array_equal(np.asarray(found), wanted):
            wrong.append(turn)
    return wrong


def mistake_after_a_call_that_looks_alike(context):
    x = np.ones((4, 4))
    with context:
        all_gather(x, axis=1)
        try:
            all_gather(x, axis=True)
        except ValueError as error:
            return str(error)
    return "fine"


def test_an_argument_that_equals_a_right_one_is_refused(contexts):
    words = "every rank: axis is an integer from -2 to 1, not True"
    assert contexts.run(mistake_after_a_call_that_looks_alike, ranks=2) == [words] * 2


@pytest.mark.parametrize("torch", [False, True], ids=["numpy", "torch"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_comes_again_reads_anew(contexts, name, form, torch):
    for extent in EXTENTS:
        assert contexts.run(repeat, name, form, extent, torch, ranks=3) == [[]] * 3


def repeat_without_axes(context, name, torch):
    """Whether each call has read the one element as it was then. Ranks write between two calls."""
    whole, wrong = np.zeros(()), []
    x = library.from_numpy(whole) if torch else whole
    for turn in range(TURNS):
        parts = [np.array(10.0**rank * (turn + 1)) for rank in range(context.size)]
        whole[...] = parts[context.rank]
        with context:
            found, wanted = CALLS[name](x, parts, context.rank)
        if not np.array_equal(np.asarray(found), wanted):
            wrong.append(turn)
    return wrong


@pytest.mark.parametrize("torch", [False, True], ids=["numpy", "torch"])
@pytest.mark.parametrize("name", ["all_reduce", "broadcast"])
def test_a_call_on_an_array_without_axes_that_comes_again_reads_anew(contexts, name, torch):
    assert contexts.run(repeat_without_axes, name, torch, ranks=3) == [[]] * 3


def free_and_call(context):
    found = []
    with context:
        for each in (all_reduce, lambda y: all_reduce(np.ones(4), out=y)):
            x = allocate((4,), np)
            x[:] = 1
            for _ in range(3):
                each(x)
            free(x)
            try:
                each(x)
            except RuntimeError as error:
                found.append("freed" in str(error))
    return found


def test_memory_that_was_freed_is_noticed(contexts):
    assert contexts.run(free_and_call, ranks=2) == [[True, True]] * 2


MOST = 5 if extension("shardmath.call._direct") is not None else 80
REPEATS = 32
FIRST = {"all_reduce": "reduce_local", "all_gather": "copyto", "redistribute": "copyto"}


def count(context):
    """The calls of Python before the first that computes or copies: see FIRST.

    Of several calls the least: memory that is given out for a new result may be some where no
    result lay before, and the copies that end there are bound then.
    """
    small, out = np.ones(256, "f4"), np.ones(256, "f4")
    with context:
        x, into = allocate((8, 16), np), allocate((16, 8), np)
        x[:] = 1
        calls = {
            "all_reduce": lambda: all_reduce(small, out=out),
            "all_gather": lambda: all_gather(small),
            "redistribute": lambda: redistribute(x, Slab(0), Slab(1), out=into),
        }
        return {
            name: min(len(calls_before(FIRST[name], call)) for _ in range(REPEATS))
            for name, call in calls.items()
        }


def test_few_calls_of_python_come_before_the_first_byte(contexts):
    for counts in contexts.run(count, ranks=2):
        assert all(most <= MOST for most in counts.values()), counts
