"""Conversions: what converts describes the same parts, and what does not says why."""

import dataclasses
import itertools

import pytest
from geometry_cases import cases
from hypothesis import given
from hypothesis import strategies as st

from draws import drawn
from shardmath.base import current
from shardmath.errors import ConvertDistributionError
from shardmath.geometry import (
    BlockCyclic,
    BlockNonCyclic,
    Box,
    Distribution,
    ProcessGrid,
    Replicated,
    Slab,
)

KINDS = (Slab, Box, BlockCyclic, BlockNonCyclic, Replicated)
ROW, COL = ProcessGrid.Layout.ROW_MAJOR, ProcessGrid.Layout.COL_MAJOR
LINE = ProcessGrid(shape=(4, 1))
SQUARE = ProcessGrid(shape=(2, 2), layout=COL)


def part(distribution, rank, shape, size):
    """The part, with all empty parts equal."""
    made = distribution.part(rank, shape, size=size)
    return made if all(s.block for s in made) else None


@drawn(200)
@given(cases(), st.sampled_from(KINDS))
def test_a_conversion_moves_nothing(case, kind):
    for rank, given_ in enumerate(case.distributions):
        bound = given_.bind(case.shape, size=case.size, rank=rank)
        try:
            made = bound.to(kind)
        except ConvertDistributionError:
            assert not isinstance(bound, kind)
            continue
        assert isinstance(made, kind)
        assert made.binding == bound.binding
        ranks = [rank] if made.per_rank or bound.per_rank else range(case.size)
        for other in ranks:
            one = part(bound, other, case.shape, case.size)
            assert part(made, other, case.shape, case.size) == one


@drawn(100)
@given(cases(), st.sampled_from(KINDS))
def test_unbound_conversions_hold_for_every_shape(case, kind):
    given_ = case.distributions[0]
    held = current.default()
    current.set_default(dataclasses.make_dataclass("Context", ["rank", "size"])(0, case.size))
    try:
        made = given_.to(kind)
    except ConvertDistributionError:
        return
    finally:
        current.set_default(held)
    for extent in (0, 1, 2, 7, 8, 9):
        shape = (extent, extent + 1, extent + 2, 5)[: len(case.shape)]
        if made is not given_:
            for rank in range(case.size):
                one = part(given_, rank, shape, case.size)
                assert part(made, rank, shape, case.size) == one


@pytest.mark.parametrize(
    ("given_", "kind", "made"),
    [
        (Slab.X.bind((7, 3), size=4), BlockNonCyclic, BlockNonCyclic(LINE)),
        (Slab.X.bind((7, 3), size=4), BlockCyclic, BlockNonCyclic(LINE)),
        (Slab.Y.bind((7, 3), size=1), BlockNonCyclic, BlockNonCyclic(ProcessGrid(shape=(1, 1)))),
        (BlockNonCyclic(LINE).bind((7, 3)), Slab, Slab.X),
        (BlockNonCyclic(LINE), Slab, Slab(0, 2)),
        (BlockNonCyclic(ProcessGrid(shape=(1, 4))), Slab, Slab(1, 2)),
        (BlockCyclic(LINE, (2, 9)).bind((8, 3)), Slab, Slab.X),
        (BlockCyclic(LINE, (2, 1)).bind((7, 3)), Slab, Slab.X),
        (BlockCyclic(LINE, (2, 1)).bind((7, 3)), BlockNonCyclic, BlockNonCyclic(LINE)),
        (
            BlockCyclic(SQUARE, (4, 2), first_process=(1, 0)).bind((8, 4)),
            BlockNonCyclic,
            BlockNonCyclic(SQUARE, first_process=(1, 0)),
        ),
        (Box((4, 0), (6, 3)).bind((7, 3), size=4, rank=2), Slab, Slab.X),
        (Box((4, 0), (6, 3)).bind((7, 3), size=4, rank=2), BlockNonCyclic, BlockNonCyclic(LINE)),
        (Slab.X.bind((7, 3), size=4, rank=2), Box, Box((4, 0), (6, 3))),
        (Slab.X.bind((2, 3), size=4, rank=3), Box, Box((0, 0), (0, 3))),
        (BlockNonCyclic(SQUARE).bind((7, 3), rank=2), Box, Box((0, 2), (4, 3))),
        (BlockCyclic(SQUARE, (4, 2)).bind((7, 3), rank=2), Box, Box((0, 2), (4, 3))),
        (Replicated().bind((7, 3), size=1, rank=0), Box, Box((0, 0), (7, 3))),
        (Replicated().bind((7, 3), size=1), Slab, Slab.X),
        (Box((0, 0), (7, 3)).bind((7, 3), size=1, rank=0), Replicated, Replicated()),
        (BlockCyclic(ProcessGrid(shape=(1, 1)), (2, 2)), Replicated, Replicated(2)),
    ],
)
def test_converts(given_, kind, made):
    held = given_.binding
    if held is not None:
        made = made.bind(held.global_shape, size=held.size, rank=held.rank)
    assert given_.to(kind) == made
    assert type(given_.to(kind)) is type(made)


