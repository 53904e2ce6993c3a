"""Calls that come again, by their arrays and words: by Python, and by the compiled module."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from built import module_from_c
from shardmath.handles import fingerprint
from shardmath.handles.fingerprint import Recognised

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fingerprint")
    return module_from_c(fingerprint, "fingerprint.c", "_fingerprint", folder)


@pytest.fixture(params=["python", "compiled"], autouse=True)
def way(request, monkeypatch):
    """How arrays are looked at."""
    found = None if request.param == "python" else request.getfixturevalue("compiled")
    monkeypatch.setattr(fingerprint, "extension", lambda _: found)


class Books:
    """A heap of blocks, each (address, bytes), of which all arrays there are parts."""

    def __init__(self):
        self.blocks, self.version, self.asked = {}, 0, 0

    def find(self, address):
        self.asked += 1
        for start, block in self.blocks.items():
            if start <= address < start + block.nbytes:
                return block
        return None

    def put(self, start, nbytes):
        self.version += 1
        self.blocks[start] = SimpleNamespace(address=start, nbytes=nbytes, freed=False)


@pytest.fixture
def heap():
    return Books()


@pytest.fixture
def known(heap):
    return Recognised(SimpleNamespace(team=None, heap=heap), most=8)


def kept(known, words, *arrays, value="kept"):
    key = known.key(words, arrays)
    return key is not None and known.keep_for(key, arrays, value) is not None


def found(known, words, *arrays):
    key = known.key(words, arrays)
    return None if key is None else known.find(key)


NUMPY, TORCH = np.zeros((4, 6), "f4"), torch.zeros((4, 6))
OTHERS = {
    "a view of all": (lambda x: x[:], True),
    "turned": (lambda x: x.T, False),
    "a part": (lambda x: x[1:], False),
    "of another shape": (lambda x: x.reshape(24), False),
    "with an axis more": (lambda x: x[None], False),
    "every second": (lambda x: x[::2], False),
    "elsewhere": (lambda x: x + 0, False),
}
TYPES = {
    "whole numbers": (lambda x: x.view(torch.int32 if x is TORCH else np.int32), False),
    "the same type": (lambda x: x.view(torch.float32 if x is TORCH else np.float32), True),
    "another library": (lambda x: x.numpy() if x is TORCH else torch.from_numpy(x), False),
}


@pytest.mark.parametrize("x", [NUMPY, TORCH], ids=["numpy", "torch"])
@pytest.mark.parametrize("name", OTHERS | TYPES)
def test_what_looks_and_lies_alike_is_found(known, x, name):
    change, alike = (OTHERS | TYPES)[name]
    assert kept(known, "words", x)
    for _ in range(2):  # types that were not known the first time are the second
        assert found(known, "words", change(x)) == ("kept" if alike else None)
    assert found(known, "words", x) == "kept"


@pytest.mark.parametrize("x", [NUMPY, TORCH], ids=["numpy", "torch"])
def test_words_and_the_number_of_arrays_tell_calls_apart(known, x):
    calls = [("a", x), ("b", x), ("a", x, x), ("a", x, None), ("a", None, x), ("a",)]
    for number, call in enumerate(calls):
        assert kept(known, *call, value=number)
    assert [found(known, *call) for call in calls] == list(range(6))


def test_read_only_memory_is_not_taken_for_memory_to_write(known):
    x = np.zeros(3)
    assert kept(known, "", x)
    x.setflags(write=False)
    assert found(known, "", x) is None


def test_types_that_look_alike_to_the_buffer_protocol(known):
    x = np.zeros(4, "f4")
    assert kept(known, "", x)
    for dtype in (">f4", "V4", "i4", "S4"):
        assert found(known, "", x.view(dtype)) is None


@pytest.mark.parametrize("make", [np.zeros, torch.zeros], ids=["numpy", "torch"])
def test_empty_arrays_are_known_by_the_memory_that_they_are_views_of(known, heap, make):
    whole, other = make(8), make(8)
    heap.put(address_of(whole), 32)
    assert kept(known, "", whole[:0])
    assert found(known, "", whole[:0]) == "kept"
    assert found(known, "", other[:0]) is None
    heap.blocks.clear()
    heap.version += 1
    assert found(known, "", whole[:0]) is None


@pytest.mark.parametrize("x", [NUMPY, TORCH], ids=["numpy", "torch"])
def test_what_has_become_of_the_heap_is_noticed(known, heap, x):
    address = address_of(x)
    heap.put(address, 96)
    assert kept(known, "", x)
    asked = heap.asked
    assert found(known, "", x) == "kept" and heap.asked == asked  # nothing has changed
    heap.put(1, 1)
    assert found(known, "", x) == "kept" and heap.asked > asked
    heap.put(address, 96)
    assert found(known, "", x) == "kept"
    heap.put(address, 128)
    assert found(known, "", x) is None
    heap.put(address, 96)
    assert found(known, "", x) == "kept"
    heap.blocks[address].freed = True
    heap.version += 1
    assert found(known, "", x) is None
    assert not kept(known, "", x)


def test_what_takes_a_closer_look_is_not_known(known):
    learnt = torch.nn.Parameter(torch.zeros(3))
    lazy = torch.zeros(3, dtype=torch.complex64).conj()
    needing = torch.zeros(3, requires_grad=True)
    for x in (3, [1.0], "x", TORCH.to_sparse(), lazy, lazy.imag, learnt, needing):
        for _ in range(2):
            assert known.key("", (x,)) is None or not known.keep_for(known.key("", (x,)), (x,), 1)
    with torch.no_grad():
        assert kept(known, "", learnt) and found(known, "", learnt) == "kept"
        assert kept(known, "", needing) and found(known, "", needing) == "kept"
    assert found(known, "", needing) is None


def test_arrays_elsewhere_than_where_ranks_compute_are_not_kept(heap):
    team = SimpleNamespace(device=SimpleNamespace(name="cuda:0"))
    known = Recognised(SimpleNamespace(team=team, heap=heap), most=8)
    assert not kept(known, "", NUMPY)
    assert not kept(known, "", TORCH)


def address_of(x):
    return x.data_ptr() if isinstance(x, torch.Tensor) else x.ctypes.data
