"""Operands for the tests: elements of every type, arrays in every form, and an oracle."""

from __future__ import annotations

import functools
import zlib
from itertools import product

import ml_dtypes
import numpy as np
import torch

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
INTEGERS = [f"{sign}int{bits}" for bits in (8, 16, 32, 64) for sign in ("", "u")]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
DTYPES = ["bool", *INTEGERS, *FLOATS, "complex64", "complex128"]
OPS = ["sum", "min", "max", "product", "mean"]
FORMS = ["plain", "fortran", "strided", "reversed", "heap", "torch", "torch_strided", "torch_heap"]
SPECIALS = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, 1.5)
SENTINEL = 77
PERIOD = 65_537  # a prime: blocks of no length that matters begin alike
_UFUNC = {
    "sum": np.add,
    "mean": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
}


def numpy_dtype(name):
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


def reduces(op, dtype):
    return not (dtype.startswith("complex") and op in ("min", "max"))


def values(dtype, shape, rank, seed=0):
    """Rank `rank`'s elements; any rank can compute them. Those of large arrays come again."""
    count = int(np.prod(shape))
    return np.resize(_some(dtype, min(count, PERIOD), rank, seed), shape)


@functools.lru_cache(64)
def _some(dtype, count, rank, seed):
    generator = np.random.default_rng([seed, rank])
    wide = 3 * generator.standard_normal(count)  # sums are rounded, and so depend on their order
    if dtype == "bool":
        return wide > 0
    if dtype.startswith("complex"):
        wide = wide + 1j * generator.integers(-9, 9, count)
    if dtype.startswith("uint"):
        wide = np.abs(wide)
    return wide.astype(numpy_dtype(dtype))


def special_values(dtype, rank, size):
    """Rank `rank`'s column of all combinations of special values over `size` ranks."""
    table = np.array(list(product(SPECIALS, repeat=size)))
    return table[:, rank].astype(numpy_dtype(dtype))


def reduced(op, parts):
    """The oracle: NumPy, rank after rank."""
    dtype, wide = parts[0].dtype, parts[0].dtype
    if dtype in (BFLOAT16, np.dtype("float16")):
        wide = np.dtype("float32")
    if op == "mean" and dtype.kind in "iub":
        dtype = wide = np.dtype("float64")
    with np.errstate(all="ignore"):
        total = functools.reduce(_UFUNC[op], [part.astype(wide, copy=False) for part in parts])
        if op == "mean":
            total = np.divide(total, len(parts), dtype=wide)
        return np.asarray(total).astype(dtype)


def formed(form, elements, context):
    """An array of that form with these elements."""
    if form.startswith("torch"):
        host = formed(
            {"torch": "plain", "torch_heap": "heap"}.get(form, "strided"), elements, context
        )
        if host.dtype == BFLOAT16:
            return torch.from_numpy(host.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(host)
    if form == "heap":
        raw = np.asarray(context.heap.allocate(elements.nbytes))
        array = raw[: elements.nbytes].view(elements.dtype).reshape(elements.shape)
    elif form == "fortran":
        array = np.empty(elements.shape, elements.dtype, "F")
    elif form == "strided":
        array = np.empty([2 * n + 1 for n in elements.shape], elements.dtype)
        array = array[tuple(slice(0, 2 * n, 2) for n in elements.shape)]
    elif form == "reversed":
        array = np.empty(elements.shape, elements.dtype)
        array = array[tuple(slice(None, None, -1) for _ in elements.shape)]
    else:
        array = np.empty(elements.shape, elements.dtype)
    array[...] = elements
    return array


def elements_of(array):
    """The elements of any library's array as NumPy's."""
    if not isinstance(array, torch.Tensor):
        return np.asarray(array)
    if array.dtype == torch.bfloat16:
        return array.view(torch.int16).numpy().view(BFLOAT16)
    return array.numpy()


def framed(shape, dtype, library="numpy"):
    """A strided array amid sentinels, and a function that says whether they are untouched."""
    whole = np.full([2 * n + 3 for n in shape], SENTINEL, numpy_dtype(dtype))
    inside = tuple(slice(1, 2 * n + 1, 2) for n in shape)

    def untouched(also_inside=False):
        now = whole.copy()
        if not also_inside:
            now[inside] = SENTINEL
        return now.tobytes() == np.full_like(whole, SENTINEL).tobytes()

    view = whole[inside]
    if library == "torch":
        if view.dtype == BFLOAT16:
            return torch.from_numpy(whole.view(np.int16)).view(torch.bfloat16)[inside], untouched
        return torch.from_numpy(view), untouched
    return view, untouched


def same(found, wanted):
    """Equal in shape, dtype, values, NaN and the sign of zero."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    if found.tobytes() == wanted.tobytes():
        return True
    if found.dtype in (BFLOAT16, np.dtype("float16")):
        found, wanted = found.astype(np.float32), wanted.astype(np.float32)
    if not np.array_equal(found, wanted, equal_nan=found.dtype.kind in "fc"):
        return False
    if found.dtype.kind != "f":
        return True
    real = ~np.isnan(found)
    return bool((np.signbit(found) == np.signbit(wanted))[real].all())


def close(found, wanted):
    """As `same`, but products of complex numbers may be rounded otherwise in other chunks."""
    return found.dtype == wanted.dtype and np.allclose(found, wanted, rtol=1e-5, equal_nan=True)


def digest(array):
    """A number that tells elements of other bits apart."""
    return zlib.crc32(np.ascontiguousarray(elements_of(array)).reshape(-1).view(np.uint8))
