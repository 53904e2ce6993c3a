"""The small operator of `matvec`, performed on cores, of one host and of pretended ones."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from draws import drawn

sys.path.append(str(Path(__file__).parent))

from matvec import MatVec, matvec
from test_programs import vector_case

from arrangements import part_of
from heap_use import settled_use
from mistakes import heard
from mortal import on_ranks
from shardmath.arrays import library_named
from shardmath.distribution import Replicated, Slab
from shardmath.geometry import decode
from shardmath.handles.allocation import empty_on_heap, is_symmetric


def on_heap(context, part):
    made = empty_on_heap(context, library_named("numpy"), part.shape, part.dtype)
    made[...] = part
    return made


def multiply(context, arrays, words, store, turns=3):
    rank, size = context.rank, context.size
    given = tuple(map(decode, words[rank]))
    a, x, want = (
        np.array(part_of(whole, each, rank, size))
        for whole, each in zip((*arrays, arrays[0] @ arrays[1]), given, strict=True)
    )
    if store == "heap":
        a, x = on_heap(context, a), on_heap(context, x)
    wrong = []
    with context:
        out = np.zeros_like(want)
        with MatVec(a, x, given) as plan:
            plan.plan()
            for turn in range(turns):
                for name, result in (
                    ("new", matvec(a, x, given)),
                    ("out", matvec(a, x, given, out=out)),
                    ("planned", plan.execute(release_workspace=turn == 1)),
                ):
                    if result.tolist() != ((turn + 1) * want).tolist():
                        wrong.append((turn, name))
                    if name != "out" and is_symmetric(result) != (store == "heap"):
                        wrong.append((turn, name, "elsewhere"))
                context.barrier()
                x += part_of(arrays[1], given[1], rank, size)
    return wrong


@drawn(15, shrunk=False)
@given(data=st.data())
def test_any_distributions(ranks, data):
    size, arrays, words = vector_case(data)
    store = data.draw(st.sampled_from(["ordinary", "heap"]))
    assert ranks.run(multiply, arrays, words, store, ranks=size) == [[]] * size


def mistaken(context):
    """After each mistake of rank 1 `out` is as it was, and the next call is right."""
    a, x, y = np.ones((4, 3)), np.ones(6), np.zeros(4)
    good = {"a": a, "x": x, "distributions": (Slab.Y, Replicated(), Replicated()), "out": y}
    table = {
        "a vector": {"a": np.ones(4)},
        "another dtype": {"a": a.astype("f4")},
        "too long": {"x": np.ones(7)},
        "out too short": {"out": np.zeros(3)},
        "out the operand": {"out": a[:, 0]},
        "no distribution": {"distributions": (Slab.Y, 3, Slab.X)},
        "other words": {"distributions": (Slab.Y, Replicated(), Slab.X)},
        "no array": {"x": None},
    }
    said = {}
    with context:
        for name, wrong in table.items():
            y[...] = -1
            said[name] = heard(lambda w=wrong: matvec(**(good | (w if context.rank == 1 else {}))))
            assert (y == -1).all(), name
            assert matvec(**good).tolist() == [6] * 4, name
    return said


def test_a_mistake_of_one_rank_is_the_same_error_on_all(ranks):
    first, second = ranks.run(mistaken, ranks=2)
    assert first == second
    assert all(kind != "nothing" for kind, _ in first.values())


def memory(context):
    a, x = np.ones((300, 300)), np.ones(300)
    before = settled_use(context)
    with context, MatVec(a, x, (Replicated(), Replicated(), Slab.X)) as plan:
        plan.plan()
        plan.execute()
        used = context.heap.used - before
        plan.execute(release_workspace=True)
        plan.execute()
    del plan
    return used > 0, settled_use(context) - before


def test_workspace_is_given_back():
    """On new ranks, which collect their garbage in no time: others keep a thousand plans. The first
    plan also makes what a context keeps.
    """
    found = on_ranks(2, lambda context: [memory(context) for _ in range(2)][1])
    assert [tuple(each) for each in found] == [(True, 0)] * 2
