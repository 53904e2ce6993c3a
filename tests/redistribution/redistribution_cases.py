"""Random redistributions as plain data, and the trivial oracle: slices of one global array."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from shardmath.geometry import (
    BlockCyclic,
    BlockNonCyclic,
    Box,
    ProcessGrid,
    Replicated,
    Slab,
    decode,
)

NUMPY_DTYPES = ("u1", "i2", "f4", "f8", "c16", "S3", "V12")
TORCH_DTYPES = ("uint8", "bfloat16", "float32", "float64", "complex128")
STORES = ("C", "F", "strided", "reversed", "heap C", "heap F", "heap strided")


def global_array(shape, dtype):
    """Elements that differ wherever their bytes suffice to tell them apart."""
    dtype = np.dtype(dtype)
    count = math.prod(shape)
    numbers = np.arange(1, count + 1, dtype="<u8") * 0x9E3779B97F4A7C15
    raw = np.tile(numbers.view("u1").reshape(count, 8), (1, -(-dtype.itemsize // 8)))
    raw = np.ascontiguousarray(raw[:, : dtype.itemsize])
    return raw.reshape(-1).view(dtype).reshape(shape) if count else np.zeros(shape, dtype)


def part_of(array, distribution, rank, size):
    """What `rank` owns, by index ranges."""
    if isinstance(distribution, Box):
        ranges = [[pair] for pair in zip(distribution.lower, distribution.upper, strict=True)]
    else:
        ranges = distribution.index_ranges(rank, array.shape, size=size)
    indices = [
        np.array([i for lo, hi in axis for i in range(lo, hi)], dtype=np.intp) for axis in ranges
    ]
    return array[np.ix_(*indices)]


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
    return set(rest.tobytes()) <= {0x5A}


@st.composite
def grids(draw, size, ndim):
    extents = [1] * ndim
    rest = size
    for prime in (2, 3, 5):
        while rest % prime == 0:
            rest //= prime
            extents[draw(st.integers(0, ndim - 1))] *= prime
    if draw(st.booleans()):
        return ProcessGrid(shape=extents, layout=draw(st.sampled_from(list(ProcessGrid.Layout))))
    order = draw(st.permutations(range(size)))
    return ProcessGrid(process_array=np.array(order).reshape(extents))


@st.composite
def box_partitions(draw, shape, size):
    """`size` boxes that tile `shape`, by halving one of them again and again, in any order."""
    boxes = [((0,) * len(shape), tuple(shape))]
    while len(boxes) < size:
        lower, upper = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(lower[axis], upper[axis]))
        boxes.append((lower, (*upper[:axis], cut, *upper[axis + 1 :])))
        boxes.append(((*lower[:axis], cut, *lower[axis + 1 :]), upper))
    return [Box(*box) for box in draw(st.permutations(boxes))]


@st.composite
def distributions(draw, shape, size):
    """What each rank gives, encoded."""
    ndim = len(shape)
    kind = draw(st.sampled_from(["slab", "box", "cyclic", "noncyclic", "replicated"]))
    if kind == "box":
        return [box.encode() for box in draw(box_partitions(shape, size))]
    if kind == "slab":
        made = Slab(draw(st.integers(0, ndim - 1)))
    elif kind == "replicated":
        made = Replicated()
    else:
        grid = draw(grids(size, ndim))
        first = [draw(st.integers(0, extent - 1)) for extent in grid.shape]
        if kind == "cyclic":
            blocks = [draw(st.integers(1, 9)) for _ in shape]
            made = BlockCyclic(grid, blocks, first_process=first)
        else:
            made = BlockNonCyclic(grid, first_process=first)
    return [made.encode()] * size


_EXTENTS = st.one_of(st.sampled_from([0, 1, 7, 8, 9]), st.integers(0, 40))
_LARGEST = {1: 40, 2: 40, 3: 40, 4: 16}


@st.composite
def cases(draw):
    """(ranks, global shape, inputs, outputs, library, dtype, store of each rank, store of out)."""
    size = draw(st.integers(1, 6))
    ndim = draw(st.integers(1, 4))
    shape = tuple(min(draw(_EXTENTS), _LARGEST[ndim]) for _ in range(ndim))
    library = draw(st.sampled_from(["numpy", "numpy", "torch"]))
    dtype = draw(st.sampled_from(NUMPY_DTYPES if library == "numpy" else TORCH_DTYPES))
    stores = STORES if library == "numpy" else tuple(s for s in STORES if s != "reversed")
    return (
        size,
        shape,
        draw(distributions(shape, size)),
        draw(distributions(shape, size)),
        library,
        dtype,
        [draw(st.sampled_from(stores)) for _ in range(size)],
        draw(st.sampled_from(["none", "none", *stores])),
    )


def decoded(encoded, rank):
    return decode(encoded[rank])
