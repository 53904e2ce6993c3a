"""Random transforms as plain data, and the oracle: scipy.fft on the global array in float64."""

from __future__ import annotations

import importlib
import math
from functools import partial
from itertools import permutations, product
from random import Random

import numpy as np
import scipy.fft
from hypothesis import strategies as st

from arrangements import SEEDS, distributions
from shardmath.arrays import dtypes, library_named
from shardmath.handles.allocation import empty_on_heap
from shardmath.local.trigonometric import SERIES

EXTENTS = st.one_of(st.sampled_from([1, 7, 8, 9, 13, 31, 37]), st.integers(1, 40))
LARGEST = {1: 40, 2: 40, 3: 20, 4: 9}
STORES = ("C", "F", "strided", "reversed", "heap C", "heap F", "heap strided")
BLOCKS = 64  # at most about so many of an array: each takes a few calls, however small it is
AXES = {  # one or more axes of an array of as many as that, in any order
    ndim: st.sampled_from([x for k in range(1, ndim + 1) for x in permutations(range(ndim), k)])
    for ndim in LARGEST
}
DIMENSIONS = st.sampled_from(list(LARGEST))
KINDS = st.sampled_from(list(product(["C2C", "C2C inverse", "R2C", "C2R"], ["even", "odd"])))
NORMS = (None, "backward", "ortho", "forward")
REAL = ("float32", "float64", "float16")
COMPLEX = ("complex64", "complex128")
HALVES = np.dtype([("real", "f2"), ("imag", "f2")])  # complex32
RESULTS = {
    "R2C": {
        **{"float16": "complex64", "bfloat16": "complex64"},
        **{"float32": "complex64", "float64": "complex128"},
    },
    "C2R": {"complex32": "float16", "complex64": "float32", "complex128": "float64"},
}


