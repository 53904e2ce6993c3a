"""Plain data: what is not exactly of the form is refused. Round trips are in test_distributions."""

import pytest

from shardmath.base import wire
from shardmath.geometry import (
    BlockCyclic,
    BlockNonCyclic,
    Box,
    Distribution,
    ProcessGrid,
    Replicated,
    Slab,
    decode,
)

SQUARE = ProcessGrid(process_array=[[0, 3], [1, 2]])


@pytest.mark.parametrize(
    ("made", "data"),
    [
        (Slab.X, ("Slab", 0, None, None)),
        (Slab.Y.bind((4, 4), size=2), ("Slab", 1, 2, ((4, 4), 2, None))),
        (Box((0, 1), (2, 2)), ("Box", (0, 1), (2, 2), None)),
        (Replicated(), ("Replicated", None, None)),
        (
            BlockCyclic(SQUARE, (1, 2), first_process=(1, 0)),
            ("BlockCyclic", ((2, 2), None, ((0, 3), (1, 2))), (1, 2), (1, 0), None),
        ),
        (
            BlockNonCyclic(ProcessGrid(shape=(2, 1))).bind((4, 4), rank=1),
            ("BlockNonCyclic", ((2, 1), 1, None), (0, 0), ((4, 4), 2, 1)),
        ),
    ],
)
def test_form(made, data):
    assert made.encode() == data
    assert decode(data) == made
    assert decode(wire.decode(wire.encode(data))) == made


@pytest.mark.parametrize(
    "data",
    [
        None,
        "Slab",
        (),
        ("Slab",),
        ["Slab", 0, None, None],
        ("slab", 0, None, None),
        ("Slab", 0, None),
        ("Slab", 0, None, None, None),
        ("Slab", -1, None, None),
        ("Slab", 2, 2, None),
        ("Slab", "0", None, None),
        ("Slab", 0.0, None, None),
        ("Slab", False, None, None),
        ("Slab", 0, None, ((4, 4), 2, None)),
        ("Slab", 0, 2, ((4, 4), 2)),
        ("Slab", 0, 2, ((4, 4), 2, 2)),
        ("Slab", 0, 2, (4, 2, 1)),
        ("Slab", 0, 2, 5),
        ("Box", [0], [1], None),
        ("Box", (0,), (1, 2), None),
        ("Box", (1,), (0,), None),
        ("Box", (0,), (9,), ((8,), None, None)),
        ("Replicated", (), None),
        ("BlockCyclic", None, (1,), (0,), None),
        ("BlockCyclic", ((2,), 7, None), (1,), (0,), None),
        ("BlockCyclic", ((2,), 1.0, None), (1,), (0,), None),
        ("BlockCyclic", ((2,), True, None), (1,), (0,), None),
        ("BlockCyclic", ((2,), 1, None), (0,), (0,), None),
        ("BlockCyclic", ((2,), 1, (1, 0)), (1,), (0,), None),
        ("BlockCyclic", ((2,), 0, None), (1,), (2,), None),
        ("BlockNonCyclic", ((2, 2), None, None), (0, 0), None),
        ("BlockNonCyclic", ((2,), None, (0, 1)), (0,), None),
        (("Slab",), 0, None, None),
        ({}, 0, None, None),
    ],
)
def test_malformed(data):
    with pytest.raises(ValueError, match="malformed distribution"):
        decode(data)


def test_only_known_kinds_travel():
    class Mine(Replicated):
        pass

    assert issubclass(Mine, Distribution)
    with pytest.raises(TypeError, match="cannot be sent"):
        Mine().encode()
