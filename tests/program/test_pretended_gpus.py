"""Redistribution on pretended GPUs, of one host and of two: all that is not CUDA itself."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

from draws import drawn

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent / "redistribution"))
sys.path.append(str(Path(__file__).parent.parent / "distributed"))

import numpy as np
import test_halos
import test_redistribute_any as bodies
from hypothesis import given
from pretended import pretended_gpu
from redistribution_cases import cases
from split_arrays import lists_of

from arrangements import part_of
from counted import calls_before
from heap_use import settled_use
from mistakes import heard, no_memory
from mortal import on_ranks
from shardmath.arrays import library_named
from shardmath.base.compiled import extension
from shardmath.distribution import Redistribute, Slab, redistribute
from shardmath.handles.allocation import empty_on_heap


def on_gpus(context, body, *args):
    context.barrier()
    with pretended_gpu(context):
        found = getattr(bodies, body)(context, *args)
        context.board.barrier("done")
    return found


@drawn(25, shrunk=False)
@given(case=cases(libraries=("numpy",)))
def test_any_distribution_to_any_other(ranks, case):
    ranks.run(on_gpus, "run_case", case, ranks=case[0])


def rims(context, calls):
    context.barrier()
    with pretended_gpu(context), context:
        test_halos.body(context, calls)
        context.board.barrier("done")


@drawn(4)
@given(calls=lists_of(lambda size: test_halos.halos(size, ("numpy",))))
def test_parts_with_rims(ranks, calls):
    size, given_ = calls
    ranks.run(rims, given_, ranks=size)


@pytest.mark.parametrize("store", ["C", "heap C"])
def test_a_call_may_become_another_than_the_last_that_looked_like_it(ranks, store):
    assert all(ranks.run(on_gpus, "expect_otherwise", store, ranks=2))


@pytest.mark.parametrize("store", ["heap C", "C", "heap strided"])
def test_operands_may_be_overwritten_after_each_execution(ranks, store):
    assert ranks.run(on_gpus, "overwrite", store, 20, ranks=3) == [0] * 3


def want(context, store, form):
    """What is raised where rank 1's heap is full, how much memory stays, and what comes then.

    In a group of its own: memory that a call before left there would do for the next.
    """
    full = np.arange(96.0).reshape(12, 8)
    part = part_of(full, Slab.X, context.rank, context.size)
    wanted = part_of(full, Slab.Y, context.rank, context.size)
    group = context.split(0)
    with pretended_gpu(group), group:
        operand = part.copy()
        if store == "heap":
            operand = empty_on_heap(group, library_named("numpy"), part.shape, "float64")
            operand[...] = part
        with Redistribute(operand, Slab.X, Slab.Y) as moved:
            moved.plan()
            call = moved.execute
            if form == "function":
                call = partial(redistribute, operand, Slab.X, Slab.Y)
            before = settled_use(group)
            with no_memory(group):
                said = heard(call)[0]
            more = settled_use(group) - before
            right = call().tolist() == wanted.tolist()
        group.board.barrier("done")
    return said, more, right


@pytest.mark.parametrize("form", ["function", "object"])
@pytest.mark.parametrize("store", ["heap", "ordinary"])
def test_want_of_memory_on_one_rank_is_an_error_on_all(store, form):
    """On new ranks, which collect their garbage in no time: others keep a thousand plans."""
    found = on_ranks(3, lambda context: want(context, store, form))
    assert [tuple(each) for each in found] == [("MemoryError", 0, True)] * 3


def test_objects_and_groups_do_not_disturb_each_other(contexts):
    assert contexts.run(on_gpus, "interleave", ranks=5) == [3, 2, 3, 2, 3]


def change(context, store):
    """Calls come again, with results given and new, and then one rank's array lies elsewhere."""
    full = np.arange(96.0).reshape(12, 8)
    part = part_of(full, Slab.X, context.rank, context.size)
    wanted = part_of(full, Slab.Y, context.rank, context.size)
    right = []
    with pretended_gpu(context), context:
        numpy = library_named("numpy")

        def made(shape):
            on_heap = store == "heap"
            return empty_on_heap(context, numpy, shape, "float64") if on_heap else np.empty(shape)

        operand, outs = made(part.shape), [made(wanted.shape) for _ in range(3)]
        other = np.empty(wanted.shape[::-1]).T  # of other strides, and not on the heap
        operand[...] = part
        with Redistribute(operand, Slab.X, Slab.Y) as moved:
            moved.plan()
            for turn in range(24):
                late = turn % 8 == 7 and turn // 8 == context.rank
                out = other if late else outs[(turn // 4) % 3 if context.rank else 0]
                out[...] = -1
                right += [np.array_equal(moved.execute(out=out), wanted)]
                right += [np.array_equal(moved.execute(), wanted)]
                right += [np.array_equal(redistribute(operand, Slab.X, Slab.Y, out=out), wanted)]
        context.board.barrier("done")
    return all(right)


@pytest.mark.parametrize("store", ["heap", "ordinary"])
def test_a_call_comes_again_and_a_peers_arrays_are_others(ranks, store):
    assert all(ranks.run(change, store, ranks=3))


def used_anew(context, form):
    """Whether the heap knows, of the block that a call writes to, that peers know it: in each turn,
    in which other blocks lie where those of the turn before have lain.
    """
    part = part_of(np.arange(96.0).reshape(12, 8), Slab.X, context.rank, context.size)
    shape = Slab.Y.shape(context.rank, (12, 8), size=context.size)
    places, known = set(), []
    with pretended_gpu(context), context:
        numpy = library_named("numpy")
        operand = empty_on_heap(context, numpy, part.shape, "float64")
        operand[...] = part
        with Redistribute(operand, Slab.X, Slab.Y) as moved:
            moved.plan()
            for _ in range(5):
                out = empty_on_heap(context, numpy, shape, "float64")
                block = context.heap.find(numpy.pointer(out))
                for _ in range(2):
                    if form == "object":
                        moved.execute(out=out)
                    else:
                        redistribute(operand, Slab.X, Slab.Y, out=out)
                places.add(block.address)
                known.append(context.number in block.announced_to)
                out = None
                context.heap.recycle()
        context.board.barrier("done")
    return len(places), known


@pytest.mark.parametrize("form", ["object", "function"])
def test_peers_know_the_blocks_that_lie_where_others_did(ranks, form):
    assert ranks.run(used_anew, form, ranks=2) == [(1, [True] * 5)] * 2


def repeated(context):
    """The functions of Python that a redistribution calls that comes again, until its graph."""
    full = np.ones((12, 8))
    part = part_of(full, Slab.X, context.rank, context.size)
    out = part_of(full, Slab.Y, context.rank, context.size).copy()
    with pretended_gpu(context), context, Redistribute(part, Slab.X, Slab.Y) as moved:
        moved.plan()
        for _ in range(4):
            moved.execute(out=out)
        names = calls_before("Lane.launch", lambda: moved.execute(out=out))
        context.board.barrier("done")
    return names


@pytest.mark.parametrize("size", [1, 2])
def test_a_call_that_comes_again_is_launched_soon(contexts, size):
    most = 20 if extension("shardmath.call._direct") is not None else 90
    for names in contexts.run(repeated, ranks=size):
        assert len(names) <= most, names
