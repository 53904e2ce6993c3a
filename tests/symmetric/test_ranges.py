"""FreeRanges against a plain list of who owns each unit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draws import drawn
from shardmath.base.integers import up
from shardmath.symmetric.ranges import ALIGNMENT, FreeRanges

UNITS = 32


@pytest.mark.parametrize(
    ("nbytes", "to", "expected"),
    [(0, 256, 0), (1, 256, 256), (256, 256, 256), (257, 256, 512), (7, 8, 8), (9, 8, 16)],
)
def test_up_rounds_up(nbytes, to, expected):
    assert up(nbytes, to) == expected


@drawn(150)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9), st.integers(0, 99)), max_size=60))
def test_ranges_taken_never_overlap_and_given_ones_merge(steps):
    ranges = FreeRanges(UNITS * ALIGNMENT)
    owner = [None] * UNITS
    held = []
    for number, (take, units, pick) in enumerate(steps):
        if take:
            offset = ranges.take(units * ALIGNMENT)
            runs = "".join("x" if one is not None else "." for one in owner).split("x")
            fitting = [len(run) for run in runs if len(run) >= units]
            assert (offset is None) == (not fitting)
            if offset is None:
                continue
            first = offset // ALIGNMENT
            assert owner[first : first + units] == [None] * units
            around = "".join("x" if one is not None else "." for one in owner)
            left = around[:first].rpartition("x")[2]
            right = around[first:].partition("x")[0]
            assert len(left + right) == min(fitting), "the smallest range that holds it"
            owner[first : first + units] = [number] * units
            held.append((offset, units))
        elif held:
            offset, size = held.pop(pick % len(held))
            ranges.give(offset, size * ALIGNMENT)
            first = offset // ALIGNMENT
            owner[first : first + size] = [None] * size
        assert ranges.free == owner.count(None) * ALIGNMENT
        runs = "".join("x" if one is not None else "." for one in owner).split("x")
        assert ranges.longest == max(map(len, runs)) * ALIGNMENT
    for offset, size in held:
        ranges.give(offset, size * ALIGNMENT)
    assert ranges.take(UNITS * ALIGNMENT) == 0, "all is one range again"
