"""What one rank computes of its own matrices, by the library that decomposes them where they lie.

On cores that is LAPACK, which NumPy and SciPy bring; on GPUs it is cuSOLVER, through the library
of the part, CuPy or torch. `workable` makes an array of that library of a part. Every function here
takes such arrays and returns such arrays.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from math import ceil
from typing import Any

import numpy as np
from numpy.linalg import LinAlgError

from shardmath.arrays import dtypes, library_of
from shardmath.distributed import parts
from shardmath.factorisations import cores
from shardmath.local import lapack
from shardmath.machine.h200 import PROCESSORS

_TILE = 128  # rows and columns of the result that a multiprocessor makes at once
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: from one word to the next
_LEAST_ROWS = 1024  # of a block: shorter ones take longer to add than to multiply


def workable(part: Any) -> Any:
    """The elements of a part as the array to decompose: the part itself where it is on a GPU, else
    NumPy's array on its memory.
    """
    library = library_of(part)
    if library.spec(part).space == "cpu":
        return library.host_view(part)
    return part.detach() if library.name == "torch" else part


def copied(part: Any) -> Any:
    """The elements of a part in new memory, in C order, as an array to decompose."""
    x = workable(part)
    made = parts.empty(x.shape, x)
    made[...] = x
    return made


def is_on_cores(x: Any) -> bool:
    """Whether LAPACK computes on this array."""
    return type(x) is np.ndarray


def is_finite(x: Any) -> bool:
    """Whether no element is NaN or infinite."""
    if is_on_cores(x):
        return cores.is_finite(x)
    finite = parts.module_of(x).isfinite
    # A sum reads the elements once. It is not finite if one of them is not, or if it overflows.
    return bool(finite(x.sum())) or bool(finite(x).all())


def identity(order: int, like: Any) -> Any:
    """The identity matrix of an order, in the type and the place of `like`."""
    return parts.module_of(like).diag(parts.full((order,), 1, like))


def scattered(rows: range, columns: int, seed: int, like: Any) -> Any:
    """Pseudorandom numbers from -1 to 1, in the type and the place of `like`: these rows of a
    matrix with `columns` columns that depends on `seed` and `columns` alone.

    The parts' library makes them, because a host would take longer than GPUs take to multiply
    with them: element i in C order is word i of SplitMix64 (Steele, Lea, Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014), taken as a signed number.
    """
    first, along = np.arange(rows.start, rows.stop) * columns, np.arange(1, columns + 1)
    words = parts.converted(first, like)[:, None] + parts.converted(along, like)
    words = words * _signed(_GOLDEN) + _signed(seed ^ (seed >> 64) * _GOLDEN)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        # Shifts repeat the sign, which the mask removes.
        words = (words ^ (words >> shift) & (1 << 64 - shift) - 1) * _signed(factor)
    kind = dtypes.of(library_of(like).spec(like).dtype)
    return parts.cast(words, kind) * 2.0**-63


def _signed(word: int) -> int:
    """The last 64 bits, as a signed number."""
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)


def phases(diagonal: Any) -> Any:
    """Each element divided by its absolute value; 1 for zeros."""
    size = abs(diagonal)
    zero = size == 0
    return (diagonal + zero) / (size + zero)


# -- functions of whole matrices, and of stacks of them --------------------------------------------


@contextmanager
def _raising(x: Any) -> Iterator[None]:
    """Raise NumPy's LinAlgError where the library of `x` finds that a matrix is singular, is not
    positive definite, or does not converge.
    """
    name = library_of(x).name
    if name == "cupy":  # looks only where it is told to
        with importlib.import_module("cupyx").errstate(linalg="raise"):
            yield
    elif name == "torch":
        try:
            yield
        except parts.module_of(x).linalg.LinAlgError as mistake:
            raise LinAlgError(str(mistake)) from None
    else:
        yield


def called(name: str, *arrays: Any, **words: Any) -> Any:
    """A function of numpy.linalg, by that name in the arrays' library. Raises LinAlgError."""
    with _raising(arrays[0]):
        return getattr(parts.module_of(arrays[0]).linalg, name)(*arrays, **words)


def qr(x: Any, mode: str) -> tuple[Any, ...]:
    """Q and R of each matrix of a stack, or R alone in the mode "r", as numpy.linalg.qr. The
    diagonal of R is real and not negative.
    """
    made = called("qr", x, mode=mode)
    q, r = made if isinstance(made, tuple) else (None, made)  # torch gives an empty Q
    turned = phases(r.diagonal(0, -2, -1))
    count = turned.shape[-1]
    r[..., :count, :] *= turned[..., :, None].conj()
    if mode == "r":
        return (r,)
    q[..., :count] *= turned[..., None, :]
    return q, r


def svd(x: Any, full: bool, vectors: bool, hermitian: bool = False) -> tuple[Any, ...]:
    """U, S and V^H of each matrix of a stack, or S alone without `vectors`, as numpy.linalg.svd."""
    if hermitian and not is_on_cores(x):
        return _svd_by_eigenvalues(x, vectors)
    if parts.is_torchs(x):
        if vectors:
            return tuple(called("svd", x, full_matrices=full))
        return (called("svdvals", x),)
    words = {"hermitian": True} if hermitian else {}
    made = called("svd", x, full_matrices=full, compute_uv=vectors, **words)
    return tuple(made) if vectors else (made,)


