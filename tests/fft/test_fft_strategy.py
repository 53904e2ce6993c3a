"""Strategies are data: which steps are found, what they move, and that blocks cover every part."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arrangements import distributions
from shardmath.distribution import (
    BlockCyclic,
    BlockNonCyclic,
    Layout,
    ProcessGrid,
    Replicated,
    Slab,
)
from shardmath.geometry import Run, decode
from shardmath.operators.fft import passes as passing
from shardmath.operators.fft.host import Plan
from shardmath.operators.fft.options import FFTDirection
from shardmath.operators.fft.passes import passes
from shardmath.operators.fft.problem import Problem
from shardmath.operators.fft.search import choose
from shardmath.operators.fft.strategy import Exchange, Transform

SHAPE = (64, 48, 32)


def problem(source, target, *, shape=SHAPE, size=4, axes=None, kind="C2C", order="C"):
    axes = tuple(range(len(shape))) if axes is None else axes
    made = list(shape)
    if kind == "R2C":
        made[axes[-1]] = shape[axes[-1]] // 2 + 1
    if kind == "C2R":
        made[axes[-1]] = 2 * (shape[axes[-1]] - 1)
    return Problem(
        kind=kind,
        direction=FFTDirection.INVERSE if kind == "C2R" else FFTDirection.FORWARD,
        norm=None,
        axes=axes,
        source=Layout.bind([source] * size, shape),
        target=Layout.bind([target] * size, tuple(made)),
        library="numpy",
        device="cpu",
        dtype="float64" if kind == "R2C" else "complex128",
        order=order,
        inplace=False,
    )


def outline(strategy):
    """Transforms as their axes, moves as the axes that are split afterwards."""
    return [
        step.axes if isinstance(step, Transform) else f"-> {step.dst.partitioned_axes}"
        for step in strategy.steps
    ]


PENCIL = BlockNonCyclic(ProcessGrid(shape=(2, 2, 1), layout=ProcessGrid.Layout.ROW_MAJOR))
CYCLIC = BlockCyclic(ProcessGrid(shape=(4, 1, 1)), (3, 3, 3))

OUTLINES = {
    "X to Y: one exchange": (problem(Slab.X, Slab.Y), [(2, 1), "-> (1,)", (0,)]),
    "X to X: two, none of them a pass of its own": (
        problem(Slab.X, Slab.X),
        ["-> (1,)", (2, 0), "-> (0,)", (1,)],
    ),
    "hermitian X to real X": (
        problem(Slab.X, Slab.X, kind="C2R"),
        ["-> (1,)", (0,), "-> (0,)", (1, 2)],
    ),
    "Y to X": (problem(Slab.Y, Slab.X), [(2, 0), "-> (0,)", (1,)]),
    "batches along the split axis: none": (
        problem(Slab.X, Slab.X, axes=(1, 2)),
        [(2, 1)],
    ),
    "one rank": (problem(Slab.X, Slab.Y, size=1), [(2, 1, 0)]),
    "pencils": (problem(PENCIL, PENCIL), ["-> (2,)", (1, 0), "-> (0, 1)", (2,)]),
    "cyclic, whole where transformed": (problem(CYCLIC, CYCLIC, axes=(2,)), [(2,)]),
    "replicas share the work": (
        problem(Replicated(), Replicated(), axes=(0,)),
        ["-> (1,)", (0,), "-> ()"],
    ),
    "real, X to Y": (problem(Slab.X, Slab.Y, kind="R2C"), [(2, 1), "-> (1,)", (0,)]),
    "real, last axis split": (
        problem(Slab.Z, Slab.Z, kind="R2C"),
        ["-> (1,)", (2, 0), "-> (2,)", (1,)],
    ),
    "real X to X: real elements move first, at half the bytes": (
        problem(Slab.X, Slab.X, kind="R2C"),
        ["-> (1,)", (2, 0), "-> (0,)", (1,)],
    ),
    "real back is the same list reversed": (
        problem(Slab.Y, Slab.X, kind="C2R"),
        [(0,), "-> (0,)", (1, 2)],
    ),
    "one axis, on one rank": (
        problem(Slab.X, Slab.X, shape=(512,)),
        ["-> (0,)", (0,), "-> (0,)"],
    ),
}


@pytest.mark.parametrize("name", OUTLINES)
def test_the_steps_are_these(name):
    given, expected = OUTLINES[name]
    assert outline(choose(given)) == expected


def test_a_real_transform_moves_half_as_much():
    moved = [
        max(passes(choose(problem(Slab.X, Slab.Y, kind=kind)))[1].transfer.traffic.received)
        for kind in ("C2C", "R2C")
    ]
    elements = math.prod(SHAPE)
    assert moved[0] == elements // 4 * 3 // 4 * 16
    assert moved[1] == elements // 32 * 17 // 4 * 3 // 4 * 16


@st.composite
def problems(draw):
    size = draw(st.integers(1, 6))
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=4)))
    axes = tuple(draw(st.permutations(range(len(shape))))[: draw(st.integers(1, len(shape)))])
    kind = draw(st.sampled_from(["C2C", "R2C", "C2R"]))
    if kind == "C2R" and shape[axes[-1]] == 1:
        kind = "C2C"
    given = problem(Slab.X, Slab.X, shape=shape, size=size, axes=axes, kind=kind)
    source = [decode(each) for each in draw(distributions(shape, size))]
    target = [decode(each) for each in draw(distributions(given.target.global_shape, size))]
    return Problem(
        **{
            **vars(given),
            "source": Layout.bind(source, shape),
            "target": Layout.bind(target, given.target.global_shape),
            "order": draw(st.sampled_from(["C", "F"])),
        }
    )


@settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(given_problem=problems(), block=st.sampled_from([32, 300, 4000]))
def test_every_axis_once_in_layouts_where_it_is_whole(given_problem, block):
    strategy = choose(given_problem)
    assert choose(given_problem) == strategy
    at, done = given_problem.source, []
    for step in strategy.steps:
        if isinstance(step, Exchange):
            assert step.src.same_as(at)
            at = step.dst
            continue
        assert step.layout.same_as(at)
        for rank in range(at.size):
            local = at.local_shape(rank)
            assert 0 in local or all(local[a] == at.global_shape[a] for a in step.axes)
        done += step.axes
        at = step.result
    assert at.same_as(given_problem.target)
    assert sorted(done) == sorted(given_problem.axes)
    if given_problem.kind == "R2C":
        assert done[0] == given_problem.axes[-1]
    if given_problem.kind == "C2R":
        assert done[-1] == given_problem.axes[-1]
    assert re.search(rf", {strategy.exchanges} exchanges?$", strategy.explain(), re.MULTILINE)
    check_blocks(given_problem, strategy, block)


def check_blocks(given_problem, strategy, block):
    """Blocks cover each part once, and what gathers a block is what the whole move would bring."""
    usual, passing.BLOCK_BYTES = passing.BLOCK_BYTES, block
    try:
        plan = Plan(given_problem, strategy)
        assert len(plan.places) == len(plan.passes)
        assert plan.places[-1] == -1
        for each in plan.passes:
            for rank in range(given_problem.source.size):
                count = np.zeros(each.layout.local_shape(rank), int)
                for cut in each.blocks(rank):
                    count[cut] += 1
                    assert all(cut[axis] == slice(0, count.shape[axis]) for axis in each.axes)
                assert (count == 1).all()
        check_order(plan)
    finally:
        passing.BLOCK_BYTES = usual


def check_order(plan):
    """No rank pulls what may not be written yet, or writes what a peer may still be pulling."""
    written, pulled, at = set(), set(), "operand"
    *before, after = plan.waits
    for each, place, waits in zip(plan.passes, plan.places, before, strict=True):
        if waits:
            written, pulled = set(), set()
        if each.transfer.crosses:
            assert at not in written
            pulled.add(at)
        assert place not in pulled
        assert place == at or place not in written or not each.transfer.crosses
        written.add(place)
        at = place
    assert after or not pulled


def test_a_buffer_that_peers_pull_from_is_not_reused_before_they_have():
    """Axis 1 is pulled from a buffer, and axis 2 then completed into the same one."""
    given_problem = problem(Slab.Z, Slab.Z, shape=(8, 7, 9), kind="C2R")
    strategy = choose(given_problem)
    assert outline(strategy) == [(0,), "-> (0,)", (1, 2), "-> (2,)"]
    check_blocks(given_problem, strategy, 32)


RUNS = [
    Run(1, 7, 3, 0, 2, 0),
    Run(4, 3, 1, 5, 0, 4),
    Run(5, 2, 0, 2, 1, 6),
    Run(3, 4, 2, 9, 0, 4),
]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_clipped_run_copies_what_lies_within(run):
    stop = run.dst_start + (run.count - 1) * run.dst_step + run.length
    pairs = {
        run.dst_start + i * run.dst_step + j: run.src_start + i * run.src_step + j
        for i in range(run.count)
        for j in range(run.length)
    }
    for lo in range(stop + 2):
        for hi in range(lo, stop + 3):
            got = [
                (
                    lo + part.dst_start + i * part.dst_step + j,
                    part.src_start + i * part.src_step + j,
                )
                for part in passing._clip(run, lo, hi)
                for i in range(part.count)
                for j in range(part.length)
            ]
            assert sorted(got) == sorted((d, s) for d, s in pairs.items() if lo <= d < hi)


def test_it_prints():
    shown = Plan(problem(Slab.X, Slab.Y), choose(problem(Slab.X, Slab.Y))).explain()
    assert "transform axes 2, 1" in shown
    assert "bytes" in shown
    assert "predicted" in shown
    assert ", 1 exchange\n" in shown
    assert "pass 1: C2C along 1, 2\npass 2: take this rank's part from all ranks, C2C" in shown
