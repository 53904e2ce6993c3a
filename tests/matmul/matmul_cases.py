"""Random products as plain data, arrays in any memory, and the trivial oracle: NumPy in double."""

from __future__ import annotations

import importlib
import re
from dataclasses import asdict, dataclass, replace
from itertools import product
from random import Random

import numpy as np
from hypothesis import strategies as st

from arrangements import SEEDS, distributions
from shardmath.arrays import library_named
from shardmath.arrays.dtypes import to_numpy
from shardmath.geometry import decode
from shardmath.handles.allocation import allocate_symmetric_memory

DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
STORES = ("C", "F", "strided", "reversed", "heap C", "heap F", "heap strided")
EPSILON = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "complex64": 2.0**-23}


@dataclass(frozen=True)
class Case:
    """One product; `distributions` holds what each rank gives, encoded, for a, b and the result."""

    size: int
    m: int
    n: int
    k: int
    distributions: tuple
    library: str
    dtype: str
    stores: tuple  # of a, b and c, by rank
    transpose: tuple
    conjugate: tuple
    alpha: complex | None
    beta: complex | None  # None: no c
    inplace: bool
    force: int | None  # which of the strategies that explain() lists
    seed: int

    def plain(self):
        return asdict(self)

    @property
    def shapes(self):
        """Of the global a, b and c, as stored."""
        ta, tb = self.transpose
        return (
            (self.k, self.m) if ta else (self.m, self.k),
            (self.n, self.k) if tb else (self.k, self.n),
            (self.m, self.n),
        )


def is_complex(dtype):
    return dtype.startswith("complex")


def random_matrix(rng, shape, dtype):
    values = rng.standard_normal(shape)
    if is_complex(dtype):
        values = values + 1j * rng.standard_normal(shape)
    return values.astype(to_numpy(dtype))


def wide(array):
    """`array` in double precision."""
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


class Stored:
    """A local part as a user would hold it: `array`, laid out and placed as `store` says.

    Strided ones lie in a larger array of sentinels. Call within `with context`.
    """

    def __init__(self, part, store, library_name):
        library = library_named(library_name)
        self.part = part
        self._library = library
        place, _, how = store.rpartition(" ")
        inner = how in ("strided", "reversed")
        shape = tuple(2 * n + 3 for n in part.shape) if inner else part.shape
        order = "C" if inner else how
        if place == "heap":
            package = importlib.import_module(library_name)
            dtype = to_numpy(part.dtype) if library_name == "numpy" else _torch_dtype(part.dtype)
            whole = allocate_symmetric_memory(
                shape, package, dtype=dtype, axis_order=order, skip_symmetric_check=True
            )
        else:
            whole = library.empty(shape, part.dtype, order)
        self._whole = library.host_view(whole)
        self._at = None
        self.array = whole
        if inner:
            self._whole.view("u1")[...] = 0x5A
            step = -1 if how == "reversed" else 1
            self._at = tuple(slice(1, 1 + 2 * n, 2) for n in part.shape)
            self.array = whole[self._at]
            if step < 0:
                self.array = self.array[::-1, ::-1]
        self.host[...] = part

    @property
    def host(self):
        """A NumPy view of `array`."""
        return self._library.host_view(self.array)

    def untouched_around(self):
        """Whether the sentinels are as they were."""
        if self._at is None:
            return True
        rest = self._whole.copy()
        rest.view("u1").reshape(*rest.shape, rest.itemsize)[self._at] = 0x5A
        return bool((np.frombuffer(rest.tobytes(), np.uint8) == 0x5A).all())

    def untouched(self):
        """Whether elements and sentinels are as they were."""
        return self.host.tobytes() == self.part.tobytes() and self.untouched_around()


def _torch_dtype(dtype):
    return getattr(importlib.import_module("torch"), dtype.name)


def expected(a, b, c, alpha, beta):
    """(D, how far a good result may be from it) of op(A), op(B) and C, in double precision.

    The bound is c eps sqrt(k) for elements of size 1, put in terms of the actual ones.
    """
    dtype = a.dtype.name
    a, b = wide(a), wide(b)
    alpha = 1.0 if alpha is None else alpha
    d = alpha * (a @ b)
    size = abs(alpha) * np.outer(np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=0))
    if c is not None and beta != 0:
        d = d + beta * wide(c)
        size = size + abs(beta * wide(c))
    out = EPSILON.get(dtype, 2.0**-52)
    return d, 8 * min(out, 2.0**-23) * size + 1.01 * out * abs(d) + 1e-300 + _tiniest(dtype)


def _tiniest(dtype):
    return {"float16": 2.0**-25, "bfloat16": 1e-40, "float32": 1e-45}.get(dtype, 0.0)


EXTENTS = st.one_of(st.sampled_from([0, 1, 7, 8, 9]), st.integers(0, 40))
KINDS = st.sampled_from(list(product(DTYPES, ["numpy", "numpy", "torch"])))
OPTIONS = st.sampled_from(list(product([False, True], repeat=4)))
SCALARS = (None, 1, 0, -0.5, np.pi)
HAS_C = st.sampled_from([False, True])
FORCED = st.one_of(st.none(), st.integers(0, 20))


@st.composite
def cases(draw, most=6, least=1):
    """Products on at least and at most that many ranks."""
    size = draw(st.integers(least, most))
    m, n, k = draw(EXTENTS), draw(EXTENTS), draw(EXTENTS)
    dtype, library = draw(KINDS)
    *transpose, one, two = draw(OPTIONS)
    has_c, force, rng = draw(HAS_C), draw(FORCED), Random(draw(SEEDS))
    stores = [s for s in STORES if library == "numpy" or s != "reversed"]
    scalars = (*SCALARS, 0.5 - 2j) if is_complex(dtype) else SCALARS
    case = Case(
        size=size,
        m=m,
        n=n,
        k=k,
        distributions=(),
        library=library,
        dtype=dtype,
        stores=tuple(tuple(rng.choices(stores, k=size)) for _ in "abc"),
        transpose=tuple(transpose),
        conjugate=(one, two) if is_complex(dtype) else (False, False),
        alpha=rng.choice(scalars),
        beta=rng.choice(scalars[1:]) if has_c else None,
        inplace=has_c and rng.random() < 0.5,
        force=force,
        seed=rng.randrange(1000),
    )
    found = tuple(tuple(draw(distributions(shape, size))) for shape in case.shapes)
    return replace(case, distributions=found)


def decoded(case, rank):
    """The three distributions that `rank` gives."""
    return [decode(each[rank]) for each in case.distributions]


def strategies_of(explained):
    """The (label, kind) of the strategies that explain() lists, the chosen one first."""
    lines = re.findall(r"^(?:chosen:|  (?=\S+ \())\s*(\S+) \((.*?)\)", explained, re.M)
    return [(label, kind) for kind, label in lines]
