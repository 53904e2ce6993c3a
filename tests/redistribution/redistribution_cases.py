"""Random redistributions as plain data, and the trivial oracle: slices of one global array."""

from __future__ import annotations

import math
from random import Random

import numpy as np
from hypothesis import strategies as st

from arrangements import SEEDS, distributions
from shardmath.geometry import decode

NUMPY_DTYPES = ("u1", "i2", "f4", "f8", "c16", "S3", "V12")
TORCH_DTYPES = ("uint8", "bfloat16", "float32", "float64", "complex128")
DTYPES = {"numpy": NUMPY_DTYPES, "torch": TORCH_DTYPES, "cupy": NUMPY_DTYPES[:5]}
STORES = ("C", "F", "strided", "reversed", "heap C", "heap F", "heap strided")


def global_array(shape, dtype):
    """Elements that differ wherever their bytes suffice to tell them apart."""
    dtype = np.dtype(dtype)
    count = math.prod(shape)
    numbers = np.arange(1, count + 1, dtype="<u8") * 0x9E3779B97F4A7C15
    raw = np.tile(numbers.view("u1").reshape(count, 8), (1, -(-dtype.itemsize // 8)))
    raw = np.ascontiguousarray(raw[:, : dtype.itemsize])
    return raw.reshape(-1).view(dtype).reshape(shape) if count else np.zeros(shape, dtype)


def stored(part, how, empty):
    """A copy of `part`, laid out in memory `how`; `empty(shape, dtype, order)` gives memory.

    Strided copies lie in a larger array whose other elements are sentinels: (copy, whole).
    """
    if how in ("C", "F"):
        whole = empty(part.shape, part.dtype, how)
        whole[...] = part
        return whole, None
    whole = empty(tuple(2 * n + 3 for n in part.shape), part.dtype, "C")
    whole.view("u1")[...] = 0x5A
    inner = whole[tuple(slice(1, 1 + 2 * n, 2) for n in part.shape)]
    if how == "reversed":
        inner = inner[(slice(None, None, -1),) * part.ndim]
    inner[...] = part
    return inner, whole


def untouched(inner, whole):
    """Whether the sentinels around a strided copy are as they were."""
    if whole is None:
        return True
    rest = whole.copy()
    rest[tuple(slice(1, 1 + 2 * n, 2) for n in inner.shape)] = np.frombuffer(
        b"\x5a" * whole.itemsize, whole.dtype
    )[0]
    return bool((np.frombuffer(rest.tobytes(), np.uint8) == 0x5A).all())


_EXTENTS = st.one_of(st.sampled_from([0, 1, 7, 8, 9]), st.integers(0, 40))
_LARGEST = {1: 40, 2: 40, 3: 40, 4: 16}
_AXES = st.integers(1, 4)


@st.composite
def cases(draw, least=1, most=6, libraries=("numpy", "numpy", "torch"), stores=STORES):
    """(ranks, global shape, inputs, outputs, library, dtype, store of each rank, store of out)."""
    size = draw(st.integers(least, most))
    ndim = draw(_AXES)
    shape = tuple(min(draw(_EXTENTS), _LARGEST[ndim]) for _ in range(ndim))
    rng = Random(draw(SEEDS))
    library = rng.choice(libraries)
    dtype = rng.choice(DTYPES[library])
    if library == "torch":
        stores = tuple(store for store in stores if store != "reversed")
    return (
        size,
        shape,
        draw(distributions(shape, size)),
        draw(distributions(shape, size)),
        library,
        dtype,
        rng.choices(stores, k=size),
        rng.choice(["none", "none", *stores]),
    )


def decoded(encoded, rank):
    return decode(encoded[rank])
