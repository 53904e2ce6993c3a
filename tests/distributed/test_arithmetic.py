"""Elementwise functions of arrays split at random, against NumPy on the whole."""

from __future__ import annotations

import copy
import itertools
import operator
import pickle

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from split_arrays import agree, array_of, drawn_cases, elements, host, placed, shapes, splits

import shardmath
from shardmath.distributed import standard
from shardmath.distribution import BlockCyclic, ProcessGrid, Replicated, Slab

FUNCTIONS = {
    "x + y": operator.add,
    "x - y": operator.sub,
    "x * y": operator.mul,
    "x / (y + 20)": lambda x, y: x / (y + 20),
    "x // (y + 20)": lambda x, y: x // (y + 20),
    "2 - x % (y + 20)": lambda x, y: 2 - x % (y + 20),
    "x < y": operator.lt,
    "x >= y": operator.ge,
    "x == y": operator.eq,
    "x != y": operator.ne,
    "maximum": np.maximum,
    "hypot": np.hypot,
    "add of 1": lambda x, y: np.add(x, np.int8(1)) + y,
    "where": lambda x, y: np.where(x < y, x, y),
    "-abs(x) + y": lambda x, y: -abs(x) + y,
    "exp": lambda x, y: np.exp(x / 8) * y,
    "isfinite": lambda x, y: np.isfinite(x) & (y > 0),
    "plain": lambda x, y: x + np.arange(y.shape[-1] if y.shape else 1, dtype=np.float32) * y,
}
TORCH = ("x + y", "x - y", "x * y", "x < y", "x == y", "maximum", "where", "-abs(x) + y")
REAL = ("int8", "int32", "int64", "uint8", "float32", "float64")


@st.composite
def operands(draw, size):
    """A function, a library, and two arrays that broadcast: shape, dtype, split."""
    shape = draw(shapes())
    arrays = []
    for _ in range(2):
        kept = shape[draw(st.integers(0, len(shape))) :] if draw(st.booleans()) else shape
        kept = tuple(1 if draw(st.integers(0, 5)) == 0 else n for n in kept)
        arrays.append((kept, draw(st.sampled_from(REAL)), draw(splits(kept, size))))
    if draw(st.booleans()):
        arrays[1] = arrays[0]  # split alike
    library = draw(st.sampled_from(("numpy", "numpy", "torch")))
    names = sorted(FUNCTIONS)
    if library == "torch":  # which promotes types in its own way
        names = TORCH
        arrays = [(kept, arrays[0][1], split) for kept, _, split in arrays]
    return draw(st.sampled_from(names)), library, arrays


def body(context, cases):
    for name, library, (first, second) in cases:
        function = FUNCTIONS[name]
        a, b = (elements(one[0], one[1], seed) for seed, one in enumerate((first, second)))
        x, y = (placed(context, one, two[2], library)
                for one, two in ((a, first), (b, second)))  # fmt: skip
        with np.errstate(all="ignore"):
            got, expected = function(x, y), function(a, b)
        agree(got, expected, close=True, strict=library == "numpy")


test_elementwise_functions = drawn_cases(body, operands, 8)


ELEMENTWISE = {  # of the standard, by its names
    name: function
    for name, function in standard.NAMES.items()
    if callable(function) and name not in standard.TYPES
}


# The kinds of types for which the standard defines functions; those of the others are "fc".
KINDS = {
    name: kinds
    for kinds, names in {
        "biufc": "equal not_equal",
        "iufc": "abs add isfinite isinf isnan multiply negative positive pow sign square subtract",
        "iuf": "ceil floor floor_divide greater greater_equal less less_equal maximum minimum "
        "remainder trunc",
        "f": "atan2 copysign hypot logaddexp nextafter signbit",
        "c": "conj imag real",
        "biu": "bitwise_and bitwise_invert bitwise_or bitwise_xor",
        "iu": "bitwise_left_shift bitwise_right_shift",
        "b": "logical_and logical_not logical_or logical_xor",
    }.items()
    for name in names.split()
}


@st.composite
def pairs(draw, size):
    """A library, a type, and two arrays that broadcast."""
    shape = draw(shapes())
    library = draw(st.sampled_from(("numpy", "numpy", "torch")))
    kinds = (*REAL, "bool", "complex64") if library == "numpy" else ("int64", "float32", "float64")
    kept = shape[draw(st.integers(0, len(shape))) :]
    arrays = [(one, draw(splits(one, size))) for one in (shape, kept)]
    return library, draw(st.sampled_from(kinds)), arrays


