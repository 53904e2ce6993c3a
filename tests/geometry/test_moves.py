"""Moves between layouts, carried out element by element on dictionaries."""

import itertools

import pytest
from geometry_cases import case_pairs, indices, owned, spans
from hypothesis import given
from hypothesis import strategies as st

from counted import lines_of
from draws import drawn
from shardmath.geometry import (
    BlockCyclic,
    Box,
    Layout,
    Pattern,
    ProcessGrid,
    Replicated,
    Slab,
    Spans,
    bytes_moved,
    classify,
    common_elements,
    moves,
)

ROW = ProcessGrid.Layout.ROW_MAJOR


def positions(run):
    for i in range(run.count):
        for j in range(run.length):
            yield run.src_start + i * run.src_step + j, run.dst_start + i * run.dst_step + j


def local_array(layout, rank):
    """{position in the local array: global index}, from the ranges of each axis."""
    axes = [[i for lo, hi in s.ranges() for i in range(lo, hi)] for s in layout.spans(rank)]
    shape = [range(len(axis)) for axis in axes]
    return dict(zip(itertools.product(*shape), itertools.product(*axes), strict=True))


def carry_out(src, dst, planned):
    """Perform the moves: {dst rank: {position: global index written there}}."""
    held = [local_array(src, rank) for rank in range(src.size)]
    written = [{} for _ in range(dst.size)]
    for move in planned:
        count = 0
        for cell in itertools.product(*(list(positions(run)) for run in move.runs)):
            source = tuple(s for s, _ in cell)
            target = tuple(d for _, d in cell)
            assert target not in written[move.dst], "written twice"
            written[move.dst][target] = held[move.src][source]
            count += 1
        assert count == move.elements > 0
    return written


@drawn(100)
@given(case_pairs())
def test_every_element_arrives_once(pair):
    before, after = pair
    src = Layout.bind(before.distributions, before.shape)
    dst = Layout.bind(after.distributions, after.shape)
    planned = moves(src, dst)
    written = carry_out(src, dst, planned)
    for rank in range(dst.size):
        assert written[rank] == local_array(dst, rank)
        assert sorted(written[rank].values()) == owned(after, rank)
    # What one rank computes for itself is its share of the whole.
    for rank in range(src.size):
        assert moves(src, dst, dst_rank=rank) == tuple(m for m in planned if m.dst == rank)
        assert moves(src, dst, src_rank=rank) == tuple(m for m in planned if m.src == rank)
    # What a rank has, it takes from itself; traffic is what crosses.
    sent, received = [0] * src.size, [0] * src.size
    for move in planned:
        if move.src != move.dst:
            sent[move.src] += 3 * move.elements
            received[move.dst] += 3 * move.elements
    assert bytes_moved(src, dst, 3) == (tuple(sent), tuple(received))
    held, wanted = ([set(owned(case, r)) for r in range(src.size)] for case in pair)
    assert common_elements(src, dst) == [[len(one & two) for two in wanted] for one in held]
    for rank in range(src.size):
        missing = set(owned(after, rank)) - set(owned(before, rank))
        assert received[rank] == 3 * len(missing)
    assert (classify(src, dst) is Pattern.LOCAL) == (sum(received) == 0)


@st.composite
def overlapping(draw):
    """Two layouts of arbitrary parts that overlap anyhow; the first need not cover the array."""
    ndim = draw(st.integers(1, 3))
    shape = tuple(draw(st.integers(0, (30, 14, 7)[ndim - 1])) for _ in range(ndim))
    size = draw(st.integers(1, 4))

    def layout():
        return Layout(
            shape, tuple(tuple(draw(spans(extent)) for extent in shape) for _ in range(size))
        )

    src = layout()
    if draw(st.booleans()):
        whole = tuple(Spans.interval(0, extent) for extent in shape)
        src = Layout(shape, (*src.parts[:-1], whole))
    return src, layout()


@drawn(80)
@given(overlapping())
def test_parts_that_overlap_anyhow(pair):
    src, dst = pair
    held = [set(local_array(src, rank).values()) for rank in range(src.size)]
    wanted = [local_array(dst, rank) for rank in range(dst.size)]
    owners = {
        index: [r for r, h in enumerate(held) if index in h] for index in indices(dst.global_shape)
    }
    assert src.covers() == all(owners.values())
    assert src.disjoint() == all(len(ranks) == 1 for ranks in owners.values())
    for index, ranks in owners.items():
        assert src.owners(index) == tuple(ranks)
    if any(not owners[index] for want in wanted for index in want.values()):
        with pytest.raises(ValueError, match=r"rank \d needs"):
            moves(src, dst)
        return
    planned = moves(src, dst)
    assert carry_out(src, dst, planned) == wanted
    for rank in range(dst.size):
        taken = sum(m.elements for m in planned if m.src == m.dst == rank)
        assert taken == len(held[rank] & set(wanted[rank].values()))
        assert moves(src, dst, src_rank=rank) == tuple(m for m in planned if m.src == rank)


