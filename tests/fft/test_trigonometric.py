"""Cosine and sine transforms of parts in any distribution, against scipy.fft on the whole."""

from __future__ import annotations

import math
from functools import partial
from random import Random
from unittest.mock import patch

import numpy as np
import pytest
import scipy.fft
from fft_cases import (
    AXES,
    BLOCKS,
    DIMENSIONS,
    EXTENTS,
    LARGEST,
    NORMS,
    STORES,
    close,
    of_both_parts,
    placed,
    to_host,
    untouched,
)
from hypothesis import given
from hypothesis import strategies as st

from arrangements import SEEDS, distributions, part_of
from draws import drawn
from mistakes import heard, misses
from shardmath import fft
from shardmath.distribution import Slab
from shardmath.geometry import decode
from shardmath.program import passes

NAMES = ("dct", "idct", "dst", "idst")
TYPES = ("float32", "float64", "complex64", "complex128", "float16")


@st.composite
def cases(draw, most=4):
    """A call as a dictionary of plain data, on 1 to `most` ranks."""
    size = draw(st.integers(1, most))
    ndim = draw(DIMENSIONS)
    number = draw(st.sampled_from((1, 2, 3, 4)))
    name = draw(st.sampled_from(NAMES))
    least = 1 + (number == 1 and name.endswith("dct"))
    shape = tuple(max(least, min(draw(EXTENTS), LARGEST[ndim])) for _ in range(ndim))
    axes = draw(AXES[ndim])
    rng = Random(draw(SEEDS))
    batch = [axis for axis in range(ndim) if axis not in axes]
    if batch and rng.random() < 0.1:
        shape = tuple(0 if axis == batch[0] else n for axis, n in enumerate(shape))
    library = rng.choice(["numpy", "numpy", "torch"])
    stores = STORES if library == "numpy" else tuple(s for s in STORES if s != "reversed")
    inputs, outputs = draw(distributions(shape, size)), draw(distributions(shape, size))
    return {
        "size": size,
        "shape": shape,
        "name": name,
        "words": {
            "type": number,
            "norm": rng.choice(NORMS),
            "orthogonalize": rng.choice([None, None, True, False]),
        },
        "axes": axes if len(axes) < ndim or rng.random() < 0.5 else None,
        "inputs": inputs,
        "outputs": rng.choice([None, outputs]),
        "library": library,
        "dtype": rng.choice(TYPES),
        "stores": [rng.choice(stores) for _ in range(size)],
        "block": max(rng.choice([64, 700, 2 << 20]), math.prod(shape) * 16 // BLOCKS),
        "out": rng.choice(["none", "none", "operand", *stores]),
    }


def run_case(context, case):
    with (
        patch.object(passes, "BLOCK_BYTES", case["block"]),  # small arrays in many blocks
        patch.object(context, "caches", {}),
    ):
        check_case(context, case)


def check_case(context, case):
    rank, size = context.rank, context.size
    form, axes, words = case["library"], case["axes"], case["words"]
    wide = "complex128" if case["dtype"].startswith("complex") else "float64"
    rng = np.random.default_rng(math.prod(case["shape"]))
    array = rng.standard_normal(case["shape"]).astype(wide)
    if wide == "complex128":
        array += 1j * rng.standard_normal(case["shape"])
    array = array.astype(case["dtype"])
    full = array.astype(wide)
    if array.size:
        transform = partial(getattr(scipy.fft, f"{case['name']}n"), axes=axes, **words)
        full = of_both_parts(transform, full)
    source = decode(case["inputs"][rank])
    target = source if case["outputs"] is None else decode(case["outputs"][rank])
    part, want = part_of(array, source, rank, size), part_of(full, target, rank, size)
    operand, around = placed(context, form, part, case["stores"][rank])
    dtype = np.dtype("float32" if case["dtype"] == "float16" else case["dtype"])
    out, whole = None, None
    if case["out"] == "operand" and (part.shape, part.dtype) == (want.shape, dtype):
        out = operand
    elif case["out"] not in ("none", "operand"):
        out, whole = placed(context, form, np.zeros(want.shape, dtype), case["out"])
    given_as = {"distribution": (source, target), "out": out}
    with context:
        if axes is not None and len(axes) == 1:
            got = getattr(fft, case["name"])(operand, axis=axes[0], **words, **given_as)
        else:
            got = getattr(fft, f"{case['name']}n")(operand, axes=axes, **words, **given_as)
    assert out is None or got is out
    host = to_host(got)
    assert (host.dtype, host.shape) == (dtype, want.shape)
    count = math.prod(full.shape[axis] for axis in axes or range(full.ndim))
    assert close(host, want, 4 * count)
    if out is not operand:
        assert to_host(operand).tobytes() == part.tobytes()
    assert untouched(around, part.shape)
    assert untouched(whole, want.shape)


@drawn(100)
@given(case=cases())
def test_any_cosines_and_sines(contexts, case):
    contexts.run(run_case, case, ranks=case["size"])


def back(context):
    x = np.random.default_rng(context.rank).standard_normal((4, 6)).astype("f4")
    with context:
        for number in (1, 2, 3, 4):
            words = {"type": number, "distribution": Slab.X}
            spectrum = fft.dstn(fft.dct(x, axis=0, **words), norm="ortho", **words)
            again = fft.idct(fft.idstn(spectrum, norm="ortho", **words), axis=0, **words)
            assert np.abs(again - x).max() < 1e-5
        in_place = x.copy()
        assert fft.dctn(in_place, distribution=Slab.X, options={"inplace": True}) is in_place
        assert np.abs(fft.idctn(in_place, distribution=Slab.X) - x).max() < 1e-5
        slabs = fft.dctn(x, distribution=Slab.X, options={"redistribute": False})
        assert slabs.shape == (4 * context.size, 6 // context.size)


def test_there_and_back(contexts):
    contexts.run(back, ranks=2)


WRONG = {
    "another type": (lambda x: fft.dct(x, 5, distribution=Slab.X), "type of dct is 1, 2, 3 or 4"),
    "a type that is no number": (
        lambda x: fft.dstn(x, "2", distribution=Slab.X),
        "type of dst is 1, 2, 3 or 4",
    ),
    "one element of type 1": (
        lambda x: fft.idct(x[:, :1], 1, distribution=Slab.X),
        "axis 1 .* has extent 1: a DCT of type 1 takes 2",
    ),
    "another norm": (lambda x: fft.idst(x, norm="none", distribution=Slab.X), "norm is None"),
    "orthogonalize": (
        lambda x: fft.dct(x, orthogonalize="yes", distribution=Slab.X),
        "orthogonalize is None, True or False",
    ),
    "other extents": (
        lambda x: fft.dct(x, n=3, distribution=Slab.X),
        r"shardmath\.array\(part, distribution\)",
    ),
    "integers": (lambda x: fft.dct(x.astype(int), distribution=Slab.X), "has dtype int64"),
    "a kind of fft": (
        lambda x: fft.dct(x, distribution=Slab.X, options={"fft_type": "R2C"}),
        "leave them out",
    ),
    "no distribution": (fft.dct, "distribution is one such as"),
    "another axis": (lambda x: fft.dct(x, axis=2, distribution=Slab.X), "are not axes"),
}


def refused(context, mistake, wrong_ranks):
    call, words = WRONG[mistake]
    x = np.ones((3, 4))
    with context, pytest.raises((ValueError, TypeError, NotImplementedError), match=words):
        if context.rank in wrong_ranks:
            call(x)
        else:
            fft.dct(x, distribution=Slab.X)


@pytest.mark.parametrize("mistake", WRONG)
def test_mistakes_are_the_same_on_all_ranks(contexts, mistake):
    contexts.run(refused, mistake, (0, 1), ranks=2)


def differ(context):
    x, first = np.ones((3, 4)), context.rank == 0
    with context:
        return {
            "kind of transform": heard(lambda: fft.dct(x, 2 + first, distribution=Slab.X)),
            "norm": heard(lambda: fft.dct(x, norm="forward" * first or None, distribution=Slab.X)),
            "axes": heard(lambda: fft.dct(x, axis=int(first), distribution=Slab.X)),
            "dst": heard(lambda: (fft.dct if first else fft.dst)(x, distribution=Slab.X)),
        }


def test_calls_that_differ(contexts):
    said = contexts.run(differ, ranks=2)
    assert not misses(said, lambda word: (ValueError, word))
