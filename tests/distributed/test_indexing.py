"""Reading and writing by indices, of arrays split at random, against NumPy on the whole."""

from __future__ import annotations

import importlib
import operator

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra.numpy import basic_indices
from split_arrays import agree, array_of, drawn_cases, elements, placed, shapes, splits

import shardmath
from shardmath.distribution import BlockCyclic, Box, ProcessGrid, Replicated, Slab
from shardmath.errors import CollectiveMismatch


def plain(key):
    """A key as data that ranks can be sent."""
    if isinstance(key, tuple):
        return ("tuple", [plain(one) for one in key])
    if isinstance(key, slice):
        return ("slice", [key.start, key.stop, key.step])
    if isinstance(key, np.ndarray):
        return ("array", [key.ravel().tolist(), str(key.dtype), list(key.shape)])
    return ("...", None) if key is Ellipsis else ("index", key)


def key_of(data):
    kind, value = data
    if kind == "tuple":
        return tuple(key_of(one) for one in value)
    made = {"slice": lambda: slice(*value), "...": lambda: Ellipsis, "index": lambda: value}
    return made[kind]() if kind in made else np.array(*value[:2]).reshape(value[2])


@st.composite
def indexings(draw, size):
    """An array, an index, and a value that is assigned: its shape, and whether it is split."""
    shape = draw(shapes())
    key = draw(basic_indices(shape, allow_newaxis=True, max_dims=5))
    selected = np.zeros(shape)[key].shape
    kept = selected[draw(st.integers(0, len(selected))) :]
    kept = tuple(1 if draw(st.integers(0, 5)) == 0 else n for n in kept)
    library = draw(st.sampled_from(("numpy", "numpy", "torch")))
    value = draw(st.sampled_from(("number", "plain", "split", "split")))
    other = draw(splits(kept, size)) if value == "split" else None
    return shape, draw(splits(shape, size)), plain(key), library, kept, value, other


def body(context, cases):
    for shape, split, data, library, kept, value, other in cases:
        key, a = key_of(data), elements(shape, "float64")
        x = placed(context, a.copy(), split, library)
        agree(x[key], a[key])
        b = elements(kept, "float64", 1) if value != "number" else 7.5
        y = placed(context, b, other, library) if value == "split" else b
        a[key] = b
        x[key] = y
        agree(x, a)


test_indices = drawn_cases(body, indexings, 8)


@st.composite
def keys_with_arrays(draw, shape):
    """Arrays that broadcast, of indices along some axes, or masks, beside slices and the like."""
    together = tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=2)))
    keys, axis, arrays = [], 0, 0
    while axis < len(shape):
        extent = shape[axis]
        kind = draw(st.sampled_from(["array", "array", "index", "slice", "mask"]))
        if axis == len(shape) - 1 and not arrays:
            kind = "array"
        if kind == "mask" and not arrays:
            held = elements(
                shape[axis:][: draw(st.integers(1, 2))], "bool", draw(st.integers(0, 9))
            )
            keys.append(held)
            together = (np.count_nonzero(held),)
            axis += held.ndim - 1
        elif kind == "index" and extent:
            keys.append(draw(st.integers(-extent, extent - 1)))
        elif kind == "slice":
            keys.append(draw(st.slices(extent)))
        else:
            dims = together if extent else (0,)
            kept = dims[draw(st.integers(0, len(dims) - 1)) :] if arrays else dims
            if not extent:
                together = dims
            numbers = np.random.default_rng(draw(st.integers(0, 99)))
            low, high = (-extent, extent) if extent else (0, 1)
            keys.append(numbers.integers(low, high, kept))
        arrays += isinstance(keys[-1], np.ndarray)
        axis += 1
    if draw(st.booleans()):
        keys.insert(draw(st.integers(0, len(keys))), None)
    if draw(st.integers(0, 3)) == 0:
        keys.insert(draw(st.integers(0, len(keys))), Ellipsis)
    return tuple(keys) if len(keys) > 1 or draw(st.booleans()) else keys[0]