def test_owners_share_the_load():
    # Two copies of four quarters, on ranks {0, 4}, {1, 5}, {2, 6}, {3, 7}: everyone wants it all.
    quarters = [Spans.even(8, 4, rank % 4) for rank in range(8)]
    src = Layout.product((8,), [quarters], size=8)
    dst = Layout.replicated((8,), 8)
    sent, received = bytes_moved(src, dst, 1)
    assert sent == received == (6,) * 8


GRID = ProcessGrid(shape=(2, 4), layout=ROW)


def blocks_to_rows(extent):
    src = Layout.bind([BlockCyclic(GRID, (256, 256))] * 8, (extent, extent))
    return moves(src, Layout.slab((extent, extent), 8, axis=0), dst_rank=3)


def test_planning_for_one_rank_costs_no_more_for_more_blocks():
    planned, lines = lines_of(lambda: blocks_to_rows(16384))
    assert lines < 2 * lines_of(lambda: blocks_to_rows(2048))[1]
    assert len(planned) == 8 and sum(m.elements for m in planned) == 16384 * 2048
    assert str(planned[0]) == (
        "0 -> 3: 4 x 256 at 3072+256i -> 0+512i, 16 x 256 at 0+256i -> 0+1024i"
    )


def dealt(extent):
    rows = ProcessGrid(shape=(8, 1))
    return [Layout.bind([BlockCyclic(rows, (n, 1))] * 8, (extent, 3)) for n in (1, 3)]


def test_elements_dealt_one_by_one_are_few_moves():
    src, dst = dealt(10**9)
    planned, lines = lines_of(lambda: moves(src, dst, dst_rank=5))
    assert lines < 2 * lines_of(lambda: moves(*dealt(1000), dst_rank=5))[1]
    assert sum(m.elements for m in planned) == dst.spans(5)[0].length * 3
    assert len(planned) <= 8 * 6
    assert src.covers() and src.disjoint()


X, Y = (Layout.slab((8, 9), 3, axis=axis) for axis in (0, 1))
ALL = Layout.replicated((8, 9), 3)
ONE = Layout.bind([Box((0, 0), (0, 9)), Box((0, 0), (8, 9)), Box((8, 0), (8, 9))], (8, 9))
DEALT = Layout.bind([BlockCyclic(ProcessGrid(shape=(3, 1)), (1, 9))] * 3, (8, 9))


@pytest.mark.parametrize(
    ("src", "dst", "pattern"),
    [
        (X, X, Pattern.LOCAL),
        (ALL, Y, Pattern.LOCAL),
        (X, Y, Pattern.ALL_TO_ALL),
        (X, DEALT, Pattern.ALL_TO_ALL),
        (X, ALL, Pattern.ALL_GATHER),
        (ONE, ALL, Pattern.ALL_GATHER),
        (X, ONE, Pattern.GATHER),
        (ONE, Y, Pattern.SCATTER),
        (
            X,
            Layout.product((8, 9), [X.column(0)[:2] + Y.column(0)[:1], None], size=3),
            Pattern.GENERAL,
        ),
        (
            Layout.bind([BlockCyclic(ProcessGrid(shape=(3, 1)), (2, 9))] * 3, (80, 9)),
            Layout.bind([BlockCyclic(ProcessGrid(shape=(3, 1)), (3, 9))] * 3, (80, 9)),
            Pattern.GENERAL,
        ),
        (Layout.replicated((8, 9), 1), Layout.slab((8, 9), 1, axis=0), Pattern.LOCAL),
        (Layout.slab((0, 9), 3, axis=0), Layout.slab((0, 9), 3, axis=1), Pattern.LOCAL),
    ],
)
def test_patterns(src, dst, pattern):
    assert classify(src, dst) is pattern


def test_different_arrays():
    with pytest.raises(ValueError, match="different arrays: 8 x 9 on 3 ranks, axis 0 in 3"):
        moves(X, Layout.slab((8, 8), 3, axis=0))
    with pytest.raises(ValueError, match="different arrays"):
        classify(X, Layout.slab((8, 9), 4, axis=0))


def test_replicas_serve_themselves():
    src = Layout.bind([Replicated()] * 4, (7, 5))
    dst = Layout.bind([Slab.X] * 4, (7, 5))
    assert {(m.src, m.dst) for m in moves(src, dst)} == {(r, r) for r in range(4)}
