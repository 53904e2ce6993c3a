"""Strategies are data: which steps are found, what they move, and that blocks cover every part."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arrangements import distributions
from draws import drawn
from shardmath.distribution import (
    BlockCyclic,
    BlockNonCyclic,
    Layout,
    ProcessGrid,
    Replicated,
    Slab,
)
from shardmath.geometry import Move, Run, decode
from shardmath.machine import Machine
from shardmath.operators.fft.operation import FFT_OF_ANY_KIND
from shardmath.operators.fft.options import FFTDirection
from shardmath.operators.fft.passes import cores_steps
from shardmath.operators.fft.problem import Problem
from shardmath.operators.fft.strategy import Exchange, Transform, choose
from shardmath.program import passes, steps
from shardmath.program.passes import Blocks

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
    programs = [program_of(problem(Slab.X, Slab.Y, kind=kind)) for kind in ("C2C", "R2C")]
    moved = [max(passes_of(program)[1].transfer.traffic.received) for program in programs]
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


@drawn(80)
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
    assert re.search(rf", {strategy.exchanges} exchanges?$", str(strategy), re.MULTILINE)
    check_blocks(given_problem, strategy, block)


def program_of(given_problem):
    return program_by(choose(given_problem), given_problem)


def program_by(strategy, given_problem):
    made, workspace = cores_steps(strategy, given_problem)
    return steps.Program(made, {}, workspace)


def passes_of(program):
    return [step for step in program.steps if not isinstance(step, steps.Synchronise)]


def check_blocks(given_problem, strategy, block):
    """Blocks cover each part once, and axes that are transformed are whole in them."""
    usual, passes.BLOCK_BYTES = passes.BLOCK_BYTES, block
    try:
        program = program_by(strategy, given_problem)
        assert passes_of(program)[-1].target == "out"
        for each in passes_of(program):
            axes = getattr(each, "axes", ())
            for rank in range(given_problem.source.size):
                count = np.zeros(each.transfer.dst.local_shape(rank), int)
                for cut in Blocks(each.transfer, rank, axes=axes, order="C", itemsize=8):
                    count[cut] += 1
                    assert all(cut[axis] == slice(0, count.shape[axis]) for axis in axes)
                assert (count == 1).all()
        check_order(program)
    finally:
        passes.BLOCK_BYTES = usual


def check_order(program):
    """No rank pulls what may not be written yet, or writes what a peer may still be pulling."""
    memory = {name: array.memory for name, array in program.workspace.items()}
    written, pulled = set(), set()
    for step in program.steps:
        if isinstance(step, steps.Synchronise):
            written, pulled = set(), set()
            continue
        source, target = (memory.get(name, name) for name in (step.source, step.target))
        if step.transfer.crosses:
            assert source not in written
            pulled.add(source)
        assert target not in pulled
        assert target == source or target not in written or not step.transfer.crosses
        written.add(target)
    assert not pulled


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
                for move in Move(0, 0, (run,)).clipped(0, lo, hi)
                for part in move.runs
                for i in range(part.count)
                for j in range(part.length)
            ]
            assert sorted(got) == sorted((d, s) for d, s in pairs.items() if lo <= d < hi)


def test_it_prints():
    given_problem = problem(Slab.X, Slab.Y)
    shown = FFT_OF_ANY_KIND.explain(given_problem, Machine("cpu", (0,) * 4))
    assert "transform axes 2, 1" in shown
    assert "bytes" in shown
    assert "predicted" in shown
    assert ", 1 exchange\n" in shown
    assert "\nC2C along 1, 2, operand to pass 1\nsynchronise" in shown
    assert "\ntake this rank's part from all ranks, C2C along 0, pass 1 to out" in shown
