"""Copies of small boxes, by the compiled module and by NumPy: the same bytes, at any strides."""

from __future__ import annotations

import numpy as np
import pytest

from built import module_from_c
from copying import copy_array
from shardmath.redistribution import bound_copies

ROOM = 4096


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return module_from_c(bound_copies, "box.c", "_box", tmp_path_factory.mktemp("box"))


@pytest.fixture(params=["python", "compiled"])
def way(request, monkeypatch):
    found = None if request.param == "python" else request.getfixturevalue("compiled").Boxes
    monkeypatch.setattr(bound_copies, "_boxes", lambda: found)


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


@pytest.mark.parametrize("dtype", ["u1", "f2", "f4", "c8", "c16", "V3", "V48", "V80"])
@pytest.mark.parametrize("name", PARTS)
def test_the_same_bytes(way, name, dtype):
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


def test_few_copies_are_one_call(compiled, monkeypatch):
    monkeypatch.setattr(bound_copies, "_boxes", lambda: compiled.Boxes)
    x, y = np.arange(64.0).reshape(8, 8), np.zeros((8, 8))
    assert type(bound_copies.bind_array(x, y.T)[0]) is compiled.Boxes
    large = np.zeros((256, 256))
    assert type(bound_copies.bind_array(large, large.copy())[0]) is not compiled.Boxes
    many = np.zeros((1,) * 20 + (2,)), np.zeros((1,) * 20 + (3,))[..., :2]
    copy_array(*many)


def test_what_is_no_box_is_refused(compiled):
    good = (1, 1, (2,), (1,), (1,), 1)
    for index, wrong in ((2, (1,) * 17), (2, 3), (3, (1, 2)), (4, ()), (5, 0), (5, -1), (2, [2])):
        with pytest.raises((ValueError, TypeError)):
            compiled.Boxes(((*good[:index], wrong, *good[index + 1 :]),), None)
    for wrong in ((), ((1,),), (None, None), ((good,), None, None)):
        with pytest.raises((TypeError, ValueError)):
            compiled.Boxes(*wrong)
    with pytest.raises(TypeError, match="no arguments"):
        compiled.Boxes((), None)(1)
