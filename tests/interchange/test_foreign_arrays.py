"""Arrays of a library that only speaks DLPack are taken where they lie, and results are its own."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest

from shardmath import fft, nn
from shardmath.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from shardmath.distribution import Replicated, Slab, redistribute
from shardmath.interchange.aligned import ALIGNMENT
from shardmath.linalg.advanced import MatmulEpilog, matmul

X, Y = Slab.X, Slab.Y
A = np.arange(24.0, dtype="f4").reshape(6, 4) - 9
B = np.arange(20.0, dtype="f4").reshape(4, 5) - 3


class Box:
    """An array of a library of the tests, which shares the memory of what it is made from."""

    def __init__(self, inner):
        self.inner = inner

    def __dlpack__(self, **words):
        return self.inner.__dlpack__(**words)

    def __dlpack_device__(self):
        return self.inner.__dlpack_device__()


class WithNamespace(Box):
    """One that says where `from_dlpack` is, as the array API standard has it."""

    def __array_namespace__(self):
        space = ModuleType("space")
        space.from_dlpack = lambda x: WithNamespace(np.from_dlpack(x))
        return space


class Deleted(Box):
    """One whose memory its library has given to another."""

    def __dlpack__(self, **words):
        raise RuntimeError("the array has been deleted")


class Elsewhere(Box):
    """One on a device that no library of ours reads."""

    def __dlpack_device__(self):
        return 10, 0


def from_dlpack(x):
    """What makes a Box of another array: a function of this module, the library's."""
    return Box(np.from_dlpack(x))


def rows(context, x):
    return np.ascontiguousarray(x[X.slices(context.rank, x.shape, size=context.size)])


def columns(context, x):
    return np.ascontiguousarray(x[Y.slices(context.rank, x.shape, size=context.size)])


def cases(context, box):
    """(what a call gives, the expected elements), of calls with boxes."""
    a, b, size = rows(context, A), columns(context, B), context.size
    yield redistribute(box(a), X, Y), columns(context, A)
    yield (
        redistribute(box(a[::-1]), X, Replicated()),
        np.concatenate([A[X.slices(r, A.shape, size=size)][::-1] for r in range(size)]),
    )
    yield matmul(box(a), box(b), distributions=[X, Y, X]), rows(context, A @ B)
    yield matmul(box(a), b, distributions=[X, Y, X]), rows(context, A @ B)
    bias = rows(context, np.arange(6.0, dtype="f4"))
    made = matmul(
        box(a),
        box(b),
        distributions=[X, Y, X],
        epilog=MatmulEpilog.BIAS,
        epilog_inputs={"bias": box(bias)},
    )
    yield made, rows(context, A @ B + np.arange(6.0)[:, None])
    yield fft.rfft(box(a), distribution=(X, Y)), columns(context, np.fft.rfft2(A))
    yield all_reduce(box(A)), size * A
    yield all_reduce(x=box(A[:0])), A[:0]
    yield all_gather(box(a)), A
    yield reduce_scatter(box(A)), size * a
    yield broadcast(box(A + context.rank), root=size - 1), A + size - 1
    whole, weights = [Replicated()] * 3, [box(B.T.copy())] * 2
    for y in nn.linear(box(A), weights, distributions=whole):
        yield y, A @ B


def check(context):
    with context:
        for kind in (Box, WithNamespace):
            for made, expected in cases(context, kind):
                assert type(made) is kind
                np.testing.assert_allclose(np.from_dlpack(made), expected, rtol=1e-5, atol=1e-4)
        for x in (A, A[:1], A[:, :0], np.ones(5000)):  # a result lies where JAX would share it
            for _ in range(3):
                made = all_reduce(Box(x)).inner
                assert not made.size or made.ctypes.data % ALIGNMENT == 0
        room = np.zeros_like(A)
        out = Box(room)
        assert all_reduce(Box(A), out=out) is out and (room == context.size * A).all()
        assert all_reduce(Box(A), out=room) is room
        with pytest.raises(ValueError, match="DLPack's device 10"):
            all_reduce(Elsewhere(A))
        with pytest.raises(ValueError, match=r"rank.*all_reduce: the array has been deleted"):
            all_reduce((Deleted if context.rank == context.size - 1 else Box)(A))
        with pytest.raises(ValueError, match="async_op=True"):
            all_reduce(Box(A), async_op=True)
        with pytest.raises(TypeError, match="color is an integer"):  # which takes no arrays
            context.split(Box(A))
        given = Box(A) if context.rank == 0 else None
        received = broadcast(given)
        assert type(received) is (Box if context.rank == 0 else np.ndarray)
        exchanged = all_to_all(
            Box(rows(context, A)[:1]), send_counts=[1] + [0] * (context.size - 1)
        )
        assert exchanged.inner.shape == (context.size if context.rank == 0 else 0, 4)
    return True


@pytest.mark.parametrize("ranks", [1, 3])
def test_arrays_that_speak_dlpack(contexts, ranks):
    assert from_dlpack.__module__ in sys.modules
    contexts.run(check, ranks=ranks)