@st.composite
def array_indexings(draw, size):
    """As `indexings`, of keys with arrays."""
    shape = draw(shapes(1))
    key = draw(keys_with_arrays(shape))
    try:
        selected = np.zeros(shape)[key].shape
    except IndexError:  # arrays of an axis without elements, beside others
        key = (np.zeros((0, 1), int),) * len(shape)
        selected = (0, 1)
    kept = selected[draw(st.integers(0, len(selected))) :]
    kept = tuple(1 if draw(st.integers(0, 5)) == 0 else n for n in kept)
    library = draw(st.sampled_from(("numpy", "numpy", "torch")))
    value = draw(st.sampled_from(("number", "plain", "split", "split")))
    other = draw(splits(kept, size)) if value == "split" else None
    return shape, draw(splits(shape, size)), plain(key), library, kept, value, other


test_arrays_of_indices = drawn_cases(body, array_indexings, 10)


@st.composite
def maskings(draw, size):
    """An array and a mask of its first axes, split or the same on all ranks."""
    shape = draw(shapes(1))
    kept = shape[: draw(st.integers(1, len(shape)))]
    library = draw(st.sampled_from(("numpy", "torch")))
    other = draw(st.none() | splits(kept, size))
    return shape, draw(splits(shape, size)), kept, library, other


def mask(context, cases):
    for shape, split, kept, library, other in cases:
        a, m = elements(shape, "float64"), elements(kept, "bool", 1)
        x = placed(context, a.copy(), split, library)
        split_mask = m if other is None else placed(context, m, other, library)
        agree(x[split_mask], a[m])
        a[m] = -1.25
        x[split_mask] = -1.25
        agree(x, a)
        values = elements(a[m].shape, "float64", 2)
        a[m] = values
        x[split_mask] = values
        agree(x, a)
        a[m] *= 2
        x[split_mask] *= 2
        agree(x, a)
        a[m] = values[:1]
        with context:
            x[split_mask] = shardmath.from_global(array_of(context, values[:1], library), Slab.X)
        agree(x, a)


test_masks = drawn_cases(mask, maskings, 4)


def follows(context):
    """The distributions of results; parts are views where NumPy's are."""
    with context:
        x = shardmath.zeros((6, 4), distribution=Slab.X)
        with shardmath.communication("forbid"):
            assert x[:, 1].distribution == Slab.X
            assert x[:, None].distribution == x[..., ::-2].distribution == Slab.X
            assert x[2].distribution == Box((0,), (4,) if context.rank == 0 else (0,))
            assert x[1:].shape == (5, 4)
            x[2:, 1][...] = 3
            x[:, 2:] += 1
            x[0] = np.arange(4)
            assert x[:, [3, 0]].distribution == Slab.X
            x[[0, 5, 5], 1] = 2, 9, 2  # each rank writes what it has, and the last value stays
            x[x[:, 0] < -1] = x[x[:, 0] < -1]
            for call in (lambda: x[[1, 4]], lambda: operator.setitem(x, [1, 4], x[2:4])):
                with pytest.raises(RuntimeError, match=r"of indices: 2 indices|what is assigned"):
                    call()
            with pytest.raises(RuntimeError, match="one element for all ranks"):
                x[0, 0]
        assert x.sum() == 12 + 12 - 2 + 6
        assert x[0, 3].distribution == Replicated()
        cyclic = x.to(BlockCyclic(ProcessGrid(shape=(2, 1)), (1, 4)))
        assert cyclic[:, 1:3].distribution == BlockCyclic(ProcessGrid(shape=(2, 1)), (1, 4))
        assert [float(row.sum()) for row in x] == [7.0, 2.0, 5.0, 5.0, 5.0, 4.0]
        assert len(x) == 6
        for rows, block, key, is_view in (
            (6, 1, slice(0, 5), True),
            (20, 2, slice(1, 17, 3), False),
        ):
            numbers = shardmath.arange(
                rows, distribution=BlockCyclic(ProcessGrid(shape=(2,)), (block,))
            )
            numbers[key][...] = -1  # all ranks have views, or none has: of places 1, 2, 7, 8
            assert (numbers.numpy()[key] == -1).all() == is_view
            assert (numbers == -1).any() == is_view


def test_the_distribution_that_follows(contexts):
    contexts.run(follows, ranks=2)