@pytest.mark.parametrize(
    ("given_", "kind", "message"),
    [
        (BlockCyclic(LINE, (1, 3)).bind((9, 3)), Slab, "no Slab describes the same layout"),
        (BlockCyclic(LINE, (2, 3)), Slab, "bound to a global shape it may have one"),
        (BlockCyclic(LINE, (2, 3)), BlockNonCyclic, "no BlockNonCyclic"),
        # Even parts of one of the two lengths that stand for every shape, but not of the other.
        (BlockCyclic(LINE, (16, 3)), Slab, "no Slab"),
        (BlockCyclic(LINE, (1, 3)).bind((9, 3), rank=0), Box, "rank 0 holds 3 blocks along axis 0"),
        (BlockNonCyclic(SQUARE).bind((8, 8)), Slab, "no Slab"),
        (BlockNonCyclic(LINE, first_process=(1, 0)).bind((8, 8)), Slab, "no Slab"),
        (BlockNonCyclic(ProcessGrid(process_array=[1, 0])).bind((8,)), Slab, "no Slab"),
        (Slab.X, Box, "not known: bind it with size="),
        (BlockNonCyclic(LINE), Box, "not bound to a global shape"),
        (Slab.X.bind((8, 8), size=4), Box, "bind it with rank="),
        (Slab.X.bind((8, 8), size=4), Replicated, "no Replicated"),
        (Replicated().bind((8, 8), size=4, rank=0), Box, "must not overlap"),
        (Replicated().bind((8, 8), size=4), Slab, "no Slab"),
        (Box((0, 0), (4, 4)).bind((8, 8), size=4, rank=0), Slab, "no Slab"),
        (Box((0, 0), (2, 8)).bind((8, 8), size=4, rank=1), Slab, "no Slab"),
        (Box((0, 0), (2, 8)).bind((8, 8), size=4), Slab, "bind it with rank="),
        (Box((0, 0), (2, 8)).bind((8, 8), rank=0), Slab, "bind it with size="),
    ],
)
def test_does_not_convert(given_, kind, message):
    with pytest.raises(ConvertDistributionError, match=message):
        given_.to(kind)


def test_unknown_axes_and_sizes():
    context = dataclasses.make_dataclass("Context", ["rank", "size"])(2, 4)
    current.override(context)
    try:
        with pytest.raises(ConvertDistributionError, match="give ndim="):
            Slab.X.to(BlockNonCyclic)
        assert Slab.X.to(BlockNonCyclic, ndim=2) == BlockNonCyclic(LINE)
        assert Slab.X.bind((7, 3)).to(Box) == Box((4, 0), (6, 3)).bind((7, 3), size=4)
        with pytest.raises(ConvertDistributionError, match="not bound to a global shape"):
            Slab.X.to(Box)
    finally:
        current.restore(context)


@pytest.mark.parametrize(
    ("given_", "ndim", "wide"),
    [
        (Slab.X, 3, Slab(0, ndim=3)),
        (Slab(0, ndim=2), 3, Slab(0, ndim=3)),
        (Slab.X.bind((7, 3)), 3, Slab.X.bind((7, 3, 1))),
        (Box((1, 2), (3, 4)), 3, Box((1, 2, 0), (3, 4, 1))),
        (Replicated().bind((7, 3)), 3, Replicated().bind((7, 3, 1))),
        (
            BlockCyclic(SQUARE, (2, 2), first_process=(0, 1)),
            3,
            BlockCyclic(
                ProcessGrid(shape=(2, 2, 1), layout=COL), (2, 2, 1), first_process=(0, 1, 0)
            ),
        ),
        (
            BlockNonCyclic(ProcessGrid(process_array=[[3, 0], [1, 2]])),
            3,
            BlockNonCyclic(ProcessGrid(process_array=[[[3], [0]], [[1], [2]]])),
        ),
    ],
)
def test_promotion(given_, ndim, wide):
    assert given_.to(type(given_), ndim=ndim) == wide


def test_same_kind_and_bad_arguments():
    for made in (Slab.X, Box((0,), (1,)), Replicated(), BlockNonCyclic(SQUARE)):
        assert made.to(type(made)) is made
        copied = made.to(type(made), copy=True)
        assert copied == made and copied is not made
    assert BlockNonCyclic(SQUARE).to(BlockCyclic) == BlockNonCyclic(SQUARE)
    for bad in (int, "Slab", None, Slab.X):
        with pytest.raises(ValueError, match="not a class of distributions"):
            Slab.X.to(bad)
    for made, ndim in ((Slab(0, ndim=2), 1), (Slab.Z, 2), (Box((0, 0), (1, 1)), 1), (Slab.X, "2")):
        with pytest.raises(ValueError, match=r"ndim|axes"):
            made.to(type(made), ndim=ndim)


def test_every_pair_of_kinds_answers():
    held = (8, 8)
    made = [
        Slab.X,
        Box((0, 0), (2, 8)),
        BlockCyclic(LINE, (2, 8)),
        BlockNonCyclic(LINE),
        Replicated(),
    ]
    for one, kind in itertools.product(made, KINDS):
        bound = one.bind(held, size=4, rank=0)
        same = isinstance(one, Replicated) == (kind is Replicated)
        if same:
            assert isinstance(bound.to(kind), Distribution)
        else:
            with pytest.raises(ConvertDistributionError):
                bound.to(kind)