@st.composite
def cases(draw, most=6, least=1):
    """A call as a dictionary of plain data, on `least` to `most` ranks."""
    size = draw(st.integers(least, most))
    ndim = draw(DIMENSIONS)
    shape = tuple(min(draw(EXTENTS), LARGEST[ndim]) for _ in range(ndim))
    axes = draw(AXES[ndim])
    kind, parity = draw(KINDS)
    rng = Random(draw(SEEDS))
    if rng.random() < 0.5 and len(axes) == ndim:
        axes = None
    last = (axes or range(ndim))[-1]
    if kind == "C2R" and shape[last] == 1:
        parity = "odd"
    batch = [axis for axis in range(ndim) if axes is not None and axis not in axes]
    if batch and rng.random() < 0.1:  # an empty batch
        shape = tuple(0 if axis == batch[0] else n for axis, n in enumerate(shape))
    made = result_shape(shape, last, kind, parity)
    inputs = draw(distributions(shape, size))
    outputs = draw(distributions(made, size))
    alone = kind.startswith("C2C") or inputs[0][0] != "Box"
    library = rng.choice(["numpy", "numpy", "torch"])
    dtype = rng.choice(REAL if kind == "R2C" else COMPLEX)
    if library == "torch" and dtype in ("float16", "complex64") and rng.random() < 0.5:
        dtype = "float16 halves" if kind == "R2C" else "complex32"
    stores = STORES if library == "numpy" else tuple(s for s in STORES if s != "reversed")
    return {
        "size": size,
        "shape": shape,
        "axes": axes if axes is None else tuple(axis - ndim * (axis % 2) for axis in axes),
        "kind": kind,
        "parity": parity,
        "norm": rng.choice(NORMS),
        "inputs": inputs,
        "outputs": None if alone and rng.random() < 0.5 else outputs,
        "library": library,
        "dtype": dtype,
        "stores": [rng.choice(stores) for _ in range(size)],
        "block": max(rng.choice([64, 700, 2 << 20]), math.prod(shape) * 16 // BLOCKS),
        "out": rng.choice(["none", "none", "operand", *stores]),
    }


def result_shape(shape, last, kind, parity):
    made = list(shape)
    if kind == "R2C":
        made[last] = shape[last] // 2 + 1
    if kind == "C2R":
        made[last] = 2 * (shape[last] - 1) + (parity == "odd")
    return tuple(made)


def options_of(case):
    """What the call is told besides."""
    return {"last_axis_parity": case["parity"], "halves": case["dtype"] == "float16 halves"}


def result_dtype(case):
    """The name of the type of the result, of cosines and sines too, which have no kind."""
    if case["dtype"] == "float16 halves":
        return "complex32"
    return RESULTS.get(case.get("kind"), {}).get(case["dtype"], case["dtype"])


def placed(context, form, part, store):
    """`part` as the user would hold it: (array, the whole around it or None).

    `form` is a library; "torch gpu" has the array on the rank's GPU, "torch cpu" in the host's
    memory beside one. Strided arrays lie in a larger one whose other elements are sentinels.
    """
    name, _, where = form.partition(" ")
    library = library_named(name)
    order = "F" if store.endswith("F") else "C"
    strided = store.endswith(("strided", "reversed"))
    shape = tuple(2 * n + 3 for n in part.shape) if strided else part.shape
    device = f"cuda:{context.device_id}" if where == "gpu" else "cpu"
    if store.startswith("heap") and where != "cpu":
        whole = empty_on_heap(context, library, shape, part.dtype, order)
    else:
        whole = library.empty(shape, part.dtype, order, device)
    array = whole
    if strided:
        fill(whole, as_type(np.full(shape, 77), part.dtype))
        array = whole[tuple(slice(1, 1 + 2 * n, 2) for n in part.shape)]
    if store == "reversed" and name != "torch":
        array = array[(slice(None, None, -1),) * part.ndim]
    fill(array, part)
    return array, whole if strided else None


def untouched(whole, shape):
    """Whether the sentinels around a strided array are as they were."""
    if whole is None:
        return True
    rest = to_host(whole)
    rest[tuple(slice(1, 1 + 2 * n, 2) for n in shape)] = 77
    return bool((wide(rest).real == 77).all())


def as_type(array, dtype):
    """Numbers in a type that may be complex32."""
    if dtype != HALVES:
        return array.astype(dtype)
    made = np.empty(array.shape, HALVES)
    made["real"], made["imag"] = array.real, array.imag
    return made


def wide(array):
    """In double precision."""
    if array.dtype == HALVES:
        return array["real"].astype(np.float64) + 1j * array["imag"]
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def operand_of(case):
    """The global operand: numbers of both signs, the same on all ranks."""
    rng = np.random.default_rng(math.prod(case["shape"]) + len(case["kind"]))
    array = rng.standard_normal(case["shape"])
    if case["dtype"].startswith("complex"):
        array = array + 1j * rng.standard_normal(case["shape"])
    return as_type(array, dtypes.to_numpy(case["dtype"].split()[0]))


def to_host(array):
    """A NumPy copy of an array of any library, wherever it lies."""
    if hasattr(array, "get"):
        return array.get()
    if hasattr(array, "cpu"):
        return library_named("torch").host_view(array.cpu()).copy()
    return np.array(array)


def fill(array, part):
    """Copy a NumPy array into one of any library, wherever it lies."""
    if type(array).__module__.startswith("cupy"):
        array[...] = importlib.import_module("cupy").asarray(part)
    elif hasattr(array, "copy_"):
        array.copy_(library_named("torch").from_host(np.ascontiguousarray(part)))
    else:
        array[...] = part


def wanted(case, array):
    """What scipy makes of it in double precision."""
    array = wide(array)
    axes = tuple(range(array.ndim)) if case["axes"] is None else case["axes"]
    if array.size == 0:
        last = axes[-1] % array.ndim
        shape = result_shape(array.shape, last, case["kind"], case["parity"])
        return np.zeros(shape, np.float64 if case["kind"] == "C2R" else np.complex128)
    if case["kind"] in SERIES:
        series, words = SERIES[case["kind"]], {"axes": axes, "norm": case["norm"]}
        words |= {"type": series.type, "orthogonalize": series.orthogonal}
        return of_both_parts(partial(getattr(scipy.fft, f"{series.function}n"), **words), array)
    forward = case["kind"] in ("C2C", "R2C")
    norm = case["norm"] or ("backward" if forward else "forward")
    if case["kind"] == "C2R":
        last = axes[-1] % array.ndim
        length = result_shape(array.shape, last, "C2R", case["parity"])[last]
        sizes = [array.shape[axis] for axis in axes[:-1]] + [length]
        return scipy.fft.irfftn(array, s=sizes, axes=axes, norm=norm)
    function = {"C2C": scipy.fft.fftn, "C2C inverse": scipy.fft.ifftn, "R2C": scipy.fft.rfftn}
    return function[case["kind"]](array, axes=axes, norm=norm)


def of_both_parts(series, array):
    """A transform of the parts of complex numbers: whether these are orthogonalized, scipy makes
    depend on the norm, whatever it is told.
    """
    real = series(array.real)
    return real if array.dtype.kind == "f" else real + 1j * series(array.imag)


def close(got, want, count):
    """Whether the error is at most 8 eps log2 n of the largest element."""
    real = got.dtype["real"] if got.dtype == HALVES else np.finfo(got.dtype).dtype
    eps, got = np.finfo(real).eps, wide(got)
    scale = np.abs(want).max(initial=0.0)
    return np.abs(got - want).max(initial=0.0) <= 8 * eps * math.log2(2 + count) * scale
