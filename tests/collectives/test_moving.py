"""broadcast, all_gather and all_to_all against concatenation."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from samples import DTYPES, FORMS, elements_of, formed, framed, numpy_dtype, same, values

from mortal import on_ranks
from shardmath.collectives import all_gather, all_reduce, all_to_all, broadcast

SHAPES = ((), (0,), (1,), (7, 9), (3, 0, 2), (70, 801), (400_001,))


def check_broadcast(context, root, dtypes, shapes=SHAPES):
    wrong = []
    for dtype in dtypes:
        for shape in shapes:
            wanted = values(dtype, shape, root)
            mine = values(dtype, shape, context.rank)
            found = broadcast(mine, root=root, context=context)
            given = mine if context.rank == root else None
            alone = broadcast(given, root=root, context=context)
            if not (same(found, wanted) and same(alone, wanted)):
                wrong.append((dtype, shape))
            if not same(mine, values(dtype, shape, context.rank)):
                wrong.append((dtype, shape, "operand changed"))
            for form in ("plain", "heap", "fortran"):
                x = formed(form, mine, context)
                if broadcast(x, root=root, out=x, context=context) is not x or not same(x, wanted):
                    wrong.append((dtype, shape, form, "in place"))
    return wrong


@pytest.mark.parametrize(("size", "root"), [(1, 0), (2, 1), (3, 0), (5, 3)])
def test_broadcast(contexts, size, root):
    dtypes = ["float32", "bool", "complex128", "bfloat16"]
    assert contexts.run(check_broadcast, root, dtypes, ranks=size) == [[]] * size


def uneven(shape, axis, rank):
    """`shape`, with another extent along `axis` on every rank; rank 1 has none."""
    return (*shape[:axis], (3 * rank + 2) % 5, *shape[axis + 1 :])


def check_gather(context, shape, axis, dtype):
    wrong = []
    shapes = [uneven(shape, axis % len(shape), rank) for rank in range(context.size)]
    parts = [values(dtype, each, rank) for rank, each in enumerate(shapes)]
    wanted = np.concatenate(parts, axis)
    for form in FORMS:
        x = formed(form, parts[context.rank], context)
        found = all_gather(x, axis=axis, context=context)
        if type(found) is not type(x) or not same(elements_of(found), wanted):
            wrong.append((form, "new"))
        library = "torch" if form.startswith("torch") else "numpy"
        out, untouched = framed(wanted.shape, dtype, library)
        found = all_gather(x, axis=axis, out=out, context=context)
        if found is not out or not same(elements_of(out), wanted) or not untouched():
            wrong.append((form, "out"))
    return wrong


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize(
    ("shape", "axis", "dtype"),
    [
        ((7,), 0, "float64"),
        ((7, 3), 0, "int8"),
        ((7, 3), 1, "complex64"),
        ((8, 9, 2), -2, "bfloat16"),
        ((0, 9), 1, "float32"),
    ],
)
def test_all_gather_of_uneven_parts(contexts, size, shape, axis, dtype):
    assert contexts.run(check_gather, shape, axis, dtype, ranks=size) == [[]] * size


@pytest.mark.parametrize(("shape", "axis"), [((3, 90_000), 0), ((2, 90_000), 1)])
def test_all_gather_of_long_operands(contexts, shape, axis):
    assert contexts.run(check_gather, shape, axis, "float32", ranks=4) == [[]] * 4


def check_gather_of_all_dtypes(context):
    wrong = []
    for dtype in (*DTYPES, ">f4", "V7", "<M8[s]"):
        parts = [values("uint8", (5, 112), rank) for rank in range(context.size)]
        parts = [part.view(numpy_dtype(dtype)) for part in parts]
        found = all_gather(parts[context.rank], context=context)
        if found.dtype != parts[0].dtype or found.tobytes() != b"".join(p.tobytes() for p in parts):
            wrong.append(dtype)
    return wrong


def test_all_gather_moves_the_bits_of_every_dtype(contexts):
    assert contexts.run(check_gather_of_all_dtypes, ranks=3) == [[]] * 3


def check_gather_in_place(context):
    """The operand is this rank's part of the result."""
    wrong = []
    for width in (3, 70_000):
        for place in ("plain", "heap"):
            parts = [values("float32", (2, width), rank) for rank in range(context.size)]
            whole = formed(place, np.zeros((2 * context.size, width), "float32"), context)
            mine = whole[2 * context.rank :][:2]
            mine[...] = parts[context.rank]
            all_gather(mine, out=whole, context=context)
            if not same(whole, np.concatenate(parts)):
                wrong.append((width, place))
    return wrong


