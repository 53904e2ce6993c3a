"""The global shape from the local ones, and who is named when they do not fit."""

import pytest
from geometry_cases import cases
from hypothesis import assume, given
from hypothesis import strategies as st

from draws import drawn
from shardmath.errors import BindDistributionError
from shardmath.geometry import (
    BlockCyclic,
    BlockNonCyclic,
    Box,
    ProcessGrid,
    Replicated,
    Slab,
    infer_global_shape,
)

SQUARE = ProcessGrid(shape=(2, 2), layout=ProcessGrid.Layout.ROW_MAJOR)


def local_shapes(case):
    pairs = enumerate(case.distributions)
    return [d.shape(rank, case.shape, size=case.size) for rank, d in pairs]


@drawn(200)
@given(cases())
def test_round_trip(case):
    shapes = local_shapes(case)
    assert infer_global_shape(case.distributions, shapes) == case.shape
    if not isinstance(case.distributions[0], Box):
        assert case.distributions[0].infer_global_shape(shapes) == case.shape


@drawn(100)
@given(cases(), st.data())
def test_what_is_inferred_fits_every_rank(case, data):
    shapes = [list(shape) for shape in local_shapes(case)]
    rank, axis = (
        data.draw(st.integers(0, case.size - 1)),
        data.draw(st.integers(0, len(case.shape) - 1)),
    )
    shapes[rank][axis] += data.draw(st.integers(1, 3))
    assume(not isinstance(case.distributions[0], Box))
    try:
        shape = infer_global_shape(case.distributions, shapes)
    except BindDistributionError as error:
        assert str(error).startswith("rank ")
    else:
        pairs = enumerate(case.distributions)
        assert shapes == [list(d.shape(r, shape, size=case.size)) for r, d in pairs]


@pytest.mark.parametrize(
    ("distributions", "shapes", "message"),
    [
        ([Slab.X] * 3, [(3, 4), (3, 4), (2, 5)], r"rank 2: local shape .2, 5., expected .2, 4."),
        ([Slab.X] * 3, [(3, 5), (3, 4), (2, 4)], r"rank 0: local shape .3, 5., expected .3, 4."),
        ([Slab.X] * 3, [(3, 4), (2, 4), (3, 4)], r"rank 1: local shape .2, 4., expected .3, 4."),
        ([Slab.X] * 3, [(3, 4), (3, 4), (2,)], r"rank 2: local shape .2,. has ndim 1, expected 2"),
        ([Slab(0, 3)] * 2, [(3, 4), (3, 4)], r"rank 0: local shape .3, 4. has ndim 2, expected 3"),
        ([Slab.X, Slab.Y], [(3, 4), (3, 4)], r"rank 1: Slab.1., but rank 0 has Slab.0."),
        ([Replicated()] * 3, [(3, 4), (3, 3), (3, 4)], r"rank 1: local shape .3, 3."),
        (
            [BlockNonCyclic(SQUARE)] * 4,
            [(2, 2), (2, 2), (2, 2), (2, 1)],
            r"rank 3: .*expected .2, 2.",
        ),
        ([BlockCyclic(SQUARE, (2, 2))] * 4, [(2, 2), (2, 1), (1, 2), (2, 1)], r"rank 3: .*.1, 1."),
        ([BlockCyclic(SQUARE, (2, 2))] * 2, [(2, 2), (2, 1)], "made for 4 ranks, not for 2"),
        (
            [Box((0, 0), (2, 4)), Box((2, 0), (5, 4))],
            [(2, 4), (2, 4)],
            r"rank 1: .*expected .3, 4.",
        ),
        ([Slab.X.bind((7, 4))] * 2, [(4, 4), (4, 4)], r"rank 1: .*expected .3, 4."),
        ([Slab.Z] * 2, [(4, 4), (4, 4)], "ndim 3 or more; this one has ndim 2"),
        (
            [Slab.X] * 2,
            [(4, 4), (4, 4.0)],
            r"rank 1: local shape must be .* at least 0, not .4, 4.0.",
        ),
        ([Slab.X] * 2, [(4, 4)], "2 distributions and 1 local shapes"),
        ([], [], "0 distributions and 0 local shapes"),
    ],
)
def test_named(distributions, shapes, message):
    with pytest.raises(ValueError, match=message):
        infer_global_shape(distributions, shapes)


def test_a_box_cannot_infer_alone():
    with pytest.raises(RuntimeError, match="knows one rank only"):
        Box((0,), (1,)).infer_global_shape([(1,)])


def test_first_ranks_hold_more():
    assert Slab.X.infer_global_shape([(3, 4), (3, 4), (2, 4)]) == (8, 4)
    assert Slab.Y.infer_global_shape([(0, 1), (0, 0)]) == (0, 1)
    first = BlockNonCyclic(SQUARE, first_process=(1, 1))
    assert first.infer_global_shape([(1, 2), (1, 3), (2, 2), (2, 3)]) == (3, 5)
