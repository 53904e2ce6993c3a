"""One axis: normal form, positions, and where two sets meet."""

import math

import pytest
from geometry_cases import elements, spans
from hypothesis import given
from hypothesis import strategies as st

from counted import lines_of
from draws import drawn
from shardmath.geometry import Run, Spans


@drawn(150)
@given(st.integers(0, 60).flatmap(lambda extent: st.tuples(spans(extent), spans(extent))))
def test_positions_and_equality(pair):
    one, two = pair
    held = elements(one)
    assert one.length == len(one) == len(held)
    assert [i for lo, hi in one.ranges() for i in range(lo, hi)] == held
    assert one.count == len(list(one.ranges()))
    for i in range(62):
        assert (i in one) == (i in held)
        assert one.before(i) == sum(j < i for j in held)
        # A cut is where membership changes.
        later = (j for j in range(i + 1, 62) if (j in held) != (j - 1 in held))
        assert one.cut_after(i) == next(later, None)
    assert (one == two) == (held == elements(two))
    assert one != two or hash(one) == hash(two)


@drawn(200)
@given(st.integers(0, 60).flatmap(lambda extent: st.tuples(spans(extent), spans(extent))))
def test_intersection_pairs_every_shared_index_once(pair):
    one, two = pair
    src, dst = elements(one), elements(two)
    written = {}
    for run in one.intersect(two):
        assert run.count > 0 and run.length > 0
        assert (run.count == 1) == (run.src_step == run.dst_step == 0)
        for i in range(run.count):
            for j in range(run.length):
                at = run.dst_start + i * run.dst_step + j
                assert at not in written
                written[at] = src[run.src_start + i * run.src_step + j]
    assert written == {dst.index(i): i for i in src if i in dst}
    assert one.shared(two) == len(written)


def blocks_in_one_period(one, two):
    common = math.lcm(one.period, two.period)
    return common // one.period + common // two.period


@drawn(200)
@given(
    st.tuples(st.integers(1, 9), st.integers(2, 5), st.integers(1, 9), st.integers(2, 5)),
    st.integers(1, 4000),
    st.data(),
)
def test_runs_are_bounded_by_the_pattern(sizes, extent, data):
    b1, p1, b2, p2 = sizes
    one = Spans.cyclic(extent, b1, p1, data.draw(st.integers(0, p1 - 1)))
    two = Spans.cyclic(extent, b2, p2, data.draw(st.integers(0, p2 - 1)))
    runs = len(one.intersect(two))
    if one.period and two.period:
        # The pattern once, and the two ends, each inside one block of the coarser set.
        assert runs <= blocks_in_one_period(one, two) + 6
    else:
        assert runs <= 3


BIG = 10**9


@pytest.mark.parametrize(
    ("one", "two", "most"),
    [
        (Spans.cyclic(BIG, 1, 7, 0), Spans.cyclic(BIG, 1, 8, 1), 1),
        (Spans.cyclic(BIG, 1, 2, 0), Spans.cyclic(BIG, 1, 2, 0), 1),
        (Spans.cyclic(BIG, 1, 2, 0), Spans.cyclic(BIG, 1, 2, 1), 0),
        (Spans.cyclic(BIG, 1, 4, 3), Spans.interval(BIG // 3, BIG // 2), 1),
        (Spans.cyclic(BIG, 256, 4, 3), Spans.interval(1000, BIG - 1000), 3),
        (Spans.cyclic(BIG, 64, 4, 3), Spans.cyclic(BIG, 48, 3, 2), 14),
        (Spans.cyclic(BIG, 1, 2, 1), Spans.cyclic(BIG, 10**8, 2, 1), 5),
    ],
)
def test_a_billion_indices_cost_no_more_than_the_pattern(one, two, most):
    runs, lines = lines_of(lambda: one.intersect(two))
    assert lines < 1000  # some 500 in the worst of these cases, and as many for 10**5 indices
    assert len(runs) <= most
    assert sum(run.elements for run in runs) == one.shared(two) == two.shared(one)


def test_equal_layouts_meet_in_one_run():
    for extent in (1, 7, 8, 9, 1000):
        s = Spans.cyclic(extent, 3, 3, 0)
        assert s.intersect(s) == (Run(1, s.length, 0, 0, 0, 0),)


@pytest.mark.parametrize(
    ("fields", "normal"),
    [
        ((0, 4, 0, 9), (0, 4, 0, 4)),
        ((3, 4, 4, 12), (3, 9, 0, 12)),
        ((3, 2, 5, 9), (3, 2, 5, 9)),
        ((3, 2, 5, 12), (3, 2, 5, 10)),
        ((3, 2, 5, 8), (3, 2, 0, 5)),
        ((3, 2, 5, 3), (0, 0, 0, 0)),
        ((3, 0, 5, 9), (0, 0, 0, 0)),
    ],
)
def test_normal_form(fields, normal):
    made = Spans(*fields)
    assert (made.start, made.block, made.period, made.stop) == normal


@pytest.mark.parametrize("fields", [(-1, 2, 3, 9), (0, -2, 3, 9), (0, 4, 3, 9), (0, 1, -3, 9)])
def test_impossible_fields(fields):
    with pytest.raises(ValueError, match="none may be negative"):
        Spans(*fields)


def test_printed():
    assert str(Spans(0, 0, 0, 0)) == "empty"
    assert str(Spans.interval(3, 5)) == "3:5"
    assert str(Spans.cyclic(64, 4, 4, 1)) == "4:8 every 16 to 56"
    (run,) = Spans.cyclic(64, 4, 4, 1).intersect(Spans.interval(0, 64))
    assert str(run) == "4 x 4 at 0+4i -> 4+16i"