def every_function(context, cases):
    for library, dtype, arrays in cases:
        whole = [elements(shape, dtype, seed) for seed, (shape, _) in enumerate(arrays)]
        is_cupys = library == "numpy" and context.team is not None
        if dtype != "bool":  # shifts, and powers of integers, are by 0 at least
            whole[1] = (abs(whole[1]) + is_cupys).astype(whole[1].dtype)  # CuPy divides by 0 anyhow
            whole[0] += is_cupys & (whole[0] == 0)  # and has its own logarithm of a complex 0
        split = [placed(context, a, how, library)
                 for a, (_, how) in zip(whole, arrays, strict=True)]  # fmt: skip
        for name, function in ELEMENTWISE.items():
            if library == "torch" and (dtype == "int64") != name.startswith("bitwise"):
                continue  # torch has fewer types for most functions
            if is_cupys and whole[0].dtype.kind not in KINDS.get(name, "fc"):
                continue  # CuPy has its own ideas of what the standard leaves open
            count = getattr(function, "nin", 1)
            with np.errstate(all="ignore"):
                try:
                    expected = function(*whole[:count])
                except TypeError:  # of such elements
                    with pytest.raises(TypeError):
                        function(*split[:count])
                    continue
                got = function(*split[:count])
            agree(got, expected, close=True, strict=library == "numpy")


test_every_elementwise_function_of_the_namespace = drawn_cases(every_function, pairs, 8, most=4)


@st.composite
def updates(draw, size):
    """An array and one that is brought into its split: in place, and by out."""
    shape = draw(shapes(1))
    kept = shape[draw(st.integers(0, len(shape))) :]
    library = draw(st.sampled_from(("numpy", "torch")))
    return shape, draw(splits(shape, size)), kept, draw(splits(kept, size)), library


def update(context, cases):
    for shape, split, kept, other, library in cases:
        a, b = elements(shape, "float64"), elements(kept, "float64", 1)
        x, y = placed(context, a, split, library), placed(context, b, other, library)
        before = x.local
        x += y
        x *= 3
        np.subtract(x, y, out=x)
        assert x.local is before
        agree(x, (a + b) * 3 - b, close=True)
        z = x.copy()
        z -= x
        agree(z, np.zeros(shape))
        agree(np.add(x, y, out=z), (a + b) * 3, close=True)
        for number in (np.complex64(1 + 2j), np.array(0.5, np.float32), np.float32(2)):
            agree(number * x - number, number * ((a + b) * 3 - b) - number, close=True)
            agree(np.full_like(x, number, dtype=number.dtype), np.full(shape, number))
        with pytest.raises(TypeError):
            np.add(x, 1.5, out=x.astype(np.int64))


test_in_place_and_out = drawn_cases(update, updates, 4)


def moves(context):
    """Which operands move, and what may."""
    with context:
        x = shardmath.ones((8, 6), distribution=Slab.X)
        y = shardmath.ones((8, 6), distribution=Slab.Y)
        row = shardmath.ones(6, distribution=Slab.X)
        every = shardmath.ones(6, distribution=Replicated())
        cyclic = BlockCyclic(ProcessGrid(shape=(2, 1)), (1, 6))
        with shardmath.communication("forbid"):
            assert (x + x * 2 + every + 1).distribution == Slab.X
            assert (every + every).distribution == Replicated()
            with pytest.raises(RuntimeError, match="192 bytes change their rank"):
                x + y
            with pytest.raises(RuntimeError, match=r'communication\("forbid"\)'):
                x[...] = y
            assert (x + y.to(Slab.X)).distribution == Slab.X
            with shardmath.communication("allow"):
                assert (x + row).distribution == Slab.X
            assert (x.to(cyclic) + every).distribution == cyclic
        with shardmath.communication("warn"), pytest.warns(UserWarning, match="operand 1") as seen:
            x + y
        assert seen[0].filename == __file__
        # The smaller operand moves, and of two that are equal the second.
        assert "operand 1: 6 on 2 ranks, axis 0 in 2 becomes" in shardmath.explain(np.add, x, row)
        lines = shardmath.explain(np.add, y, x).splitlines()
        assert lines[1].startswith("operand 0 stays") and "192 bytes" in lines[2]
        whole = shardmath.ones((8, 6), distribution=Replicated())
        assert "takes its part" in shardmath.explain(np.add, x, whole)
        assert "is 2 x 8 x 6 on 2 ranks" in shardmath.explain(np.add, x, [[[1]], [[2]]])
        with pytest.raises(ValueError, match="one of forbid, warn, allow"):
            shardmath.communication("never")


