"""Any distribution to any other, in any memory, against slices of one global array."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import redistribution_cases as cases
from hypothesis import given

from arrangements import part_of
from draws import drawn
from heap_use import settled_use
from ranks import Pool, with_context
from shardmath.arrays import library_named
from shardmath.arrays.dtypes import to_numpy
from shardmath.distribution import Box, Redistribute, Replicated, Slab, redistribute
from shardmath.geometry import decode
from shardmath.handles.allocation import empty_on_heap, is_symmetric
from shardmath.reshape import Reshape, ReshapeOptions, reshape


def memory(context, library, where):
    """empty(shape, dtype, order) for a store, as NumPy views, and the arrays that were made."""
    made = []

    def empty(shape, dtype, order):
        if where.startswith("heap"):
            array = empty_on_heap(context, library, shape, dtype, order)
        else:
            array = library.empty(shape, dtype, order)
        made.append(array)
        return library.host_view(array)

    return empty, made


def placed(context, library, part, store):
    """`part` as the user would hold it: (array, its NumPy view, the whole around it)."""
    empty, made = memory(context, library, store)
    inner, whole = cases.stored(part, store.removeprefix("heap "), empty)
    if whole is None:
        return made[0], inner, whole
    if library.name == "numpy":
        return inner, inner, whole
    user = made[0][tuple(slice(1, 1 + 2 * n, 2) for n in part.shape)]
    return user, library.host_view(user), whole


def run_case(context, case):
    size, shape, inputs, outputs, library_name, dtype, stores, out_store = case
    rank = context.rank
    library = library_named(library_name)
    array = cases.global_array(shape, to_numpy(dtype))
    source, target = cases.decoded(inputs, rank), cases.decoded(outputs, rank)
    part = part_of(array, source, rank, size)
    want = part_of(array, target, rank, size)
    operand, view, around = placed(context, library, part, stores[rank])
    with context:
        if out_store == "none":
            got = redistribute(operand, source, target)
            assert is_symmetric(got) == stores[rank].startswith("heap")
        else:
            blank = np.zeros(want.shape, want.dtype)
            out, _, whole = placed(context, library, blank, out_store)
            got = redistribute(operand, source, target, out=out)
            assert got is out
            assert cases.untouched(library.host_view(out), whole)
    host = library.host_view(got)
    assert type(got) is type(operand)
    assert host.dtype == want.dtype
    assert host.shape == want.shape
    assert host.tobytes() == want.tobytes()
    assert view.tobytes() == part.tobytes()
    assert cases.untouched(view, around)


@drawn(180)
@given(case=cases.cases())
def test_any_distribution_to_any_other(contexts, case):
    contexts.run(run_case, case, ranks=case[0])


def keep_planned(context, case):
    size, shape, inputs, outputs, *_ = case
    rank = context.rank
    source, target = cases.decoded(inputs, rank), cases.decoded(outputs, rank)
    numpy = library_named("numpy")
    with context:
        used = []
        first = part_of(cases.global_array(shape, "f8"), source, rank, size)
        with Redistribute(np.array(first), source, target) as plan:
            plan.plan()
            for turn, store in enumerate(("C", "heap F", "strided", "heap strided", "F", "C")):
                array = cases.global_array(shape, "f8").view("u8") + turn
                array = array.view("f8")
                part = part_of(array, source, rank, size)
                want = part_of(array, target, rank, size)
                operand, _, _ = placed(context, numpy, part, store)
                plan.reset_operand(operand)
                got = [plan.execute(), plan.execute(out=np.zeros_like(want))]
                assert [g.tobytes() for g in got] == [want.tobytes()] * 2
                plan.execute(release_workspace=True, out=got[0])
                used.append(settled_use(context) if store == "C" else 0)
                del operand
                context.barrier()
        del plan, got
        context.barrier()
    return used[0] == used[-1]


@pytest.fixture(scope="module")
def new_contexts():
    """Ranks in which no other test has left plans: those of long memory are slow to collect."""
    with Pool(6, with_context) as ranks:
        yield ranks


@drawn(30)
@given(case=cases.cases())
def test_a_plan_serves_any_operand_of_its_shape(new_contexts, case):
    assert all(new_contexts.run(keep_planned, case, ranks=case[0]))


def expect_otherwise(context, store):
    """Calls that look the same on all ranks but the last, with results of two shapes."""
    rank, size = context.rank, context.size
    numpy = library_named("numpy")
    with context:
        for turn in range(6):
            array = cases.global_array((4 * size - turn % 2, 2 * size + 1), "f8")
            part, want = (part_of(array, slab, rank, size) for slab in (Slab.X, Slab.Y))
            operand, _, _ = placed(context, numpy, part, store)
            got = redistribute(operand, Slab.X, Slab.Y)
            assert got.shape == want.shape
            assert got.tobytes() == want.tobytes()
    return True


@pytest.mark.parametrize("store", ["C", "heap C"])
def test_a_call_may_become_another_than_the_last_that_looked_like_it(contexts, store):
    assert all(contexts.run(expect_otherwise, store, ranks=2))


def keep_order(context, store, target):
    library = library_named("numpy")
    array = cases.global_array((8, 9, 16), "f8")  # 8 ranks have parts of which the order shows
    part = part_of(array, Slab.X, context.rank, context.size)
    operand, _, _ = placed(context, library, part, store)
    with context:
        got = redistribute(operand, Slab.X, decode(target))
    return bool(got.flags.c_contiguous), bool(got.flags.f_contiguous)


@pytest.mark.parametrize("store", cases.STORES)
@pytest.mark.parametrize("target", [Slab.Z, Replicated()], ids=str)
def test_a_result_keeps_the_order_of_the_operand(contexts, store, target):
    column_major = store.endswith("F")
    flags = contexts.run(keep_order, store, target.encode(), ranks=3)
    assert flags == [(not column_major, column_major)] * 3


def interleave(context):
    """Two objects, and one on a sub-group, executed in turn; all keep their own staging."""
    rank = context.rank
    array = cases.global_array((16, 12), "f8")
    other = cases.global_array((5, 6, 8), "V12")
    half = context.split(rank % 2, key=-rank)
    small = cases.global_array((7, 9), "i2")

    def part(whole, distribution, within):
        return np.array(part_of(whole, distribution, within.rank, within.size))

    with context:
        one = Redistribute(part(array, Slab.X, context), Slab.X, Slab.Y)
        two = Redistribute(part(other, Slab.Z, context), Slab.Z, Slab.X)
    with half:
        three = Redistribute(part(small, Slab.Y, half), Slab.Y, Replicated())
    for plan in (one, two, three):
        plan.plan()
    for turn in range(5):
        order = [(one, array, Slab.Y, context), (two, other, Slab.X, context)]
        order.insert(turn % 3, (three, small, Replicated(), half))
        for plan, whole, target, within in order:
            assert (plan.execute() == part(whole, target, within)).all()
    for plan in (two, one, three):
        plan.free()
    return half.size


def test_objects_and_groups_do_not_disturb_each_other(contexts):
    assert contexts.run(interleave, ranks=5) == [3, 2, 3, 2, 3]


def overwrite(context, store, turns):
    """Each rank changes its operand as soon as `execute` has returned; no peer may see that."""
    rank, size = context.rank, context.size
    library = library_named("numpy")
    blank = np.zeros((size * 64, 90))
    operand, _, _ = placed(context, library, part_of(blank, Slab.X, rank, size), store)
    out = np.array(part_of(blank, Slab.Y, rank, size))
    with context:
        plan = Redistribute(operand, Slab.X, Slab.Y)
        plan.plan()
        wrong = 0
        for turn in range(turns):
            operand[...] = turn
            plan.execute(out=out)
            operand[...] = -1
            wrong += not (out == turn).all()
        plan.free()
    return wrong


@pytest.mark.parametrize("store", ["heap C", "C"])
def test_operands_may_be_overwritten_after_each_execution(contexts, store):
    assert contexts.run(overwrite, store, 200, ranks=4) == [0] * 4


def reshape_boxes(context):
    rank = context.rank
    array = cases.global_array((9, 6), "f4")
    mine, wanted = (Box((0, 0), (9, 2)), Box((0, 2), (9, 6)))[:: 1 - 2 * rank]
    with context:
        got = reshape(np.array(array[:, slice(mine.lower[1], mine.upper[1])]), mine, wanted)
        with Reshape(got, wanted, mine, options=ReshapeOptions(blocking=True)) as plan:
            plan.plan()
            back = plan.execute()
            shown = repr(plan)
    assert got.tobytes() == array[:, slice(wanted.lower[1], wanted.upper[1])].tobytes()
    assert back.tobytes() == array[:, slice(mine.lower[1], mine.upper[1])].tobytes()
    return shown.partition(" #")[0]


def test_reshape_is_redistribution_of_boxes(contexts):
    assert contexts.run(reshape_boxes, ranks=2) == ["<Reshape"] * 2


def conjugated(context):
    """A lazily conjugated tensor on the heap has its elements nowhere in memory."""
    torch = importlib.import_module("torch")
    library = library_named("torch")
    array = torch.arange(36).reshape(6, 6) * (1 + 2j)
    rows = slice(*((0, 3), (3, 6))[context.rank])
    held = empty_on_heap(context, library, (3, 6), "complex64")
    held[...] = array[rows]
    with context:
        got = redistribute(held.conj(), Slab.X, Slab.Y)
    assert is_symmetric(got)
    return bool((got == array.conj()[:, rows]).all())


def test_a_lazily_conjugated_tensor(contexts):
    assert contexts.run(conjugated, ranks=2) == [True, True]
