"""Arrays split at random, and what NumPy makes of the whole: the oracle of every function."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import replace
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import shardmath
from arrangements import distributions, part_of
from draws import drawn
from shardmath import machine
from shardmath.arrays import library_named, library_of
from shardmath.arrays.dtypes import to_numpy
from shardmath.distributed import DistributedArray, dense, parts
from shardmath.geometry import Box, Replicated, decode

__all__ = [
    "agree",
    "array_of",
    "as_on_gpus",
    "drawn_cases",
    "elements",
    "host",
    "lists_of",
    "placed",
    "shapes",
    "splits",
]

ON_GPUS = {"numpy": "cupy", "torch": "torch"}  # the library of parts, of ranks with GPUs
importlib.import_module("torch")  # once, and not by each rank
EXTENTS = st.sampled_from([0, 1, 2, 3, 5, 8])
ONE = Replicated().encode()


def shapes(least=0, most=3):
    return st.lists(EXTENTS, min_size=least, max_size=most).map(tuple)


def splits(shape, size):
    """A distribution of an array of that shape, as each rank encodes it."""
    return distributions(shape, size) if shape else st.just([ONE] * size)


@st.composite
def lists_of(draw, case, *, most=20, ranks=4):
    """A number of ranks, and cases that they compute in one go: `case(size)` is a strategy."""
    size = draw(st.integers(1, ranks))
    return size, draw(st.lists(case(size), min_size=1, max_size=most))


def drawn_cases(body, case, examples, *, most=20, shrunk=True, also_as_on_gpus=False):
    """A test that draws so many lists of cases, and has `body(context, cases)` perform each list on
    a drawn number of ranks, once more by `as_on_gpus` where that is asked for. Arguments otherwise
    as `lists_of` and `drawn`.
    """

    def test(contexts, both):
        size, cases = both
        contexts.run(body, cases, ranks=size)
        if also_as_on_gpus:
            contexts.run(as_on_gpus, body.__module__, body.__name__, cases, ranks=size)

    test.__name__ = test.__qualname__ = body.__name__  # from which the first seed is made
    return drawn(examples, shrunk=shrunk)(given(both=lists_of(case, most=most))(test))


def elements(shape, dtype, seed=0):
    """Elements of a type, some of them equal."""
    numbers = np.random.default_rng(seed).integers(-9, 10, shape)
    native = to_numpy(dtype)
    if native.kind in "bu":
        numbers = numbers > 0 if native.kind == "b" else np.abs(numbers)
    elif native.kind == "c":
        numbers = numbers + 2j * (numbers % 3)
    return np.asarray(numbers if native.kind in "biu" else numbers / 4).astype(native)


def placed(context, x, encoded, library="numpy"):
    """The array `x` of all ranks, split, of which this rank passes its part."""
    distribution = decode(encoded[context.rank])
    part = np.array(part_of(x, distribution, context.rank, context.size), x.dtype)
    with context:
        return shardmath.array(array_of(context, part, library), distribution)


def array_of(context, part, library):
    """An array of the library in the memory where ranks of the context compute; text is NumPy's."""
    if part.dtype.kind == "S":
        return part
    device = "cpu" if context.team is None else context.team.device.name
    is_there = library_of(part).spec(part).device == device  # also on a pretended GPU
    of_parts = library_named(library if is_there else ON_GPUS[library])
    importlib.import_module(of_parts.name)  # as whoever has an array of it has done
    return parts.on_device(part, of_parts, device)


def as_on_gpus(context, module, body, *arguments):
    """A body by names, in which matrices are decomposed as on GPUs: by the library of the parts,
    where NumPy stands for CuPy, and in panels that are narrow enough for small matrices to have
    several.
    """
    own = patch.object(dense, "workable", lambda part: part)
    narrow = patch.object(machine, "H200", replace(machine.H200, panel=48))
    with own, narrow, patch.object(dense, "is_on_cores", lambda _: False):
        return getattr(importlib.import_module(module), body)(context, *arguments)


def host(x):
    """The part of this rank as NumPy's array."""
    return x.local if isinstance(x.local, np.ndarray) else parts.on_host(x.local)


def agree(got, expected, *, close=False, strict=True):
    """Whether every rank's part, and the whole, is what NumPy has; types too where `strict`."""
    expected = np.asarray(expected)
    assert isinstance(got, DistributedArray), type(got)
    assert got.shape == expected.shape
    compare = np.testing.assert_allclose if close else np.testing.assert_array_equal
    tolerance = {"rtol": 1e-2 if got.local.dtype.itemsize <= 2 else 1e-5, "atol": 1e-5}
    words = tolerance if close else {}
    if strict:
        assert host(got).dtype == expected.dtype
    part = part_of(expected, got.distribution, got.context.rank, got.context.size)
    assert host(got).shape == part.shape == got.layout.local_shape(got.context.rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compare(host(got), part, **words)
    if isinstance(got.distribution, Box):  # which each rank gives by itself
        with got.context:
            assert shardmath.array(got.local, got.distribution).layout.same_as(got.layout)
