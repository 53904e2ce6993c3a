"""One rank's dense linear algebra: the BLAS and LAPACK that SciPy brings, on parts of matrices.

Factorisations work on blocks of a matrix in column-major order, whose columns are further apart
than they are long. SciPy's functions would copy such a block. So the routines are called by the
addresses that scipy.linalg.cython_blas and cython_lapack export. Each function here binds a call:
it checks and works out addresses once.

Source: LAPACK Users' Guide, third edition, and its reference implementations.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np

from shardmath.arrays.base import HostArray
from shardmath.errors import BackendUnavailable

Call = Callable[[], object]
Op = Literal["N", "T", "C"]  # a factor itself, its transpose, its conjugate transpose
# Of a product's factors: their own type; two numbers of TF32 in place of each of float32, where a
# GPU has units for that, so that nearly all digits stay; or rounded to bfloat16.
Precision = Literal["full", "tf32x3", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
_LETTERS = {"float32": "s", "float64": "d", "complex64": "c", "complex128": "z"}
DTYPES = tuple(_LETTERS)


def require() -> None:
    """Raise BackendUnavailable where SciPy is not installed."""
    if importlib.util.find_spec("scipy") is None:
        raise BackendUnavailable(
            "factorisations on cores use SciPy's LAPACK: pip install 'shardmath[linalg]'"
        )


def subtract_product(c: HostArray, a: HostArray, op_a: Op, b: HostArray, op_b: Op) -> Call:
    """Bind C -= op(A) op(B), of matrices in column-major order. No two of them overlap."""
    m, n = c.shape
    k = a.shape[1] if op_a == "N" else a.shape[0]
    if not (m and n and k):
        return _nothing
    one = np.ones(1, c.dtype)
    words = (_flag(op_a), _flag(op_b), *_counts(m, n, k), -one, *_matrix(a), *_matrix(b))
    return _bound("blas", "gemm", c, *words, one, *_matrix(c))


def rounded(x: HostArray) -> HostArray:
    """A matrix of float32 or complex64, rounded to bfloat16, in the same type and column-major
    order.
    """
    copy = np.array(x.T, order="C")
    bits = copy.view(np.uint32)
    bits += (bits >> 16 & 1) + 0x7FFF  # to the nearest, ties to even
    bits &= 0xFFFF0000
    return copy.T


def solve_triangular(
    a: HostArray,
    b: HostArray,
    *,
    lower: bool,
    op: Op = "N",
    unit: bool = False,
    right: bool = False,
) -> Call:
    """Bind B = op(A)^-1 B for a triangular A, or B = B op(A)^-1 where A is to the `right`.

    The other triangle of A is not read, nor, with `unit`, the diagonal, which is taken for ones.
    """
    if not b.size:
        return _nothing
    flags = [_flag(word) for word in ("RL"[not right], "UL"[lower], op, "NU"[unit])]
    words = (*flags, *_counts(*b.shape), np.ones(1, b.dtype), *_matrix(a), *_matrix(b))
    return _bound("blas", "trsm", b, *words)


def cholesky(a: HostArray) -> Callable[[], int]:
    """Bind A = L L^H in place, of the lower triangle. The call returns 0, or the order of the
    first leading minor that is not positive.
    """
    if not a.size:
        return _no_mistake
    return _with_info("potrf", a, _flag("L"), *_counts(len(a)), *_matrix(a))


def lu(a: HostArray, pivots: HostArray) -> Callable[[], int]:
    """Bind A = P L U in place; `pivots`, int32, get the row, from 1, that each is exchanged with.

    The call returns 0, or the number, from 1, of the first pivot that is exactly 0.
    """
    if not a.size:
        return _no_mistake
    return _with_info("getrf", a, *_counts(*a.shape), *_matrix(a), pivots)


def exchange_rows(a: HostArray, pivots: HostArray, *, backward: bool = False) -> Call:
    """Bind the exchanges of rows of A that `pivots` of `lu` say, first to last, or `backward`."""
    if not (a.size and pivots.size):
        return _nothing
    _, n = a.shape
    words = (*_counts(n), *_matrix(a), *_counts(1, len(pivots)), pivots)
    return _bound("lapack", "laswp", a, *words, *_counts(-1 if backward else 1))


# -- calls of routines -----------------------------------------------------------------------------


def _nothing() -> None:
    """Do nothing, where a matrix is empty."""


def _no_mistake() -> int:
    return 0


def _with_info(name: str, a: HostArray, *words: Any) -> Callable[[], int]:
    """A call of a routine with an `info` argument, at the end, which it returns."""
    info = np.zeros(1, np.int32)
    call = _bound("lapack", name, a, *words, info)

    def called() -> int:
        call()
        mistake = int(info[0])
        assert mistake >= 0, f"argument {-mistake} of {name}"
        return mistake

    return called


def _bound(module: str, name: str, like: HostArray, *words: Any) -> Call:
    """A call of the routine for the type of `like`, which keeps its arguments alive."""
    function = _routine(module, _LETTERS[like.dtype.name] + name, len(words))
    places = [word if type(word) is bytes else int(word.ctypes.data) for word in words]

    def call(kept: Any = words) -> None:
        function(*places)

    return call


@lru_cache(maxsize=64)
def _routine(module: str, name: str, words: int) -> Callable[..., None]:
    """A routine of SciPy's BLAS or LAPACK, with so many arguments."""
    capsules: Any = importlib.import_module(f"scipy.linalg.cython_{module}").__pyx_capi__
    name_of = ctypes.pythonapi.PyCapsule_GetName
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype = ctypes.c_void_p
    pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]
    address = pointer_of(capsules[name], name_of(capsules[name]))
    function: Callable[..., None] = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * words)(address)
    return function


def _flag(letter: str) -> bytes:
    return letter.encode()


def _counts(*numbers: int) -> list[HostArray]:
    return [np.array([number], np.int32) for number in numbers]


def _matrix(a: HostArray) -> tuple[HostArray, HostArray]:
    """The two arguments for a matrix: itself, and its leading dimension in elements."""
    rows, columns = a.shape
    assert rows < 2 or a.strides[0] == a.itemsize, "column-major order"
    (leading,) = _counts(a.strides[1] // a.itemsize if columns > 1 else max(1, rows))
    return a, leading
