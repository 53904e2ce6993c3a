"""Products of eight-bit floats as plain data, and their oracle: numbers in double, rounded once."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from arrangements import part_of
from shardmath.arrays.dtypes import to_numpy
from shardmath.distribution import BlockCyclic, Box, ProcessGrid, Replicated, Slab

E4, E5 = "float8_e4m3fn", "float8_e5m2"
NUMBERS = {"float32": 0, "float16": 2, "bfloat16": 14, E4: 28, E5: 29}
# Half the distance to the next number: relative, and absolute near zero.
ROUNDING = {
    "float32": (2.0**-24, 0),
    "float16": (2.0**-11, 2.0**-25),
    "bfloat16": (2.0**-8, 0),
    E4: (2.0**-4, 2.0**-10),
    E5: (2.0**-3, 2.0**-17),
}
LARGEST = {E4: 448.0, E5: 57344.0}
SUMS = 2.0**-20  # error of sums in float32, of the norms of a row and a column
MODES = ("tensor", "outer", "vectors", "squares")


def blocks(size):
    rows = 2 if size % 2 == 0 else 1
    grid = ProcessGrid(shape=(rows, size // rows), layout=ProcessGrid.Layout.COL_MAJOR)
    return BlockCyclic(grid, (128, 128))


def odd_blocks(size):
    grid = ProcessGrid(shape=(1, size))
    return BlockCyclic(grid, (5, 24), first_process=(0, size - 1))


def boxes(shape, rank, size):
    """Rows cut unevenly; all but rank 0 have few, the last of several none."""
    bounds = [0, *(max(shape[0] - size + r, 0) for r in range(2, size)), shape[0], shape[0]]
    bounds = bounds[: size + 1] if size > 1 else [0, shape[0]]
    return Box((bounds[rank], 0), (bounds[rank + 1], shape[1]))


LAYOUTS = {
    "rows": lambda *_: (Slab.X, Slab.X, Slab.X),
    "reduce": lambda *_: (Slab.Y, Slab.X, Slab.X),
    "columns": lambda *_: (Slab.Y, Slab.Y, Slab.Y),
    "everywhere": lambda *_: (Slab.Y, Slab.X, Replicated()),
    "copies": lambda *_: (Replicated(), Replicated(), Slab.Y),
    "rows of a": lambda *_: (Slab.X, Slab.Y, Slab.Y),
    "columns of b": lambda *_: (Slab.X, Slab.Y, Slab.X),
    "blocks": lambda shapes, rank, size: (blocks(size),) * 3,
    "odd blocks": lambda shapes, rank, size: (odd_blocks(size), Slab.X, odd_blocks(size)),
    "boxes": lambda shapes, rank, size: (
        boxes(shapes[0], rank, size), Slab.Y, boxes(shapes[2], rank, size),
    ),
}  # fmt: skip


def layout(name, shapes, rank, size):
    """The distributions that `rank` gives for a, b and the result, of these stored shapes."""
    return LAYOUTS[name](shapes, rank, size)


def elements(rng, shape, dtype):
    return rng.standard_normal(shape).astype(to_numpy(dtype))


@lru_cache(maxsize=16)
def factors_of(seed, shape, dtypes):
    """The elements of op(A) and of op(B) of a product of this shape (m, n, k)."""
    rng, (m, n, k) = np.random.default_rng(seed), shape
    whole = elements(rng, (m, k), dtypes[0]), elements(rng, (k, n), dtypes[1])
    for x in whole:
        x.flags.writeable = False
    return whole


def block_shape(mode, index):
    """Rows and columns of a block of op(A) or op(B); None: all."""
    along, k = {
        "tensor": (None, None), "outer": (1, None), "vectors": (1, 128), "squares": (128, 128),
    }[mode]  # fmt: skip
    return (along, k) if index == 0 else (k, along)


def local_scales(mode, index, ids, seed):
    """Scales of the part of op(A) or op(B) whose elements have the flat numbers `ids`.

    They depend on nothing but the elements, so that ranks with the same ones have the same.
    """
    if mode == "tensor":
        return np.float32(0.375 + seed % 5)
    rows, columns = block_shape(mode, index)
    counts = [
        1 if b is None else -(-n // b) for n, b in zip(ids.shape, (rows, columns), strict=True)
    ]
    if mode == "outer":  # by the row or the column alone: its other elements may be elsewhere
        along = ids.shape[index]
        line = ids[:, :1] if index == 0 else ids[:1]
        number = np.zeros((along,), int) if line.size == 0 else line.reshape(-1)
        return number.reshape(counts)
    first = ids[:: rows or max(1, len(ids)), :: columns or max(1, ids.shape[1])]
    return (0.5 + np.sin(first.reshape(counts) * 0.7 + seed) ** 2).astype(np.float32)


def scales_of(mode, index, whole_shape, ids, seed):
    """The same with values for "outer"."""
    made = local_scales(mode, index, ids, seed)
    if mode != "outer":
        return made
    number = made // whole_shape[1] if index == 0 else made % whole_shape[1]
    return (0.5 + np.sin(number * 0.7 + seed) ** 2).astype(np.float32)


def expanded(scales, mode, index, shape):
    """The scale of each element."""
    if np.ndim(scales) == 0:
        return np.full(shape, scales, np.float64)
    made = scales.astype(np.float64)
    for axis, block in enumerate(block_shape(mode, index)):
        made = made.repeat(block or max(shape[axis], 1), axis=axis)
    return made[: shape[0], : shape[1]]


class Factor:
    """op(A), index 0, or op(B), index 1: parts and scales of all ranks, and all numbers in double.

    `part` and `scales` are those of `rank`.
    """

    def __init__(self, index, whole, mode, dists, rank, seed, transposed=False):
        ids = np.arange(whole.size).reshape(whole.shape)
        self.numbers = np.zeros(whole.shape)
        self.parts, self.all_scales = [], []
        for each, dist in enumerate(dists):
            if each and isinstance(dist, Replicated):  # all as rank 0
                self.parts.append(self.parts[0])
                self.all_scales.append(self.all_scales[0])
                continue
            stored = ids.T if transposed else ids
            mine = part_of(stored, dist, each, len(dists))
            mine = mine.T if transposed else mine
            scales = scales_of(mode, index, whole.shape, mine, seed)
            part = whole.reshape(-1)[mine]
            value = part.astype(np.float64) * expanded(scales, mode, index, mine.shape)
            self.numbers.reshape(-1)[mine.reshape(-1)] = value.reshape(-1)
            self.parts.append(np.array(part.T if transposed else part))
            is_turned = transposed and np.ndim(scales) == 2
            self.all_scales.append(scales.T if is_turned else scales)
        self.part, self.scales = self.parts[rank], self.all_scales[rank]


def bound(want, a, b, result, *, scale_d=1.0, sums=SUMS):
    """How far a good result may be from `want`, which `scale_d` has multiplied."""
    norms = np.outer(np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=0))
    relative, absolute = ROUNDING[result]
    slack = sums * norms * abs(scale_d) + 4e-7 * abs(want)
    return slack * 1.5 + relative * (abs(want) + slack) * 1.01 + absolute + 1e-30


def clipped(want, result):
    most = LARGEST.get(result, np.inf)
    return np.clip(want, -most, most)
