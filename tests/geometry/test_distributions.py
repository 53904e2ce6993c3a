"""Distributions: parts against the table, binding, what is refused, and what they are as values."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
from geometry_cases import cases, owned
from hypothesis import given
from hypothesis import strategies as st

from draws import drawn
from shardmath.base import current
from shardmath.errors import BindDistributionError
from shardmath.geometry import (
    BlockCyclic,
    BlockNonCyclic,
    Box,
    Distribution,
    ProcessGrid,
    Replicated,
    Slab,
    Spans,
    decode,
)

ROW = ProcessGrid.Layout.ROW_MAJOR
GRID = ProcessGrid(shape=(2, 3), layout=ROW)


@dataclasses.dataclass
class FakeContext:
    rank: int
    size: int


@pytest.fixture
def context():
    made = FakeContext(rank=1, size=4)
    current.override(made)
    yield made
    current.restore(made)


@drawn(150)
@given(cases())
def test_against_the_table(case):
    for rank, distribution in enumerate(case.distributions):
        bound = distribution.bind(case.shape, size=case.size, rank=rank)
        mine = owned(case, rank)
        ranges = distribution.index_ranges(rank, case.shape, size=case.size)
        axes = [[i for lo, hi in axis for i in range(lo, hi)] for axis in ranges]
        assert tuple(len(axis) for axis in axes) == bound.shape(rank)
        assert bound.index_ranges(rank) == ranges
        assert bound.shape(rank) == distribution.shape(rank, case.shape, size=case.size)
        lone = [len(axis) < 2 or all(hi - lo == 1 for lo, hi in axis) for axis in ranges]
        if all(lone):
            slices = distribution.slices(rank, case.shape, size=case.size)
            every = zip(slices, case.shape, strict=True)
            assert [list(range(extent)[piece]) for piece, extent in every] == axes
            assert bound.slices(rank) == slices
        else:
            with pytest.raises(ValueError, match=f"axis {lone.index(False)}.*no slice"):
                bound.slices(rank)
        for axis, held in enumerate(axes):
            # An empty part may still name indices along some axes.
            if mine:
                assert held == sorted({index[axis] for index in mine})
        assert np.prod([len(axis) for axis in axes]) == len(mine)
        for index in list(case.table)[::23]:
            ranks = case.table[index]
            if isinstance(distribution, Box) and ranks != (rank,):
                with pytest.raises(RuntimeError, match="does not know which rank"):
                    bound.owner(index)
            elif isinstance(distribution, Replicated):
                assert bound.owner(index) == ranks
            else:
                assert bound.owner(index) == ranks[0]


@drawn(100)
@given(cases(), st.booleans())
def test_values(case, bind):
    made = case.distributions[-1]
    hash(made)  # which a bound copy must not keep
    if bind:
        made = made.bind(case.shape, size=case.size, rank=case.size - 1)
    again = eval(repr(made))
    for other in (again, made.copy(), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert other == made and hash(other) == hash(made) and repr(other) == repr(made)
        assert other is not made or other is again  # `bind` gives one object each time
    assert decode(made.encode()) == made and type(decode(made.encode())) is type(made)
    assert "\n" not in repr(made)
    for name in ("binding", "ndim", "anything"):
        with pytest.raises((AttributeError, TypeError)):
            setattr(made, name, None)


@pytest.mark.parametrize(
    ("made", "printed"),
    [
        (Slab.X, "Slab(0)"),
        (Slab(1, ndim=2), "Slab(1, ndim=2)"),
        (Slab.Z.bind((4, 4, 4), size=2, rank=1), "Slab(2, ndim=3).bind((4, 4, 4), size=2, rank=1)"),
        (Box((0, 2), (4, 4)), "Box((0, 2), (4, 4))"),
        (Replicated(), "Replicated()"),
        (Replicated(2).bind((3, 3)), "Replicated(ndim=2).bind((3, 3))"),
        (
            BlockCyclic(GRID, [2, 3], first_process=(1, 2)),
            "BlockCyclic(ProcessGrid(shape=(2, 3), layout=ProcessGrid.Layout.ROW_MAJOR), (2, 3), "
            "first_process=(1, 2))",
        ),
        (
            BlockNonCyclic(ProcessGrid(shape=(4,))).bind((9,)),
            "BlockNonCyclic(ProcessGrid(shape=(4,))).bind((9,), size=4)",
        ),
    ],
)
def test_printed(made, printed):
    assert repr(made) == str(made) == printed
    assert eval(printed) == made


def test_kinds_differ():
    kinds = [
        Slab.X,
        Slab.Y,
        Slab(0, ndim=2),
        Slab.X.bind((4, 4)),
        Slab.X.bind((4, 4), size=2),
        Box((0, 0), (4, 4)),
        BlockCyclic(GRID, (1, 1)),
        BlockCyclic(GRID, (1, 2)),
        BlockCyclic(GRID, (1, 1), first_process=(1, 0)),
        BlockNonCyclic(GRID),
        Replicated(),
        Replicated(2),
    ]
    assert len(set(kinds)) == len(kinds)
    assert BlockCyclic(GRID, (1, 1)) == BlockCyclic(GRID, [np.int32(1), 1], first_process=(0, 0))
    assert [s.name for s in (Slab.X, Slab.Y, Slab.Z, Slab(3))] == ["X", "Y", "Z", "3"]
    assert [s.partition_dim for s in (Slab.X, Slab.Y, Slab.Z)] == [0, 1, 2]


def test_fields():
    box = Box([1, 2], [4, 2])
    lower, upper = box
    assert (lower, upper, box.box_shape, box.ndim) == ((1, 2), (4, 2), (3, 0), 2)
    assert (box[0], box[1], len(box)) == ((1, 2), (4, 2), 2)
    with pytest.raises(IndexError):
        box[2]
    cyclic = BlockCyclic(GRID, (2, 3))
    assert (cyclic.ndim, cyclic.grid_size, cyclic.first_process) == (2, 6, (0, 0))
    uneven = BlockNonCyclic(GRID)
    assert isinstance(uneven, BlockCyclic)
    assert uneven.block_sizes == () and uneven.bind((7, 7)).block_sizes == (4, 3)
    assert Slab.X.ndim is None and Slab.X.bind((4, 4)).ndim == 2
    assert Slab.X.is_bound is False and Slab.X.bind((4, 4)).is_bound is True
    with pytest.raises(TypeError):
        Distribution()


def test_parts():
    assert Slab.Y.part(1, (4, 7), size=3) == (Spans.interval(0, 4), Spans.interval(3, 5))
    cyclic = BlockCyclic(GRID, (2, 3), first_process=(1, 0))
    assert cyclic.part(4, (9, 20), size=6) == (Spans(0, 2, 4, 9), Spans(3, 3, 9, 20))
    three = ProcessGrid(shape=(2, 1, 2), layout=ROW)
    assert BlockCyclic(three, (1, 2, 3)).shape(3, (5, 5, 5)) == (2, 5, 2)
    assert Slab.X.shape(np.int64(0), np.array([7, 3]), size=np.int8(4)) == (2, 3)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Slab(-1), ValueError),
        (lambda: Slab(1.0), ValueError),
        (lambda: Slab("X"), ValueError),
        (lambda: Slab(True), ValueError),
        (lambda: Slab(2, ndim=2), ValueError),
        (lambda: Slab(0, ndim=0), ValueError),
        (lambda: Box((0, 0), (1,)), ValueError),
        (lambda: Box((0, 1), (1, 0)), ValueError),
        (lambda: Box((-1,), (1,)), ValueError),
        (lambda: Box((0.0,), (1,)), ValueError),
        (lambda: Box(0, 1), ValueError),
        (lambda: BlockCyclic(GRID, (0, 1)), ValueError),
        (lambda: BlockCyclic(GRID, (-2, 1)), ValueError),
        (lambda: BlockCyclic(GRID, (2,)), ValueError),
        (lambda: BlockCyclic(GRID, 2), ValueError),
        (lambda: BlockCyclic(GRID, None), ValueError),
        (lambda: BlockCyclic(GRID, (2, 2.5)), ValueError),
        (lambda: BlockCyclic(GRID, (2, 2), first_process=(0,)), ValueError),
        (lambda: BlockCyclic(GRID, (2, 2), first_process=(2, 0)), ValueError),
        (lambda: BlockCyclic(GRID, (2, 2), first_process=(0, -1)), ValueError),
        (lambda: BlockNonCyclic(GRID, first_process="00"), ValueError),
        (lambda: BlockCyclic((2, 3), (2, 2)), TypeError),
        (lambda: BlockNonCyclic(None), TypeError),
        (lambda: Replicated(-1), ValueError),
        # shape
        (lambda: Slab.X.shape(4, (8, 8), size=4), ValueError),
        (lambda: Slab.X.shape(-1, (8, 8), size=4), ValueError),
        (lambda: Slab.X.shape(1.5, (8, 8), size=4), ValueError),
        (lambda: Slab.X.shape(None, (8, 8), size=4), ValueError),
        (lambda: Slab.X.shape(0, (8, -8), size=4), ValueError),
        (lambda: Slab.X.shape(0, (8, 8), size=0), ValueError),
        (lambda: Slab.X.bind((8, 8)).shape(0, (8, 9), size=4), ValueError),
        (lambda: Slab.X.bind((8, 8), size=4).shape(0, size=3), ValueError),
        (lambda: Slab.X.shape(0, size=4), RuntimeError),
        (lambda: Slab.X.shape(0, (8, 8)), RuntimeError),
        (lambda: Slab.X.bind((8, 8)).shape(0), RuntimeError),
        (lambda: Replicated().index_ranges(0, (8, 8)), RuntimeError),
        (lambda: Replicated().slices(0, (8, 8)), RuntimeError),
        (lambda: BlockCyclic(GRID, (1, 1)).shape(0), RuntimeError),
        (lambda: BlockCyclic(GRID, (1, 1)).shape(6, (8, 8)), ValueError),
        (lambda: BlockCyclic(GRID, (1, 1)).shape(0, (8, 8), size=4), ValueError),
        (lambda: Box((0,), (4,)).bind((8,), rank=1).shape(0), RuntimeError),
        (lambda: Box((0,), (4,)).shape(-1), ValueError),
        (lambda: Box((0,), (4,)).shape(3, size=3), ValueError),
        (lambda: Box((0,), (4,)).shape(0, (3,)), ValueError),
        (lambda: Box((0,), (4,)).owner((0,)), RuntimeError),
        (lambda: Slab.X.owner((8, 0), (8, 8), size=2), IndexError),
        (lambda: Replicated().owner((0, -1), (8, 8), size=2), IndexError),
        # binding
        (lambda: Slab.X.bind((8, 8)).bind((8, 9)), BindDistributionError),
        (lambda: Slab.X.bind((8, 8), size=2).bind((8, 8), size=3), BindDistributionError),
        (lambda: Slab.X.bind((8, 8), rank=2).bind((8, 8), rank=3), BindDistributionError),
        (lambda: Slab.X.bind((8, 8), size=2, rank=2), BindDistributionError),
        (lambda: Slab.Z.bind((8, 8)), BindDistributionError),
        (lambda: Slab(0, ndim=3).bind((8, 8)), BindDistributionError),
        (lambda: Slab.X.bind((8, "8")), BindDistributionError),
        (lambda: Slab.X.bind(None), BindDistributionError),
        (lambda: Box((0, 0), (4, 9)).bind((8, 8)), BindDistributionError),
        (lambda: Box((0,), (4,)).bind((8, 8)), BindDistributionError),
        (lambda: BlockCyclic(GRID, (1, 1)).bind((8, 8), size=4), BindDistributionError),
        (lambda: BlockNonCyclic(GRID).bind((8, 8, 8)), BindDistributionError),
    ],
)
def test_refused(make, error):
    with pytest.raises(error):
        make()


def test_messages_say_what_to_do():
    with pytest.raises(RuntimeError, match=r"call shardmath.initialize, or give size="):
        Slab.X.shape(0, (8, 8))
    with pytest.raises(RuntimeError, match=r"Slab\(0\) is not bound: give global_shape"):
        Slab.X.shape(0, size=3)
    with pytest.raises(RuntimeError, match="is the box of rank 1; the box of rank 0 is not known"):
        Box((0,), (4,)).bind((8,), rank=1).shape(0)


def test_the_context_fills_in(context):
    assert Slab.X.shape(3, (10, 2)) == (2, 2)
    assert Slab.X.bind((10, 2)).shape(1) == (3, 2)
    assert Replicated().owner((0,), (3,)) == (0, 1, 2, 3)
    assert BlockCyclic(GRID, (1, 1)).shape(5, (4, 4)) == (2, 1)
    box = Box((3, 0), (6, 2))
    assert box.shape(1) == (3, 2) and box.owner((4, 1)) == 1
    with pytest.raises(RuntimeError, match="the box of rank 1"):
        box.shape(0)


def test_binding_again_may_add():
    bound = Slab.X.bind((10, 2))
    assert bound.bind((10, 2)) == bound
    assert bound.bind((10, 2), size=4).bind((10, 2), rank=1).shape(1) == (3, 2)
    assert Slab.X.binding is None
