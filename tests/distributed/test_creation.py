"""Functions that make arrays, and those that give the whole, against NumPy."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from hypothesis import strategies as st
from split_arrays import agree, array_of, drawn_cases, elements, host, placed, shapes, splits

import shardmath
from shardmath import distributed
from shardmath.distribution import Replicated, Slab
from shardmath.errors import CollectiveMismatch
from shardmath.geometry import decode

DTYPES = ("bool", "int16", "float16", "bfloat16", "float64", "complex64", "S3")


@st.composite
def arrays(draw, size):
    """An array: its shape, type, split, another split, the root that has it, a library."""
    shape = draw(shapes())
    root = draw(st.none() | st.integers(0, size - 1))
    library = draw(st.sampled_from(("numpy", "torch")))
    dtype = draw(st.sampled_from(DTYPES[:-1] if library == "torch" else DTYPES))
    return shape, dtype, draw(splits(shape, size)), draw(splits(shape, size)), root, library


def whole(context, cases):
    """Parts, the whole, and other splits of the same array."""
    for shape, dtype, split, other, root, library in cases:
        a = elements(shape, "int8").astype("S3") if dtype == "S3" else elements(shape, dtype)
        x = placed(context, a, split, library)
        agree(x, a)
        assert x.numpy().tobytes() == a.tobytes()
        got = x.numpy(root=root)
        assert (got is None) == (root not in (None, context.rank))
        assert got is None or (got.shape, got.tobytes()) == (shape, a.tobytes())
        target = decode(other[context.rank])
        agree(x.to(target), a)
        agree(x.T, a.T)
        given_ = array_of(context, a.copy(), library) if root in (None, context.rank) else None
        with context:
            agree(shardmath.from_global(given_, target, root=root), a)
        if dtype != "bfloat16":
            assert str(x) == str(a)


test_parts_and_the_whole = drawn_cases(whole, arrays, 6)


@st.composite
def creations(draw, size):
    shape = draw(shapes())
    line, square = (draw(st.integers(0, 9)),), (draw(st.integers(0, 5)), draw(st.integers(0, 5)))
    return shape, *(draw(splits(extents, size)) for extents in (shape, line, square)), line, square


def create(context, cases):
    for shape, *splits_, line, square in cases:
        first, second, third = (decode(split[context.rank]) for split in splits_)
        with context:
            agree(distributed.zeros(shape, "int8", distribution=first), np.zeros(shape, "int8"))
            agree(distributed.ones(shape, distribution=first), np.ones(shape))
            agree(distributed.full(shape, 2.5, "f4", distribution=first), np.full(shape, 2.5, "f4"))
            made = distributed.empty(shape, "complex64", distribution=first)
            agree(distributed.full_like(made, 2), np.full(shape, 2, "complex64"))
            agree(distributed.zeros_like(made, "bool"), np.zeros(shape, "bool"))
            agree(distributed.ones_like(distributed.empty_like(made)), np.ones(shape, "complex64"))
            plain = elements(shape, "int16")
            agree(distributed.asarray(plain, "float32", distribution=first), plain.astype("f4"))
            agree(distributed.from_dlpack(plain), plain)
            numbers = distributed.fromfunction(lambda *i: sum(i) + 1.5, shape, distribution=first)
            agree(numbers, np.fromfunction(lambda *i: sum(i) + 1.5, shape))
            assert (sum(numbers.indices()) + 1.5 == numbers.local).all()
            (n,) = line
            agree(distributed.arange(n, distribution=second), np.arange(n))
            agree(distributed.arange(1.0, 1 + n / 3, 0.37, distribution=Slab.X),
                  np.arange(1.0, 1 + n / 3, 0.37), close=True)  # fmt: skip
            agree(distributed.arange(9, 9 - n, -1, dtype="f4", distribution=second),
                  np.arange(9, 9 - n, -1, dtype="f4"))  # fmt: skip
            for end in (True, False):
                agree(distributed.linspace(-1, 3, n, end, distribution=second),
                      np.linspace(-1, 3, n, end), close=True)  # fmt: skip
            if n:
                agree(distributed.fft.fftfreq(n, 0.5, distribution=second), np.fft.fftfreq(n, 0.5))
                agree(distributed.fft.rfftfreq(n, 0.5, distribution=Slab.X),
                      np.fft.rfftfreq(n, 0.5))  # fmt: skip
            rows, columns = square
            agree(distributed.eye(rows, columns, 1, "i4", distribution=third),
                  np.eye(rows, columns, 1, "i4"))  # fmt: skip
            for function in (distributed.random, distributed.standard_normal):
                alone = function(shape, seed=7, distribution=Replicated())
                agree(function(shape, seed=7, distribution=first), host(alone), close=True)


test_creation = drawn_cases(create, creations, 3, most=8)


def numbers(context):
    """Random numbers of the distribution that they are to have."""
    with context:
        x = shardmath.random((100, 200), seed=3, distribution=Slab.Y)
        assert float(x.min()) >= 0 and float(x.max()) < 1
        assert abs(float(x.mean()) - 0.5) < 0.01 and abs(float(x.var()) - 1 / 12) < 0.005
        single = shardmath.random((100, 200), seed=3, distribution=Slab.X, dtype="float32")
        assert np.allclose(single.numpy(), x.numpy(), atol=1e-7)
        assert (shardmath.random(50, seed=4, distribution=Slab.X) != x.numpy()[0, :50]).all()
        y = shardmath.standard_normal((100, 200), seed=3, distribution=Slab.X)
        assert abs(float(y.mean())) < 0.03 and abs(float(y.std()) - 1) < 0.03
        torch = importlib.import_module("torch")
        z = shardmath.random(9, seed=3, distribution=Slab.X, package=torch)
        assert z.dtype == torch.float64 and z.shape == (9,)


def test_random_numbers(contexts):
    contexts.run(numbers, ranks=3)


def gathered(context):
    """A rank whose own call is as the last one, while its peers no longer read its part."""
    with context:
        x = shardmath.arange(7, distribution=Slab.X)
        for root in (None, 1, None, 0, 1):
            whole = x.numpy(root=root)
            assert whole is None or whole.tolist() == list(range(7))


def test_the_whole_on_some_ranks(contexts):
    contexts.run(gathered, ranks=3)


def shown(context):
    with context:
        for shape in ((3000,), (40, 50), (7, 300), (2, 3)):
            a = np.arange(float(np.prod(shape))).reshape(shape) / 8
            x = shardmath.from_global(a, Slab.X)
            assert str(x) == str(a)
            assert f"{x}" == str(a)
        assert str(x[1, 2]) == "0.625" and f"{x[1, 2]:.1f}" == "0.6"
        assert x.tolist() == a.tolist()


def test_text_is_numpys(contexts):
    contexts.run(shown, ranks=2)


def mistakes(context):
    with context:
        part = np.zeros((2 + context.rank, 3))
        with pytest.raises(ValueError, match=r"rank 0: local shape .*expected"):
            shardmath.array(part, Slab.X)
        with pytest.raises(ValueError, match="the dtype of the part must be equal"):
            shardmath.array(np.zeros(2, "f4" if context.rank else "f8"), Slab.X)
        with pytest.raises(TypeError, match=r"distribution must be one such as Slab\.X"):
            shardmath.array(np.zeros(2), "rows")
        with pytest.raises(ValueError, match=r"rank 1: x: expected an array"):
            shardmath.from_global(None if context.rank else np.zeros(2), Slab.X)
        with pytest.raises(ValueError, match="root must be None or a rank below 2"):
            shardmath.from_global(np.zeros(2), Slab.X, root=2)
        with pytest.raises(ValueError, match="ndim 2 or more"):
            shardmath.zeros(4, distribution=Slab.Y)
        with pytest.raises(ValueError, match="root must be None or a rank below 2"):
            shardmath.zeros(4, distribution=Slab.X).numpy(root=2)
        with pytest.raises(CollectiveMismatch, match=r"root must be equal .* rank 1 has 0"):
            shardmath.zeros(4, distribution=Slab.X).numpy(root=1 - context.rank)
        with pytest.raises(ValueError, match="all ranks must give the same distribution"):
            shardmath.zeros(4, distribution=Slab.X).to(Slab.Y if context.rank else Replicated())
        with pytest.raises(TypeError, match=r"to takes a distribution"):
            shardmath.zeros(4, distribution=Slab.X).to(3)
        with pytest.raises(ValueError, match="float64 or float32"):
            shardmath.random(3, seed=0, distribution=Slab.X, dtype="int8")
        with pytest.raises(ValueError, match="seed must be less than"):
            shardmath.random(1, seed=1 << 128, distribution=Slab.X)  # of which rank 1 has none


def test_mistakes(contexts):
    contexts.run(mistakes, ranks=2)
