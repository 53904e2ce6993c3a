"""Plans and copies without ranks: local arrays side by side in this process."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import redistribution_cases as cases

from arrangements import part_of
from copying import copy_array, copy_moves
from shardmath.geometry import (
    BlockCyclic,
    Layout,
    Pattern,
    ProcessGrid,
    Replicated,
    Slab,
    moves,
)
from shardmath.program.passes import Blocks
from shardmath.redistribution import TransferPlan, lowered
from shardmath.redistribution.bound_copies import pairs

COLUMNS = ProcessGrid(shape=(1, 2))
ROWS = ProcessGrid(shape=(2, 1))
PAIRS = {
    "slabs": (Slab.X, Slab.Y, (8, 9), Pattern.ALL_TO_ALL),
    "same": (Slab.X, Slab.X, (8, 9), Pattern.LOCAL),
    "gather": (Slab.X, Replicated(), (7, 9), Pattern.ALL_GATHER),
    "slice": (Replicated(), Slab.Y, (7, 9), Pattern.LOCAL),
    "cyclic rows": (BlockCyclic(ROWS, (2, 3)), Slab.X, (40, 9), Pattern.ALL_TO_ALL),
    "cyclic columns": (Slab.Y, BlockCyclic(COLUMNS, (2, 3)), (7, 40), Pattern.GENERAL),
    "cyclic to cyclic": (
        BlockCyclic(ROWS, (2, 3)),
        BlockCyclic(ROWS, (3, 3)),
        (40, 9),
        Pattern.GENERAL,
    ),
    "empty": (Slab.X, Slab.Y, (0, 9), Pattern.LOCAL),
    "one element": (Slab.X, Slab.Y, (1, 1), Pattern.LOCAL),
}


def plan_of(name, itemsize=8):
    source, target, shape, _ = PAIRS[name]
    layouts = [Layout.bind([each] * 2, shape) for each in (source, target)]
    return TransferPlan(*layouts, itemsize)


@pytest.mark.parametrize("name", PAIRS)
def test_what_a_plan_says(name):
    plan = plan_of(name)
    assert plan.pattern is PAIRS[name][3]
    assert plan.crosses == (plan.pattern is not Pattern.LOCAL)
    assert plan == plan_of(name)
    assert plan != plan_of(name, itemsize=4)
    text = plan.explain()
    assert len(text.splitlines()) == 3
    assert plan.pattern.value in text
    assert f"{max(plan.traffic.received):,}" in text


@pytest.mark.parametrize("name", PAIRS)
def test_what_peers_read_is_bounded_tightly(name):
    plan = plan_of(name)
    for rank in range(2):
        read = np.zeros(plan.src.local_shape(rank), bool)
        for move in plan.into(1 - rank):
            if move.src == rank:
                axes = [
                    [
                        run.src_start + i * run.src_step + j
                        for i in range(run.count)
                        for j in range(run.length)
                    ]
                    for run in move.runs
                ]
                read[np.ix_(*axes)] = True
        found = plan.read_by_peers(rank)
        assert (found is None) == (not read.any()) == (plan.traffic.sent[rank] == 0)
        if found is not None:
            nonzero = [(int(at.min()), int(at.max()) + 1) for at in np.nonzero(read)]
            assert list(found) == nonzero


def test_a_plan_changes_neither_shape_nor_ranks():
    with pytest.raises(ValueError, match="neither"):
        TransferPlan(Layout.slab((8, 9), 2, axis=0), Layout.slab((9, 8), 2, axis=0), 8)
    with pytest.raises(ValueError, match="neither"):
        TransferPlan(Layout.slab((8, 9), 2, axis=0), Layout.slab((8, 9), 3, axis=0), 8)


def test_copies_are_kept_until_strides_change():
    blocks = Blocks(plan_of("slabs"), 1, order="C", itemsize=8, cut=False)
    strides = {0: (72, 8), 1: (72, 8)}
    first = blocks.copies(0, strides, (40, 8))
    assert blocks.copies(0, dict(strides), (40, 8)) is first
    assert blocks.copies(0, strides, (8, 64)) is not first
    assert blocks.copies(0, {0: (80, 8), 1: (72, 8)}, (40, 8)) is not first
    assert [copy.src for copy in blocks.copies(0, strides, (32, 8))] == [1, 0]


def test_whole_blocks_become_one_unit_and_cyclic_blocks_one_copy():
    rows = Layout.slab((8, 16), 2, axis=0)
    everything = Layout.replicated((8, 16), 2)
    (move, _) = moves(rows, everything, dst_rank=0)
    copy = lowered(move, 8, (128, 8), (128, 8))
    assert (copy.unit, copy.shape, copy.dst_offset) == (4 * 16 * 8, (), 0)
    cyclic = Layout.bind([BlockCyclic(COLUMNS, (8, 2))] * 2, (8, 16))
    (_, move) = moves(cyclic, everything, dst_rank=0)
    copy = lowered(move, 8, (64, 8), (128, 8))
    assert (copy.unit, copy.shape, copy.dst_offset) == (16, (32,), 16)
    assert (copy.src_strides, copy.dst_strides) == ((16,), (32,))


def laid_out(shape, dtype, order):
    """Uninitialized memory whose axes are nested in `order`, the last the densest."""
    memory = np.empty([shape[axis] for axis in order], dtype)
    return memory.transpose(np.argsort(order))


SHAPES = [(300, 290), (70, 3, 200), (5, 130, 140), (2, 9, 64, 33)]


@pytest.mark.parametrize(
    "dtype", ["u1", "u2", "f4", "f8", "c16", "V3", "V12", "V40", "V64", "V200"]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_copies_between_any_two_orders_of_axes(shape, dtype):
    array = cases.global_array(shape, dtype)
    orders = list(itertools.permutations(range(len(shape))))
    for one, two in itertools.product(orders[:: max(1, len(orders) // 6)], repeat=2):
        source, target = laid_out(shape, dtype, one), laid_out(shape, dtype, two)
        source[...] = array
        copy_array(source, target)
        assert target.tobytes() == array.tobytes(), (one, two)


@pytest.mark.parametrize("dtype", ["u1", "f8", "V12"])
def test_copies_at_negative_and_wide_strides_touch_nothing_else(dtype):
    array = cases.global_array((150, 170), dtype)
    for one, two in itertools.product(["C", "F", "strided", "reversed"], repeat=2):
        source, _ = cases.stored(array, one, np.empty)
        for operand, target_order in ((source, two), (source.T, two)):
            want = array if operand is source else array.T
            target, whole = cases.stored(np.zeros_like(want), target_order, np.empty)
            copy_array(operand, target)
            assert target.tobytes() == want.tobytes(), (one, two)
            assert cases.untouched(target, whole)


@pytest.mark.parametrize("dtype", ["i2", "f4", "c16"])
def test_moves_can_add_in_their_order(dtype):
    plan = plan_of("cyclic rows")
    array = np.arange(40 * 9).reshape(40, 9).astype(dtype)
    locals_ = [np.array(part_of(array, PAIRS["cyclic rows"][0], rank, 2)) for rank in range(2)]
    for rank in range(2):
        want = part_of(array, Slab.X, rank, 2)
        got, whole = cases.stored(np.ones_like(want), "strided", np.empty)
        for theirs, own in pairs(plan.into(rank), locals_.__getitem__, got):
            np.add(own, theirs, out=own)
        assert (got == want + 1).all()
        assert cases.untouched(got, whole)


def test_the_own_part_comes_first_and_then_the_next_rank():
    layout = Layout.slab((8, 3), 4, axis=0)
    array = cases.global_array((8, 3), "f8")
    parts = [array[2 * rank : 2 * rank + 2] for rank in range(4)]
    plan = TransferPlan(layout, Layout.replicated((8, 3), 4), 8)
    blocks = Blocks(plan, 2, order="C", itemsize=8, cut=False)
    copies = blocks.copies(0, dict.fromkeys(range(4), (24, 8)), (24, 8))
    assert [copy.src for copy in copies] == [2, 3, 0, 1]
    got = np.empty((8, 3))
    copy_moves(
        moves(layout, Layout.replicated((8, 3), 4), dst_rank=2), parts.__getitem__, got, rank=2
    )
    assert got.tobytes() == array.tobytes()


@pytest.mark.parametrize(("itemsize", "length"), [(8, 40), (8, 40_000), (16, 5000)])
@pytest.mark.parametrize("order", ["C", "F", "reversed"])
def test_pieces_hold_what_moves(itemsize, length, order):
    """All that a plan moves between two ranks lies in the pieces, and not much else."""
    shape = (6, 5, length)
    plan = TransferPlan(*(Layout.slab(shape, 3, axis=axis) for axis in (0, 1)), itemsize)
    for rank, src in itertools.product(range(3), repeat=2):
        local = np.zeros(plan.src.local_shape(src), f"V{itemsize}", "F" if order == "F" else "C")
        if order == "reversed":
            local = local[::-1, :, ::-1]
        wanted = np.zeros(local.shape, bool)
        for move in plan.into(rank):
            if move.src == src:
                cut = [slice(run.src_start, run.src_start + run.length) for run in move.runs]
                wanted[tuple(cut)] = True
        offsets = sum(
            np.arange(n).reshape([-1 if i == axis else 1 for i in range(3)]) * step
            for axis, (n, step) in enumerate(zip(local.shape, local.strides, strict=True))
        )
        found = plan.pieces(rank, src, local.strides)
        held = np.zeros(local.shape, bool)
        for low, high in found:
            held |= (offsets >= low) & (offsets + itemsize <= high)
        assert held[wanted].all()
        moved = int(wanted.sum()) * itemsize
        if length == 40_000 and order != "F":
            assert sum(high - low for low, high in found) == moved
