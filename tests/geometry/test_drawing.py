"""Drawings, as they appear."""

import pytest

from counted import lines_of
from shardmath.geometry import (
    BlockCyclic,
    BlockNonCyclic,
    Box,
    Layout,
    ProcessGrid,
    Replicated,
    Slab,
    Spans,
)

ROW, COL = ProcessGrid.Layout.ROW_MAJOR, ProcessGrid.Layout.COL_MAJOR
SQUARE = ProcessGrid(shape=(2, 2), layout=ROW)


@pytest.mark.parametrize(
    ("made", "shape", "size", "drawing"),
    [
        (Slab.X, (3, 4), 2, "0000\n0000\n1111"),
        (Slab.Y, (2, 5), 3, "00112\n00112"),
        (Slab.X, (10,), 4, "0001112233"),
        (Slab.X, (40,), 40, "0123456789abcdefghijklmnopqrstuvwxyzABCD"),
        (Slab.X, (64,), 64, "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ##"),
        (Replicated(), (2, 3), 3, "***\n***"),
        (Replicated(), (2, 3), 1, "000\n000"),
        (Slab.X, (0, 3), 2, "(empty: 0 x 3)"),
        (BlockCyclic(SQUARE, (1, 2)), (3, 7), 4, "0011001\n2233223\n0011001"),
        (BlockNonCyclic(SQUARE), (4, 5), 4, "00011\n00011\n22233\n22233"),
        (
            BlockNonCyclic(ProcessGrid(shape=(2, 2), layout=COL), first_process=(1, 1)),
            (3, 3),
            4,
            "331\n331\n220",
        ),
        (Box((1, 1), (3, 3)), (4, 4), 2, "....\n.##.\n.##.\n...."),
        (Box((1, 1), (3, 3)).bind((4, 4), rank=5), None, None, "....\n.55.\n.55.\n...."),
        (
            Slab.X,
            (1000, 1000),
            3,
            "(axis 0 of 1000 by blocks of up to 334, axis 1 of 1000 by blocks of up to 1000)\n"
            "0\n1\n2",
        ),
        (
            BlockCyclic(SQUARE, (256, 128)),
            (1000, 600),
            4,
            "(axis 0 of 1000 by blocks of up to 256, axis 1 of 600 by blocks of up to 128)\n"
            "01010\n23232\n01010\n23232",
        ),
        (
            BlockCyclic(ProcessGrid(shape=(2,)), (10,)),
            (1280,),
            2,
            f"(axis 0 of 1280 by blocks of up to 10)\n{'01' * 32}...",
        ),
        (
            BlockCyclic(ProcessGrid(shape=(2, 1)), (1, 9)),
            (10**9, 2),
            2,
            "(axis 0 of 1000000000 by blocks of up to 1)\n" + "00\n11\n" * 16 + "...",
        ),
        (
            Slab.Y,
            (4, 6, 8),
            2,
            "4 x 6 x 8 on 2 ranks\n"
            "axis 0 (4): 0:4 on all ranks\n"
            "axis 1 (6): 0:3 on rank 0\n"
            "axis 1 (6): 3:6 on rank 1\n"
            "axis 2 (8): 0:8 on all ranks",
        ),
        (
            BlockCyclic(ProcessGrid(shape=(2, 1, 2), layout=ROW), (1, 1, 4)),
            (4, 6, 4),
            4,
            "4 x 6 x 4 on 4 ranks\n"
            "axis 0 (4): 0:1 every 2 to 3 on ranks 0 1\n"
            "axis 0 (4): 1:2 every 2 to 4 on ranks 2 3\n"
            "axis 1 (6): 0:6 on all ranks\n"
            "axis 2 (4): 0:4 on ranks 0 2\n"
            "axis 2 (4): empty on ranks 1 3",
        ),
    ],
)
def test_drawn(made, shape, size, drawing):
    drawn, lines = lines_of(lambda: made.draw(shape, size=size))
    assert drawn == drawing
    assert lines < 100_000  # whatever the extents are


def test_layouts_draw_too():
    parts = ((Spans.interval(0, 3),), (Spans.interval(2, 5),))
    assert Layout((6,), parts).draw() == "00*11."


def test_unknown_shape():
    with pytest.raises(RuntimeError, match="not bound"):
        Slab.X.draw(size=2)
    with pytest.raises(ValueError, match="reaches past"):
        Box((0,), (5,)).draw((4,))
