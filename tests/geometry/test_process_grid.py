"""Process grids: the mapping, the three ways to say it, and what is refused."""

import copy
import itertools

import numpy as np
import pytest
from geometry_cases import grids
from hypothesis import given
from hypothesis import strategies as st

from draws import drawn
from shardmath.geometry import ProcessGrid

ROW, COL = ProcessGrid.Layout.ROW_MAJOR, ProcessGrid.Layout.COL_MAJOR


@drawn(100)
@given(st.integers(1, 12).flatmap(lambda size: st.integers(1, 4).flatmap(lambda n: grids(n, size))))
def test_mapping_and_print(grid):
    array = np.array(grid.process_array)
    assert array.shape == grid.shape and array.size == grid.size
    for at in itertools.product(*map(range, grid.shape)):
        assert grid.rank(at) == array[at]
        assert grid.coordinate(array[at]) == at
    for order, layout in (("C", ROW), ("F", COL)):
        filled = np.arange(grid.size).reshape(grid.shape, order=order)
        other = ProcessGrid(shape=grid.shape, layout=layout)
        assert np.array_equal(other.process_array, filled)
        assert (grid == other) == np.array_equal(array, filled)
        assert grid != other or hash(grid) == hash(other)
    assert eval(repr(grid)) == grid == copy.deepcopy(grid)
    wide = grid.promoted(6)
    assert np.array_equal(wide.process_array, array.reshape(grid.shape + (1,) * (6 - grid.ndim)))


def test_three_ways_to_say_it():
    by_layout = ProcessGrid(shape=(np.int64(2), 3), layout=COL)
    assert by_layout == ProcessGrid(process_array=[[0, 2, 4], [1, 3, 5]])
    assert by_layout == ProcessGrid(process_array=np.array([[0, 2, 4], [1, 3, 5]]), shape=(2, 3))
    assert by_layout == ProcessGrid(process_array=((0, 2, 4), (1, 3, 5)), layout=COL)
    assert by_layout != ProcessGrid(shape=(2, 3), layout=ROW)
    assert ProcessGrid(shape=(1, 4)) == ProcessGrid(shape=(1, 4), layout=COL)
    assert ProcessGrid(shape=[4]).layout is ROW
    custom = ProcessGrid(process_array=[[3, 1], [0, 2]])
    assert custom.layout is None and custom.coordinate(3) == (0, 0)
    assert repr(custom) == "ProcessGrid(process_array=((3, 1), (0, 2)))"
    assert repr(by_layout) == "ProcessGrid(shape=(2, 3), layout=ProcessGrid.Layout.COL_MAJOR)"
    assert (int(COL), int(ROW)) == (0, 1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "needs a shape"),
        ({"layout": ROW}, ValueError, "needs a shape"),
        ({"shape": ()}, ValueError, "at least one axis"),
        ({"shape": (2, 2)}, ValueError, "needs a layout"),
        ({"shape": (2, 0), "layout": ROW}, ValueError, "at least 1"),
        ({"shape": (2, -1), "layout": ROW}, ValueError, "at least 1"),
        (
            {"shape": (2, 1.0), "layout": ROW},
            ValueError,
            r"shape must be a sequence of integers of at least 1, not \(2, 1.0\)",
        ),
        ({"shape": 4}, ValueError, "sequence of integers"),
        ({"shape": (2, 2), "layout": 1}, TypeError, "ProcessGrid.Layout"),
        ({"shape": (2, 2), "layout": "row"}, TypeError, "ProcessGrid.Layout"),
        ({"process_array": [[0, 1], [2]]}, ValueError, "ragged"),
        ({"process_array": [[0, 1], 2]}, ValueError, "ragged"),
        ({"process_array": [0, [1, 2]]}, ValueError, "must be a sequence of integers, not"),
        ({"process_array": [0, 0]}, ValueError, "each of the ranks 0 to 1 once"),
        ({"process_array": [1, 2]}, ValueError, "each of the ranks 0 to 1 once"),
        ({"process_array": [0.0, 1.0]}, ValueError, "must be a sequence of integers, not"),
        ({"process_array": []}, ValueError, "nested sequence"),
        ({"process_array": 3}, ValueError, "nested sequence"),
        ({"process_array": "01"}, ValueError, "nested sequence"),
        ({"process_array": [[0, 1]], "shape": (2, 1)}, ValueError, "has shape"),
        ({"process_array": [[0, 2], [1, 3]], "layout": ROW}, ValueError, "not in ROW_MAJOR"),
    ],
)
def test_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        ProcessGrid(**arguments)


def test_outside_and_frozen():
    grid = ProcessGrid(shape=(2, 3), layout=ROW)
    for rank in (-1, 6, 1.0, None, True):
        with pytest.raises(ValueError, match="rank"):
            grid.coordinate(rank)
    for at in [(2, 0), (0, -1), (0,), (0, 0, 0)]:
        with pytest.raises(ValueError, match="outside"):
            grid.rank(at)
    with pytest.raises(AttributeError):
        grid.shape = (3, 2)
