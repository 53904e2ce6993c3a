"""Copies of boxes, by the compiled module and by NumPy: the same bytes, at any strides."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import redistribution_cases as cases

from built import module_from_c
from copying import copy_array
from shardmath.redistribution import bound_copies
from shardmath.redistribution import copies as copies_of

PAGE = 4096
SHORT, LONG, PAST_CACHES, TRANSPOSED, TRANSPOSED_PAST_CACHES = range(5)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return module_from_c(bound_copies, "box.c", "_box", tmp_path_factory.mktemp("box"))


@pytest.fixture(params=["python", "compiled"])
def way(request, monkeypatch):
    found = None if request.param == "python" else request.getfixturevalue("compiled").Boxes
    monkeypatch.setattr(bound_copies, "_boxes", lambda: found)
    return request.param


def cut(x, part):
    return x[part] if isinstance(part, tuple) else part(x)


# What of an array of shape (6, 4, 5) is copied, and where to in another.
PARTS = {
    "all": ((slice(None),) * 3, (slice(None),) * 3),
    "rows": ((slice(1, 4),), (slice(0, 3),)),
    "one axis": ((slice(None), 1, 2), (slice(None), 3, 0)),
    "every second": ((slice(0, 6, 2), slice(None, None, 3)), (slice(3), slice(2))),
    "backwards": ((slice(None, None, -1),), (slice(None),)),
    "turned": (lambda x: x.transpose(1, 0, 2), lambda x: x.reshape(4, 6, 5)),
    "the innermost": ((slice(2), slice(2), slice(0, 5, 2)), (slice(2), slice(1, 3), slice(3))),
    "one element": ((slice(5, 6), slice(3, 4), slice(4, 5)), (slice(1),) * 3),
    "spread": (lambda x: np.broadcast_to(x[:1], x.shape), lambda x: x),
    "none": ((slice(0),), (slice(0),)),
}


@pytest.mark.parametrize("cached", [bound_copies._CACHED, 0])  # 0: none counts as small
@pytest.mark.parametrize("dtype", ["u1", "f2", "f4", "c8", "c16", "V3", "V48", "V80"])
@pytest.mark.parametrize("name", PARTS)
def test_the_same_bytes(way, monkeypatch, name, dtype, cached):
    monkeypatch.setattr(bound_copies, "_CACHED", cached)
    rng = np.random.default_rng(3)
    shape, itemsize = (6, 4, 5), np.dtype(dtype).itemsize
    made = rng.integers(0, 255, (2, 120 * itemsize), dtype="u1")
    source, target = (x.view(dtype).reshape(shape) for x in made)
    wanted = target.copy()
    into = PARTS[name][1]
    cut(wanted, into)[...] = cut(source, PARTS[name][0])
    copies = bound_copies.bind_array(cut(source, PARTS[name][0]), cut(target, into))
    for copy in copies * 2:
        copy()
    assert target.tobytes() == wanted.tobytes()


# Where the source begins, and how much further in its page the destination lies.
PLACES = [
    (0, 0),
    (1, 64),
    (17, 5),
    (64, 63),
    (48, 16),
    (0, 16),
    (16, PAGE - 16),
    (5, 2047),
    (9, 2048),
]


@pytest.mark.parametrize("where", [SHORT, LONG, PAST_CACHES])
@pytest.mark.parametrize("unit", [1, 63, 64, 65, 127, 1000, 4096, 16384, 16447, 70001])
@pytest.mark.parametrize("rows", [(), (3,), (2, 3)])
def test_rows_at_every_alignment(compiled, unit, rows, where):
    room = 6 * (unit + 96) + 300 + 2 * PAGE
    rng = np.random.default_rng(unit)
    memory = rng.integers(0, 250, room, dtype="u1")
    step = unit + 29
    strides = (3 * step, step)[2 - len(rows) :]
    starts = [sum(i * s for i, s in zip(at, strides, strict=True)) for at in np.ndindex(*rows)]
    for src_at, ahead in PLACES:
        target = np.full(room, 0xFF, "u1")
        dst_at = (memory.ctypes.data + src_at + ahead - target.ctypes.data) % PAGE
        ends = target.ctypes.data + dst_at, memory.ctypes.data + src_at
        compiled.Boxes(((*ends, rows, strides, strides, unit, where),), (target, memory))()
        want = np.full(room, 0xFF, "u1")
        for start in starts:
            piece = memory[src_at + start : src_at + start + unit]
            want[dst_at + start : dst_at + start + unit] = piece
        assert (target == want).all()


# Bytes between rows of the destination beyond those in use, and where its first row begins.
ROWS = [(0, 0), (64, 0), (128, 16), (40, 8), (64 - 16, 32), (1, 3)]


@pytest.mark.parametrize("where", [TRANSPOSED, TRANSPOSED_PAST_CACHES])
@pytest.mark.parametrize("unit", [4, 8, 16])
@pytest.mark.parametrize("shape", [(1, 16), (3, 2, 37), (2, 600, 16), (5, 3)])
def test_transposed_at_every_alignment(compiled, shape, unit, where):
    """Boxes of which the source is dense along the last axis but one."""
    *beside, across, along = shape
    rng = np.random.default_rng(unit)
    source = rng.integers(0, 250, (*beside, along, across, unit), dtype="u1").swapaxes(-3, -2)
    for gap, ahead in ROWS:
        step = along * unit + gap
        strides = (*[across * step] * len(beside), step, unit)
        target = np.full(ahead + step * prod(shape[:-1]) + 64, 0xFF, "u1")
        start = -target.ctypes.data % 64 + ahead
        ends = target.ctypes.data + start, source.ctypes.data
        given = (*ends, shape, strides, source.strides[:-1], unit, where)
        compiled.Boxes((given,), (target, source))()
        want = np.full(len(target), 0xFF, "u1")
        for number, row in enumerate(np.ndindex(*shape[:-1])):
            at = start + number * step
            want[at : at + along * unit] = source[row].reshape(-1)
        assert (target == want).all()


@pytest.mark.parametrize("past_caches", [True, False])
def test_large_copies(way, compiled, monkeypatch, past_caches):
    used = []

    def counted(given, keep):
        used.extend(box[-1] for box in given)
        return compiled.Boxes(given, keep)

    if way == "compiled":
        monkeypatch.setattr(bound_copies, "_boxes", lambda: counted)
    monkeypatch.setattr(bound_copies, "_STREAMED", 1 << 16 if past_caches else 1 << 30)
    array = cases.global_array((90, 300), "f8")
    for one, two in (("C", "C"), ("strided", "C"), ("C", "F"), ("F", "strided"), ("F", "F")):
        source, _ = cases.stored(array, one, np.empty)
        target, whole = cases.stored(np.zeros_like(array), two, np.empty)
        copy_array(source[:, 3:], target[:, 3:])
        copy_array(source[:, :3], target[:, :3])
        assert target.tobytes() == array.tobytes()
        assert cases.untouched(target, whole)
    past = {SHORT, PAST_CACHES, TRANSPOSED_PAST_CACHES}
    expected = past if past_caches else {SHORT, LONG, TRANSPOSED}
    assert set(used) == (expected if way == "compiled" else set())


def test_few_copies_are_one_call(compiled, monkeypatch):
    monkeypatch.setattr(bound_copies, "_boxes", lambda: compiled.Boxes)
    x, y = np.arange(64.0).reshape(8, 8), np.zeros((8, 8))
    assert type(bound_copies.bind_array(x, y.T)[0]) is compiled.Boxes
    for dtype in ("f2", "f8"):
        large = np.zeros((256, 256), dtype)
        copies = bound_copies.bind_array(large, large.copy().T)
        assert (type(copies[0]) is compiled.Boxes) == (dtype == "f8")
    many = np.zeros((1,) * 20 + (2,)), np.zeros((1,) * 20 + (3,))[..., :2]
    copy_array(*many)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3)])
def test_a_copy_without_elements_is_none(way, shape):
    x, y = np.ones((4, 4)), np.zeros((4, 4))
    strides = tuple(8 * n for n in range(2, 2 + len(shape)))
    window = bound_copies.Window.of
    none = copies_of.whole(shape, 8, strides, strides)
    copies = [none, copies_of.whole((4, 4), 8, x.strides, y.strides)]
    for copy in bound_copies.bind(copies, {0: window(x)}, window(y)):
        copy()
    assert (y == x).all()
    assert bound_copies.bind([none], {0: window(x)}, window(y)) == []


def test_what_is_no_box_is_refused(compiled):
    good = (1, 1, (2,), (1,), (1,), 1, SHORT)
    for index, wrong in ((2, (1,) * 17), (2, 3), (3, (1, 2)), (4, ()), (5, 0), (5, -1), (2, [2])):
        with pytest.raises((ValueError, TypeError)):
            compiled.Boxes(((*good[:index], wrong, *good[index + 1 :]),), None)
    for wrong in ((), ((1,),), (None, None), ((good,), None, None)):
        with pytest.raises((TypeError, ValueError)):
            compiled.Boxes(*wrong)
    with pytest.raises(TypeError, match="no arguments"):
        compiled.Boxes((), None)(1)