def test_all_gather_in_place(contexts):
    assert contexts.run(check_gather_in_place, ranks=4) == [[]] * 4


def check_exchange(context, case, uneven_counts):
    shape, axis, dtype = case
    size, me = context.size, context.rank
    extent = shape[axis]
    parts = [values(dtype, shape, rank) for rank in range(size)]
    if uneven_counts:  # rank r sends all to rank r + 1 but for one index, which it keeps
        sent = [[0] * size for _ in range(size)]
        for rank in range(size):
            sent[rank][(rank + 1) % size] += extent - 1
            sent[rank][rank] += 1
    else:
        sent = [[extent // size + (r < extent % size) for r in range(size)]] * size
    taken = [
        np.take(part, range(sum(row[:me]), sum(row[: me + 1])), axis)
        for part, row in zip(parts, sent, strict=True)
    ]
    wanted = np.concatenate(taken, axis)
    received = [row[me] for row in sent]
    wrong = []
    for form in FORMS:
        x = formed(form, parts[me], context)
        library = "torch" if form.startswith("torch") else "numpy"
        for counts in ({}, {"receive_counts": received}):
            if uneven_counts:
                counts["send_counts"] = sent[me]
            found = all_to_all(x, axis=axis, **counts, context=context)
            if type(found) is not type(x) or not same(elements_of(found), wanted):
                wrong.append((form, counts))
        out, untouched = framed(wanted.shape, dtype, library)
        all_to_all(x, axis=axis, **counts, out=out, context=context)
        if not same(elements_of(out), wanted) or not untouched():
            wrong.append((form, "out"))
    return wrong


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("uneven_counts", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        ((8,), 0, "float64"),
        ((9, 7), 1, "int16"),
        ((2, 7, 3), -2, "bfloat16"),
        ((7, 60_000), 0, "float32"),
    ],
)
def test_all_to_all(contexts, size, case, uneven_counts):
    results = contexts.run(check_exchange, case, uneven_counts, ranks=size)
    assert results == [[]] * size


def check_alternation(context, turns=60, lengths=(3, 5000, 200_000, 30_000)):
    """Short, middle and long operands by turns: none is overwritten before all have read it."""
    wrong = 0
    for turn in range(turns):
        length = lengths[turn % len(lengths)]
        parts = [np.full(length, 10 * turn + rank, "int64") for rank in range(context.size)]
        if context.rank == turn % context.size:
            np.sort(np.arange(50_000)[::-1])  # this rank is late
        mine = formed("heap" if turn % 3 else "plain", parts[context.rank], context)
        found = all_gather(mine, context=context)
        mine[...] = -1  # the caller may do so at once
        wrong += not same(found, np.concatenate(parts))
    return wrong


def test_operands_may_be_overwritten_as_soon_as_the_call_returns(contexts):
    assert contexts.run(check_alternation, ranks=4) == [0] * 4


def check_groups(context, longest=400_000):
    """Two halves and the whole, used by turns, the halves not equally often."""
    half = context.split(context.rank % 2, key=-context.rank)
    members = sorted((r for r in range(context.size) if r % 2 == context.rank % 2), reverse=True)
    wrong = 0
    for turn in range(12):
        length = (5, 3000, longest)[turn % 3]
        for _ in range(1 + context.rank % 2):
            x = np.full(length, context.rank + turn, "int32")
            found = all_gather(x, context=half)
            wanted = np.concatenate([np.full(length, r + turn, "int32") for r in members])
            wrong += not same(found, wanted)
        with context:
            found = all_gather(np.full(length, context.rank, "int16"))
        wanted = np.repeat(np.arange(context.size, dtype="int16"), length)
        wrong += not same(found, wanted)
    half.close()
    return wrong


@pytest.mark.parametrize("size", [2, 5])
def test_groups_of_ranks_work_side_by_side(contexts, size):
    assert contexts.run(check_groups, ranks=size) == [0] * size


def check_memory_of_a_group_that_ended(context):
    """What peers may still read is not given to the next array; a split later it is."""
    gc.collect()
    context.split(None)
    before = context.heap.used
    group = context.split(0)
    all_reduce(np.ones(2_000_000, "float32"), context=group)
    all_gather(np.ones(10_000, "float32"), context=group)
    used = context.heap.used
    del group
    gc.collect()
    kept = context.heap.used
    context.split(None)
    return used > before, kept == used, context.heap.used == before


def test_memory_of_a_group_that_ended_waits_for_its_readers():
    """On new ranks, which collect their garbage in no time: others keep a thousand plans."""
    found = on_ranks(3, check_memory_of_a_group_that_ended)
    assert [tuple(each) for each in found] == [(True, True, True)] * 3