def _svd_by_eigenvalues(x: Any, vectors: bool) -> tuple[Any, ...]:
    """The factors of Hermitian matrices, whose singular values are the absolute eigenvalues."""
    values, u = eigh(x, "L") if vectors else (*eigh(x, "L", vectors=False), None)
    descending = parts.order(-abs(values), -1)
    values = parts.taken_along(values, descending, -1)
    if u is None:
        return (abs(values),)
    u = parts.taken_along(u, descending[..., None, :], -1)
    signs = phases(values)
    return u, abs(values), (u * signs[..., None, :]).conj().swapaxes(-2, -1)


def eigh(x: Any, triangle: str, *, vectors: bool = True) -> tuple[Any, ...]:
    """The eigenvalues and, with `vectors`, eigenvectors of each Hermitian matrix of a stack. Only
    the `triangle`, "L" or "U", is read.
    """
    if vectors:
        return tuple(called("eigh", x, UPLO=triangle))
    return (called("eigvalsh", x, UPLO=triangle),)


def cholesky(x: Any, *, upper: bool) -> Any:
    """The lower factor L of each matrix of a stack, or L^H, read from that triangle."""
    if not upper:
        return called("cholesky", x)
    return called("cholesky", x.swapaxes(-2, -1).conj()).swapaxes(-2, -1).conj()


# -- products and quotients of tall matrices, on GPUs ---------------------------------------------


def adjoint_product(x: Any, y: Any) -> Any:
    """x^H @ y of matrices with many rows. Few columns are few tiles of the result, so blocks of
    rows are multiplied at the same time, and the products added.
    """
    tiles = ceil(x.shape[1] / _TILE) * ceil(y.shape[1] / _TILE)
    count = min(2 * PROCESSORS // max(1, tiles), len(x) // _LEAST_ROWS)
    if count <= 1:
        return x.conj().T @ y
    height = len(x) // count
    cut = count * height
    one, two = (z[:cut].reshape(count, height, z.shape[1]) for z in (x, y))
    made = (one.conj().swapaxes(-2, -1) @ two).sum(0)
    if cut < len(x):
        made += x[cut:].conj().T @ y[cut:]
    return made


def divided_by_triangle(x: Any, r: Any) -> Any:
    """The y of y @ r = x, for an upper triangle r."""
    if 0 in x.shape:
        return x
    lower, right = r.conj().T, x.conj().T
    if parts.is_torchs(x):
        made = parts.module_of(x).linalg.solve_triangular(lower, right, upper=False)
    else:
        package = "scipy.linalg" if library_of(x).name == "numpy" else "cupyx.scipy.linalg"
        solve: Any = importlib.import_module(package).solve_triangular
        made = solve(lower, right, lower=True, check_finite=False)
    return made.conj().T


# -- Householder reflectors ------------------------------------------------------------------------


def reflected(a: Any) -> tuple[Any, Any, Any]:
    """V, T and R of a matrix: (I - V T V^H)^H a = [R; 0]. V has min(a.shape) columns. On cores it
    is in column-major order.
    """
    count = min(a.shape)
    if not count:
        none = parts.empty((len(a), 0), a), parts.empty((0, 0), a)
        return *none, a[:0]
    if not is_on_cores(a):
        return _reflected_by_the_library(a, count)
    factors, t, _ = _geqrt(a.dtype.name)(count, a)
    r, v = np.triu(factors[:count]), factors[:, :count]
    v[:count] = np.tril(v[:count], -1)
    np.einsum("ii->i", v[:count])[...] = 1
    return v, np.triu(t), r


def _reflected_by_the_library(a: Any, count: int) -> tuple[Any, Any, Any]:
    """V, T and R by LAPACK's geqrf, which gives the factor of each reflector in place of T.

    With these on the diagonal D, T^-1 = D^-1 + triu(V^H V, 1) (Puglisi, SIAM J. Sci. Stat. Comput.
    13 (1992)); multiplied by D, that holds also for reflectors with a factor of 0.
    """
    module = parts.module_of(a)
    if parts.is_torchs(a):
        factors, taus = module.geqrf(a)
    else:
        rows, taus = called("qr", a, mode="raw")  # CuPy's, as NumPy's, are transposed, of float64
        factors, taus = rows.T.astype(a.dtype), taus.astype(a.dtype)
    v, ones = module.tril(factors[:, :count], -1), identity(count, a)
    v[:count] += ones
    products = module.triu(v.conj().T @ v, 1)
    t = called("solve", ones + taus[:, None] * products, module.diag(taus))
    return v, t, module.triu(factors[:count])


@lru_cache(maxsize=8)
def _geqrt(dtype: str) -> Any:
    """LAPACK's geqrt of a type: (columns of a block, A) -> (V and R in one, T, 0)."""
    wrapped: Any = importlib.import_module("scipy.linalg.lapack")
    return wrapped.get_lapack_funcs("geqrt", dtype=dtype)


def rows_of_reflectors(v: Any, rows: slice) -> Any:
    """Rows of V: on cores in column-major order, and in memory of their own."""
    return np.asfortranarray(v[rows]) if is_on_cores(v) else v[rows]


def subtract_product(x: Any, v: Any, w: Any) -> None:
    """Subtract v @ w from x, in place. On cores v is in column-major order, x and w in C order."""
    if is_on_cores(x):
        lapack.subtract_product(x.T, w.T, "N", v, "T")()
    else:
        x -= v @ w


def upper_triangle(x: Any) -> Any:
    """A square upper triangle whose diagonal is the absolute values of that of `x`."""
    module = parts.module_of(x)
    return module.triu(x, 1) + module.diag(abs(x.diagonal()))
