"""Which arrays are the same to a call that comes again: here in host memory, on a pretended GPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from shardmath.handles.fingerprint import fingerprint

torch = pytest.importorskip("torch")


class Books:
    """A heap with one block, which begins where an array does."""

    def __init__(self, array):
        self.start, self.freed = array.data_ptr(), False

    def find(self, address):
        if not self.start <= address < self.start + 64:
            return None
        return SimpleNamespace(address=self.start, nbytes=64, freed=self.freed)


@pytest.fixture
def x():
    return torch.zeros((4, 4), dtype=torch.float32)


@pytest.fixture
def context(x):
    team = SimpleNamespace(device=SimpleNamespace(name="cpu"))
    return SimpleNamespace(team=team, heap=Books(x))


@pytest.mark.parametrize(
    ("change", "alike"),
    [
        (lambda x: x[:], True),
        (lambda x: x.view(torch.int32).view(torch.float32), True),
        (lambda x: x.T, False),
        (lambda x: x[1:], False),
        (lambda x: x.view(torch.int32), False),
        (lambda x: x.clone(), False),
        (lambda x: x.numpy(), False),
        (lambda x: x.reshape(16), False),
    ],
    ids=["view", "same type", "turned", "part", "type", "elsewhere", "library", "shape"],
)
def test_arrays_that_look_and_lie_alike_are_the_same(context, x, change, alike):
    assert (fingerprint(context, change(x), None) == fingerprint(context, x, None)) == alike


def test_what_is_there_and_how_many_there_are_is_told_apart(context, x):
    seen = {
        fingerprint(context, *arrays) for arrays in [(x,), (x, x), (x, None), (None, x), (None,)]
    }
    assert len(seen) == 5 and None not in seen


def test_another_block_at_the_same_place_is_another(context, x):
    before = fingerprint(context, x)
    context.heap.start += 16
    assert fingerprint(context, x) not in (before, None)


def test_what_takes_a_closer_look_is_not_known(context, x):
    learnt = torch.nn.Parameter(x)
    assert fingerprint(context, x) is not None
    for each in (3, [1.0], x.to_sparse(), torch.zeros(3, dtype=torch.complex64).conj(), learnt):
        assert fingerprint(context, each) is None
    with torch.no_grad():
        assert fingerprint(context, learnt) == fingerprint(context, x)
    context.heap.freed = True
    assert fingerprint(context, x) is None
    context.team.device.name = "cuda:0"
    assert fingerprint(context, np.zeros(3)) is None
