"""Layouts of all ranks against the brute-force table of owners."""

import pytest
from geometry_cases import cases, indices, owned
from hypothesis import given

from draws import drawn
from shardmath.errors import BindDistributionError
from shardmath.geometry import BlockCyclic, Box, Layout, ProcessGrid, Replicated, Slab, Spans


@drawn(150)
@given(cases())
def test_against_the_table(case):
    layout = Layout.bind(case.distributions, case.shape)
    assert (layout.global_shape, layout.size, layout.ndim) == (
        case.shape,
        case.size,
        len(case.shape),
    )
    for index, ranks in case.table.items():
        assert layout.owners(index) == ranks
    assert layout.covers()
    assert layout.disjoint() == all(len(ranks) == 1 for ranks in case.table.values())
    turned = layout.transposed()
    assert turned.transposed() == layout
    for rank in range(case.size):
        assert turned.local_shape(rank) == layout.local_shape(rank)[::-1]
    for index in list(case.table)[::17]:
        assert turned.owners(index[::-1]) == case.table[index]
    sizes = {layout.local_shape(rank) for rank in range(case.size)}
    assert layout.uniform == (len(sizes) == 1)
    for axis, extent in enumerate(case.shape):
        parts = [owned(case, rank) for rank in range(case.size)]
        held = [len({index[axis] for index in part}) for part in parts if part]
        assert layout.is_whole(axis) == all(count == extent for count in held)
    if layout.is_replicated:
        assert all(owned(case, rank) == list(indices(case.shape)) for rank in range(case.size))


def test_derived_layouts():
    c = Layout.bind([BlockCyclic(ProcessGrid(shape=(2, 1)), (2, 3))] * 2, (7, 6))
    need = Layout.product((7, 4), [c.column(0), None], size=2)
    assert need.spans(1) == (Spans(2, 2, 4, 7), Spans.interval(0, 4))
    assert need.partitioned_axes == (0,) and need.covers() and need.disjoint()
    assert Layout.slab((7, 4), 3, axis=1) == Layout.bind([Slab.Y] * 3, (7, 4))
    assert Layout.replicated((7, 4), 3) == Layout.bind([Replicated()] * 3, (7, 4))
    assert hash(Layout.replicated((7, 4), 3)) == hash(Layout.bind([Replicated()] * 3, (7, 4)))
    assert Layout.replicated((7, 4), 3).is_replicated
    assert need.groups == ((0,), (1,)) and Layout.replicated((7, 4), 3).groups == ((0, 1, 2),)


def test_same_as_ignores_where_nothing_lies():
    one = Layout.bind([Box((0, 0), (2, 3)), Box((2, 0), (2, 3))], (2, 3))
    two = Layout.bind([Box((0, 0), (2, 3)), Box((0, 3), (2, 3))], (2, 3))
    assert one != two and one.same_as(two)
    assert not one.same_as(Layout.slab((2, 3), 2, axis=0))
    assert not one.same_as(Layout.replicated((2, 3), 3))


@pytest.mark.parametrize(
    ("layout", "line"),
    [
        (Layout.slab((8, 6), 4, axis=0), "8 x 6 on 4 ranks, axis 0 in 4"),
        (Layout.slab((7, 6), 4, axis=0), "7 x 6 on 4 ranks, axis 0 in 4, uneven"),
        (Layout.replicated((8,), 2), "8 on 2 ranks, replicated"),
        (
            Layout.bind([BlockCyclic(ProcessGrid(shape=(1, 2)), (2, 3))] * 2, (8, 12)),
            "8 x 12 on 2 ranks, axis 1 in 2, cyclic",
        ),
    ],
)
def test_described(layout, line):
    assert str(layout) == line


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([((0, 0), (5, 8)), ((4, 0), (8, 8))], "ranks 0 and 1 overlap at index .4, 0."),
        ([((0, 0), (4, 8)), ((4, 0), (8, 7))], "no rank owns index .4, 7."),
        ([((0, 0), (3, 8)), ((4, 0), (8, 8))], "no rank owns index .3, 0."),
        ([((0, 0), (8, 8)), ((7, 7), (8, 8))], "ranks 0 and 1 overlap at index .7, 7."),
        ([((0, 0), (8, 8)), ((8, 8), (8, 9))], "reaches past the global shape .8, 8."),
        ([((0,), (8,)), ((8,), (8,))], "has ndim 1, the global shape .8, 8. has 2"),
    ],
)
def test_boxes_that_do_not_tile(boxes, message):
    with pytest.raises(BindDistributionError, match=message):
        Layout.bind([Box(*box) for box in boxes], (8, 8))


@pytest.mark.parametrize(
    ("distributions", "message"),
    [
        ([Slab.X, Slab.X, Slab.Y], r"rank 2: Slab\(1\), but rank 0 has Slab\(0\)"),
        ([Slab.Y, Slab.X, Slab.X], r"rank 0: Slab\(1\), but rank 1 has Slab\(0\)"),
        ([Slab.X, Slab(0, 2), Box((0, 0), (8, 8))], r"rank 2: Box"),
        ([Slab.Z] * 3, "ndim 3 or more; this one has ndim 2"),
        ([Slab(0, 3)] * 3, "has ndim 3, the global shape .8, 8. has 2"),
        ([BlockCyclic(ProcessGrid(shape=(2, 1)), (1, 1))] * 3, "made for 2 ranks, not for 3"),
        ([Slab.X.bind((8, 9))] * 3, "bound to another shape"),
        ([Slab.X.bind((8, 8), size=2)] * 3, "bound to another size"),
    ],
)
def test_distributions_that_do_not_bind(distributions, message):
    with pytest.raises(BindDistributionError, match=message):
        Layout.bind(distributions, (8, 8))


def test_bad_arguments():
    layout = Layout.slab((8, 8), 2, axis=0)
    for index in [(8, 0), (0, -1), (0,)]:
        with pytest.raises(IndexError):
            layout.owners(index)
    with pytest.raises(ValueError, match=r"rank 1: part .0:9. does not fit"):
        Layout((8,), ((Spans.interval(0, 8),), (Spans.interval(0, 9),)))


def test_big_layouts_are_checked_without_enumeration():
    grid = ProcessGrid(shape=(4, 4), layout=ProcessGrid.Layout.COL_MAJOR)
    layout = Layout.bind([BlockCyclic(grid, (1, 3))] * 16, (10**9, 10**9))
    assert layout.covers() and layout.disjoint() and layout.elements == 10**18
    assert layout.owners((5, 7)) == (grid.rank((1, 2)),)
