"""Whatever the ranks disagree on, all of them raise the same error, and nothing is overwritten."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mortal import on_ranks
from shardmath import collectives
from shardmath.errors import OpTimeout, RankFailure

SIZE = 3
FUNCTIONS = ("broadcast", "all_gather", "reduce_scatter", "all_reduce", "all_to_all")
REDUCING = ("all_reduce", "reduce_scatter")
AXIAL = ("all_gather", "reduce_scatter", "all_to_all")


def changed(what):
    """The arguments, (x, keywords), of a rank that differs."""
    plain = np.ones((6, 4), "float32")
    frozen = np.ones((6, 4), "float32")
    frozen.flags.writeable = False
    return {
        "shape": (np.ones((6, 5), "float32"), {}),
        "long shape": (np.broadcast_to(np.float32(1), (600_000, 5)), {}),
        "axes": (np.ones((6, 4, 1), "float32"), {}),
        "empty": (np.ones((0, 5), "float32"), {}),
        "dtype": (np.ones((6, 4), "float64"), {}),
        "integers": (np.ones((6, 4), "int32"), {}),
        "library": (torch.ones((6, 4)), {}),
        "list": ([1, 2, 3], {}),
        "none": (None, {}),
        "objects": (np.array([object()]), {}),
        "masked": (np.ma.ones((6, 4)), {}),
        "meta tensor": (torch.ones(3, device="meta"), {}),
        "op": (plain, {"op": "max"}),
        "unknown op": (plain, {"op": "xor"}),
        "op function": (plain, {"op": np.add}),
        "op list": (plain, {"op": ["sum"]}),
        "complex max": (plain.astype(complex), {"op": "max"}),
        "opaque sum": (plain.view("V4"), {}),
        "axis": (plain, {"axis": 1}),
        "axis of none": (np.float32(1).reshape(()), {"axis": 0}),
        "axis too large": (plain, {"axis": 2}),
        "axis no integer": (plain, {"axis": 0.5}),
        "root": (plain, {"root": 1}),
        "root too large": (plain, {"root": SIZE}),
        "root a bool": (plain, {"root": True}),
        "counts": (plain, {"counts": (1, 2, 3)}),
        "counts too few": (plain, {"counts": (3, 3)}),
        "counts too many": (plain, {"counts": (3, 3, 3)}),
        "counts negative": (plain, {"counts": (7, -1, 0)}),
        "send_counts": (plain, {"send_counts": (3, 3, 3)}),
        "send_counts negative": (plain, {"send_counts": (7, -1, 0)}),
        "send_counts text": (plain, {"send_counts": "123"}),
        "receive_counts": (plain, {"receive_counts": (1, 2, 3)}),
        "out shape": (plain, {"out": np.full((9, 9), 7, "float32")}),
        "out dtype": (plain, {"out": np.full((6, 4), 7, "float64")}),
        "out library": (plain, {"out": torch.full((6, 4), 7.0)}),
        "out read-only": (plain, {"out": frozen}),
        "out expanded": (plain, {"out": np.broadcast_to(np.float32(7), (6, 4))}),
        "out list": (plain, {"out": [1.0]}),
    }[what]


BY_FUNCTION = {
    "broadcast": ["shape", "long shape", "axes", "root", "root too large", "root a bool"],
    "all_gather": ["shape", "axes"],
    "all_to_all": [
        "shape",
        "send_counts",
        "send_counts negative",
        "send_counts text",
        "receive_counts",
    ],
    "reduce_scatter": ["shape", "counts", "counts too few", "counts too many", "counts negative"],
    "all_reduce": ["shape", "long shape", "axes", "empty"],
}
EVERYWHERE = ["dtype", "integers", "library", "list", "objects", "masked", "meta tensor"]
EVERYWHERE += [
    f"out {what}" for what in ("shape", "dtype", "library", "read-only", "expanded", "list")
]
for name in REDUCING:
    BY_FUNCTION[name] += [
        "none",
        "op",
        "unknown op",
        "op function",
        "op list",
        "complex max",
        "opaque sum",
    ]
for name in AXIAL:
    BY_FUNCTION[name] += ["axis", "axis of none", "axis too large", "axis no integer"]
CASES = [
    (f, what, 1 + n % 2) for f in BY_FUNCTION for n, what in enumerate(BY_FUNCTION[f] + EVERYWHERE)
]
CASES += [("broadcast", "none", 0), ("all_reduce", "dtype", 0), ("all_gather", "out shape", 0)]


def call_all(context, cases):
    """What each case raises, and whether `out` is as before and a proper call works afterwards."""
    reports = []
    for function, what, differing in cases:
        call = getattr(collectives, function)
        x, keywords = np.ones((6, 4), "float32"), {}
        if context.rank == differing:
            x, keywords = changed(what)
        shape = (2, 4) if function == "reduce_scatter" else (6, 4)
        if function == "all_gather":
            shape = (18, 4)
        if "out" not in keywords:
            keywords = {**keywords, "out": np.full(shape, 7, "float32")}
            if what == "library" and context.rank == differing:
                keywords["out"] = torch.full(shape, 7.0)
        try:
            call(x, **keywords, context=context)
            said = "nothing"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        out = keywords["out"]
        kept = isinstance(out, list) or bool((np.asarray(out) == np.asarray(out).flat[0]).all())
        kept = kept and (isinstance(out, list) or np.asarray(out).flat[0] in (1, 7))
        after = collectives.all_reduce(np.ones(2), context=context).tolist() == [SIZE, SIZE]
        reports.append((said, kept, after))
    return reports


def test_every_disagreement_is_raised_on_all_ranks(contexts):
    assert len(CASES) >= 60
    by_rank = contexts.run(call_all, CASES, ranks=SIZE)
    for case, *reports in zip(CASES, *by_rank, strict=True):
        _, _, differing = case
        said = reports[0][0]
        assert all(report[0] == said for report in reports), (case, reports)
        kind = said.partition(":")[0]
        assert kind in ("CollectiveMismatch", "ValueError", "TypeError"), (case, said)
        assert f"rank {differing}" in said, (case, said)
        assert all(kept and after for _, kept, after in reports), (case, reports)


def call_different_functions(context, first, second):
    function = first if context.rank == 0 else second
    try:
        getattr(collectives, function)(np.ones(6), context=context)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("first", FUNCTIONS)
@pytest.mark.parametrize("second", FUNCTIONS)
def test_different_functions(contexts, first, second):
    if first == second:
        second = "reduce_scatter" if first != "reduce_scatter" else "broadcast"
    reports = contexts.run(call_different_functions, first, second, ranks=SIZE)
    assert len(set(reports)) == 1
    kind, said = reports[0]
    assert kind == "CollectiveMismatch"
    assert f"rank 0 called {first}" in said
    assert f"ranks 1, 2 called {second}" in said


def differing_mean(context):
    reports = []
    for out in (np.full(4, 7), np.full(4, 7.0)):
        try:
            collectives.all_reduce(np.ones(4, "int64"), op="mean", out=out, context=context)
            reports.append(str(out.tolist()))
        except ValueError as error:
            reports.append(str(error))
    return reports


def test_the_mean_of_integers_needs_an_out_of_float64(contexts):
    for refused, found in contexts.run(differing_mean, ranks=2):
        assert "rank 0: out is a numpy array of int64 (4,)" in refused
        assert "float64" in refused
        assert found == "[1.0, 1.0, 1.0, 1.0]"


def freed_operand(context):
    buffer = context.heap.allocate(400)
    x = np.asarray(buffer).view("float32")
    if context.rank == 1:
        context.heap.free(buffer.block)
    reports = []
    for call in (
        lambda: collectives.all_reduce(x, context=context),
        lambda: collectives.all_gather(np.ones(100, "float32"), out=x, context=context),
    ):
        try:
            call()
        except Exception as error:
            reports.append(f"{type(error).__name__}: {error}"[:28])
    return reports


def test_freed_memory_is_refused_on_all_ranks(contexts):
    results = contexts.run(freed_operand, ranks=2)
    assert results == [["UseAfterFree: rank 1: an ope", "UseAfterFree: rank 1: out li"]] * 2


def call_too_often(context):
    """One rank calls once more than the others, which end."""
    group = context.split(0)
    collectives.all_reduce(np.ones(9), context=group)
    if context.rank != 1:
        group.close()
        return "left"
    try:
        collectives.all_reduce(np.ones(9), context=group)
    except (RankFailure, OpTimeout) as error:
        return f"{type(error).__name__} {set(error.ranks) <= {0, 2}}"
    return "nothing"


def test_one_call_too_many_ends(contexts):
    assert contexts.run(call_too_often, ranks=3) == ["left", "RankFailure True", "left"]


def fail_after_agreement(context):
    """An error on one rank after agreement: the others are told at once, not at the deadline."""
    group = context.split(0)
    x = np.ones(1_000_000, "float32")
    if context.rank == 1:
        group.board.barrier = int  # of an operation's name: as good as any other fault
    try:
        collectives.all_reduce(x, context=group)
    except Exception as error:
        return type(error).__name__
    return None


def test_a_fault_after_agreement_does_not_leave_peers_waiting(contexts):
    results = contexts.run(fail_after_agreement, ranks=3)
    assert results == ["RankFailure", "ValueError", "RankFailure"]


@pytest.mark.parametrize("given", [0, "current", []])
def test_a_context_is_a_context(given):
    with pytest.raises(TypeError, match="context is a DistributedContext or None"):
        collectives.all_reduce(np.ones(3), context=given)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_ranks_of_the_only_context_are_told_of_a_wrong_one(function):
    def body(context):
        given = "the first" if context.rank == 1 else (context, None)[context.rank % 2]
        try:
            getattr(collectives, function)(np.ones((6, 4)), context=given)
            said = "nothing"
        except TypeError as error:
            said = str(error)
        return said, float(collectives.all_reduce(1.0))

    said = "rank 1: context is a DistributedContext or None, not 'the first'"
    assert on_ranks(3, body) == [(said, 3.0)] * 3


def test_a_wrong_context_is_that_rank_s_affair_where_there_are_several():
    def body(context):
        half = context.split(0)
        if context.rank == 1:
            with pytest.raises(TypeError, match=r"^context is a DistributedContext"):
                collectives.all_reduce(1.0, context="half")
        return float(collectives.all_reduce(1.0, context=half))

    assert on_ranks(2, body) == [2.0, 2.0]
