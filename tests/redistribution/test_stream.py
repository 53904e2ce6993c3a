"""The compiled copy against NumPy's, at every alignment; and the package without it."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import redistribution_cases as cases

from built import built_from_c
from copying import copy_array
from shardmath.redistribution import bound_copies
from shardmath.redistribution.copies import StridedCopy


@pytest.fixture(scope="module")
def streamer(tmp_path_factory):
    return bound_copies.streamer(
        built_from_c(bound_copies, "stream.c", tmp_path_factory.mktemp("stream"))
    )


PAGE = 4096
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


@pytest.mark.parametrize("past_caches", [True, False])
@pytest.mark.parametrize("unit", [0, 1, 63, 64, 65, 127, 1000, 4096, 16384, 16447, 70001])
@pytest.mark.parametrize("rows", [(), (3,), (2, 3)])
def test_rows_at_every_alignment(streamer, unit, rows, past_caches):
    room = 6 * (unit + 96) + 300 + 2 * PAGE
    rng = np.random.default_rng(unit)
    memory = rng.integers(0, 250, room, dtype="u1")
    step = unit + 29
    strides = (3 * step, step)[2 - len(rows) :]
    starts = [sum(i * s for i, s in zip(at, strides, strict=True)) for at in np.ndindex(*rows)]
    for src_at, ahead in PLACES:
        target = np.full(room, 0xFF, "u1")
        dst_at = (memory.ctypes.data + src_at + ahead - target.ctypes.data) % PAGE
        box = StridedCopy(0, 0, unit, rows, src_at, strides, dst_at, strides)
        if not streamer(box, memory.ctypes.data, target.ctypes.data, past_caches):
            assert (target == 0xFF).all()  # a processor that it does not know
            continue
        want = np.full(room, 0xFF, "u1")
        for start in starts:
            piece = memory[src_at + start : src_at + start + unit]
            want[dst_at + start : dst_at + start + unit] = piece
        assert (target == want).all()


@pytest.mark.parametrize("past_caches", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_large_copies_with_and_without_it(streamer, monkeypatch, compiled, past_caches):
    used = []

    def counted(*arguments):
        used.append(arguments)
        return streamer(*arguments)

    monkeypatch.setattr(bound_copies, "_streamer", lambda: counted if compiled else None)
    monkeypatch.setattr(bound_copies, "_COMPILED", 1 << 16)
    monkeypatch.setattr(bound_copies, "_STREAMED", 1 << 16 if past_caches else 1 << 30)
    array = cases.global_array((90, 300), "f8")
    for one, two in (("C", "C"), ("strided", "C"), ("C", "F"), ("F", "strided"), ("F", "F")):
        source, _ = cases.stored(array, one, np.empty)
        target, whole = cases.stored(np.zeros_like(array), two, np.empty)
        copy_array(source[:, 3:], target[:, 3:])
        copy_array(source[:, :3], target[:, :3])
        assert target.tobytes() == array.tobytes()
        assert cases.untouched(target, whole)
    assert bool(used) == compiled
    assert all(arguments[-1] == past_caches for arguments in used)


def test_another_library_is_not_used():
    assert bound_copies.streamer(ctypes.CDLL(None)) is None
