"""Any distribution to any other, in any memory, against slices of one global array."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings

import cases
from shardmath.arrays import library_named
from shardmath.arrays.dtypes import to_numpy
from shardmath.distribution import Redistribute, redistribute
from shardmath.symmetric.allocation import empty_on_heap, is_symmetric


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
    part = cases.part_of(array, source, rank, size)
    want = cases.part_of(array, target, rank, size)
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
    return bool(host.flags.c_contiguous), bool(host.flags.f_contiguous)


@settings(
    max_examples=500, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
@given(case=cases.cases())
def test_any_distribution_to_any_other(contexts, case):
    orders = contexts.run(run_case, case, ranks=case[0])
    if case[7] == "none" and set(case[6]) <= {"F", "heap F"} and max(case[1]) > 1:
        assert all(f for _, f in orders) or all(c for c, _ in orders)


def keep_planned(context, case):
    size, shape, inputs, outputs, *_ = case
    rank = context.rank
    source, target = cases.decoded(inputs, rank), cases.decoded(outputs, rank)
    numpy = library_named("numpy")
    with context:
        used = []
        first = cases.part_of(cases.global_array(shape, "f8"), source, rank, size)
        with Redistribute(np.array(first), source, target) as plan:
            plan.plan()
            for turn, store in enumerate(("C", "heap F", "strided", "heap strided", "F", "C")):
                array = cases.global_array(shape, "f8").view("u8") + turn
                array = array.view("f8")
                part = cases.part_of(array, source, rank, size)
                want = cases.part_of(array, target, rank, size)
                operand, _, _ = placed(context, numpy, part, store)
                plan.reset_operand(operand)
                got = [plan.execute(), plan.execute(out=np.zeros_like(want))]
                assert [g.tobytes() for g in got] == [want.tobytes()] * 2
                plan.execute(release_workspace=True, out=got[0])
                used.append(context.heap.used if store == "C" else 0)
                del operand
                context.barrier()
        del plan, got
        context.barrier()
    return used[0] == used[-1]


@settings(max_examples=30, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(case=cases.cases())
def test_a_plan_serves_any_operand_of_its_shape(contexts, case):
    contexts.run(keep_planned, case, ranks=case[0])