def given_otherwise(context):
    """Indices as lists, ranges and tensors, and of no axes."""
    torch = importlib.import_module("torch")
    a = np.arange(24.0).reshape(6, 4)
    for library in ("numpy", "torch"):
        x = placed(context, a.copy(), [Slab.X.encode()] * context.size, library)
        tensor = torch.tensor([5, 0, 3])
        for key, same in (
            (range(5, 0, -2), [5, 3, 1]),
            ((range(3), -1), ([0, 1, 2], -1)),
            (tensor, tensor.numpy()),
            ((slice(None), tensor[1:]), (slice(None), [0, 3])),
            (torch.arange(6) > 3, np.arange(6) > 3),
            ((Ellipsis, torch.arange(4) > 1), (Ellipsis, [2, 3])),
            (np.int64(2), 2),
            (np.array(2), 2),
            ([], []),
            ([[True, False, False, True]] * 6, np.array([[True, False, False, True]] * 6)),
        ):
            agree(x[key], a[same])
            x[key] = 2 * x[key] + 1
            a[same] = 2 * a[same] + 1
            agree(x, a)
        for key, same in (([5, 0], [5, 0]), (x[:, 0] > 9, a[:, 0] > 9)):
            for value in ([1, 2, 3, 4], np.int8(5)):  # which become floating numbers
                x[key] = a[same] = value
                agree(x, a)
        with context:
            y = x.to(BlockCyclic(ProcessGrid(shape=(context.size, 1)), (1, 4)))
        y[1:5] = a[1:5] = [5, 6, 7, 8]
        agree(y, a)


@pytest.mark.parametrize("ranks", [1, 3])
def test_indices_that_are_no_arrays_of_numpys(contexts, ranks):
    contexts.run(given_otherwise, ranks=ranks)


def mistakes(context):
    with context:
        x = shardmath.zeros((6, 4), distribution=Slab.X)
        for key in (6, (0, 0, 0), (..., ...), "a", 1.5, (0, -5), (True, 0)):
            with pytest.raises(IndexError):
                x[key]
        for key, words in (
            ([1, 6], "index 6 is out of range for axis 0, of 6"),
            ((0, [-5]), "index -5 is out of range for axis 1, of 4"),
            ([0.5], "give integers or bool"),
            (([1, 2], [1, 2, 3]), r"shapes \(2,\), \(3,\) do not broadcast"),
            (([1], [1], [1]), "3 indices are too many"),
            ((slice(None), np.ones(6, bool)), r"a mask of shape \(6,\) for axis 1"),
            ((..., [1], ...), "more than one ellipsis"),
            (([1], "a"), "'a' is no index for axis 1"),
        ):
            with pytest.raises(IndexError, match=words):
                x[key]
            with pytest.raises(IndexError, match=words):
                x[key] = 1
        for rows, words in (
            ([[0, 5], [1, 4]], r"first 4 indices .* rank 0 has \[0, 5\], rank 1 has \[1, 4\]"),
            ([[0, 5], [1]], "how many indices there are .* rank 1 has 1"),
            ([[0] * 9, [0] * 8 + [1]], "the indices must be equal on all ranks: .* checksum"),
        ):
            with pytest.raises(CollectiveMismatch, match=words):
                x[rows[context.rank]]
        with pytest.raises(ValueError, match=r"a value of shape \(3,\) does not broadcast to"):
            x[[1, 2], [1, 2]] = np.zeros(3)
        with pytest.raises(ValueError, match=r"a value of shape \(3,\) does"):
            x[1:] = np.zeros(3)
        with pytest.raises(ValueError, match="a value of shape"):
            x[1] = np.zeros((2, 4))
        with pytest.raises(IndexError, match="a mask of shape"):
            x[np.zeros(4, bool)] = 0
        with pytest.raises(ValueError, match=r"a value of shape \(3,\) .* to \(0,\)"):
            x[x > 0] = np.zeros(3)
        with pytest.raises(IndexError, match="a mask of shape"):
            x[x[:4] > 0] = np.zeros(3)
        for key in (0, [0], x > 0):  # what one rank cannot write, no rank writes
            with pytest.raises(ValueError, match="could not convert"):
                x[key] = "a"
            with pytest.raises(OverflowError):
                x.astype(np.int8)[key] = 300
        assert not x.sum()


def test_mistakes(contexts):
    contexts.run(mistakes, ranks=2)