def test_what_moves_can_be_known_and_forbidden(contexts):
    contexts.run(moves, ranks=2)


def without_axes(context):
    """NumPy's and torch's arrays of no axes, and NumPy's numbers, beside parts of either."""
    a = np.arange(12, dtype=np.float32).reshape(4, 3)
    for library in ("numpy", "torch"):
        with context:
            x = shardmath.from_global(array_of(context, a, library), Slab.X)
        for two in (np.asarray(2, "f4"), np.float32(2), np.asarray(2), torch.tensor(2.0)):
            agree(two + x if library == "torch" else x + two, a + 2, strict=False)
            agree(np.where(x > 5, two, x), np.where(a > 5, 2, a), strict=False)
            agree(np.maximum(x, two), np.maximum(a, 2), strict=False)
            agree(np.clip(x, two, 2 * two), np.clip(a, 2, 4), strict=False)
            agree(x < two, a < 2)
            y = x.copy()
            y += two
            agree(y, a + 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_operands_without_axes(contexts, ranks):
    contexts.run(without_axes, ranks=ranks)


def mistakes(context):
    with context:
        x = shardmath.ones((4, 3), distribution=Slab.X)
        with pytest.raises(ValueError, match=r"\(4, 3\), \(2, 3\) do not broadcast; .*array\(part"):
            x + np.ones((2, 3))
        agree(x * [1, 2, 3], np.ones((4, 3)) * [1, 2, 3])
        agree((0, 1, 2) - x, (0, 1, 2) - np.ones((4, 3)))
        agree(
            np.maximum(x, [[0], [1], [2], [3]]), np.maximum(1.0, [[0], [1], [2], [3]] * x.numpy())
        )
        with pytest.raises(TypeError):
            operator.add(x, {1, 2, 3})
        with pytest.raises(TypeError, match=r"x.local is .* x.numpy\(\) .* x.numpy\(root=0\)"):
            np.asarray(x)
        with pytest.raises(NotImplementedError, match=r"x\.local"):
            np.partition(x, 1)
        with pytest.raises(NotImplementedError, match=r"np.add.accumulate.*x.local"):
            np.add.accumulate(x)
        with pytest.raises(NotImplementedError, match=r"np.where"):
            np.add(x, 1, where=x > 0)
        with pytest.raises(TypeError, match="out is a DistributedArray"):
            np.add(x, 1, out=np.ones((4, 3)))
        with pytest.raises(ValueError, match="has shape"):
            x += np.ones((2, 4, 3))
        with pytest.raises(NotImplementedError, match=r"np.vstack .*np.concatenate.*axis=0"):
            np.vstack([x, x])
        with pytest.raises(TypeError, match="unhashable"):
            hash(x)
        with pytest.raises(TypeError, match=r"not pickled.*shardmath\.save\(path, x\)"):
            pickle.dumps(x)
        with pytest.raises(AttributeError, match=r"no sort.*use np\.sort, x\.local"):
            x.sort()
        with pytest.raises(AttributeError, match="object has no attribute 'rows'"):
            x.rows  # noqa: B018
        assert 1 in x and 2 not in x and None not in x and not hasattr(x, "__array_interface__")
        for compare, other in itertools.product((operator.eq, operator.ne), (None, "one")):
            agree(compare(x, other), compare(np.ones((4, 3)), other))
        assert x.__eq__({1}) is NotImplemented
        other = copy.deepcopy(x)
        other += copy.copy(x)
        assert x.sum() == 12 and other.sum() == 24
        for got, expected in zip(divmod(7 * x, 2), divmod(np.full((4, 3), 7.0), 2), strict=True):
            agree(got, expected)
        agree(divmod(7, 2 * x)[0], np.full((4, 3), 3.0))
        with pytest.raises(ValueError, match="neither true nor false"):
            bool(x)
        assert repr(x) == (
            f"DistributedArray(shape=(4, 3), dtype=float64, Slab(0), rank {context.rank} of 2)"
        )
    return host(x).shape


def test_mistakes(contexts):
    assert contexts.run(mistakes, ranks=2) == [(2, 3), (2, 3)]
