"""Data types of elements: one name for each type, whichever library an array is of.

Two arrays hold the same kind of elements exactly when their `DType` are equal. A NumPy type that no
rank computes with (dates, text, bytes, long double, foreign byte order) is opaque: its kind is "V",
its name its NumPy type string, and it may be moved but not multiplied. torch's complex32 is opaque
too, except to Fourier transforms; on the host it is a pair of float16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np

from shardmath.base.immutable import Immutable
from shardmath.errors import BackendUnavailable

Kind = Literal["f", "c", "i", "u", "b", "V"]


class DType(Immutable):
    """A data type: canonical name, bytes per element, and kind; two are equal where these are.

    `kind` is NumPy's letter: f float (the narrow ones too), c complex, i and u integers, b bool,
    V opaque. The other values are empty where they do not apply:

    sums        the type in which elements are added, where that is a wider one
    carrier     for a type that NumPy lacks: integers of that size, as which torch hands it over
    kernels     the name in kernels/elements.cuh, where it differs
    complex     for a real type: the type of its Fourier transform
    real        for a complex type: the type of its real and imaginary parts
    number      the number of the type among CUDA's cudaDataType; None where it has none
    computes    for products: the compute types that cuBLAS offers, by number, the usual first
    scalars     for products: the types that alpha and beta may have, by number, the usual first
    largest     for an eight-bit float: the greatest finite number
    """

    name: str
    itemsize: int
    kind: Kind
    sums: str = field(default="", compare=False, repr=False)
    carrier: str = field(default="", compare=False, repr=False)
    kernels: str = field(default="", compare=False, repr=False)
    complex: str = field(default="", compare=False, repr=False)
    real: str = field(default="", compare=False, repr=False)
    number: int | None = field(default=None, compare=False, repr=False)
    computes: tuple[int, ...] = field(default=(), compare=False, repr=False)
    scalars: tuple[int, ...] = field(default=(), compare=False, repr=False)
    largest: float = field(default=0.0, compare=False, repr=False)

    def __str__(self) -> str:
        return self.name


_SINGLE, _DOUBLE = (68, 69), (70, 71, 79)
_FAST = (*_SINGLE, 74, 75, 77, 78)
_narrow = partial(DType, kind="f", sums="float32")
_float8 = partial(_narrow, itemsize=1, carrier="uint8", computes=_SINGLE, scalars=(0,))
_half = partial(_narrow, itemsize=2, complex="complex64")

_ROWS = (
    DType("bool", 1, "b", kernels="boolean"),
    *(DType(f"int{8 * size}", size, "i") for size in (1, 2, 4, 8)),
    *(DType(f"uint{8 * size}", size, "u") for size in (1, 2, 4, 8)),
    _float8("float8_e4m3fn", number=28, largest=448.0),
    _float8("float8_e5m2", number=29, largest=57344.0),
    _half("float16", number=2, computes=(*_SINGLE, 64, 65), scalars=(0, 2)),
    _half("bfloat16", carrier="int16", number=14, computes=_SINGLE, scalars=(0,)),
    DType("float32", 4, "f", complex="complex64", number=0, computes=_FAST, scalars=(0,)),
    DType("float64", 8, "f", complex="complex128", number=1, computes=_DOUBLE, scalars=(1,)),
    DType("complex32", 4, "V", sums="complex64", carrier="int32", real="float16"),
    DType("complex64", 8, "c", real="float32", number=4, computes=_FAST, scalars=(4,)),
    DType("complex128", 16, "c", real="float64", number=5, computes=_DOUBLE, scalars=(5,)),
)
_KNOWN = {row.name: row for row in _ROWS}
_PAIR = np.dtype([("real", np.float16), ("imag", np.float16)])  # complex32 on the host


def names(fits: Callable[[DType], object]) -> tuple[str, ...]:
    """The names of the types in the table for which `fits(type)` is true, in its order."""
    return tuple(row.name for row in _ROWS if fits(row))


NAMES = names(lambda row: row.kind != "V")
FLOAT8 = frozenset(names(lambda row: row.largest))
HALVES = names(lambda row: row.kind == "f" and row.itemsize == 2)


def of(dtype: Any) -> DType:
    """The `DType` of a name, a NumPy dtype or scalar type, a Python type, or a torch dtype.

    Raises ValueError, naming what was given, when it is no data type or holds Python objects or
    named fields.
    """
    if isinstance(dtype, DType):
        return dtype
    try:
        return _of(dtype)
    except TypeError:  # a list of fields, say, which has no hash
        raise ValueError(f"dtype {dtype!r} is not a data type") from None


@lru_cache(maxsize=256)
def _of(dtype: Any) -> DType:
    if isinstance(dtype, str) and dtype in _KNOWN:
        return _KNOWN[dtype]
    if type(dtype).__module__ == "torch" and type(dtype).__name__ == "dtype":
        name = str(dtype).removeprefix("torch.")
        if name in _KNOWN:
            return _KNOWN[name]
        raise ValueError(f"{dtype} is not supported; supported are {', '.join(_KNOWN)}")
    if dtype is None:  # np.dtype(None) is float64
        raise ValueError("dtype None is not a data type")
    return _of_numpy(np.dtype(dtype))


def to_numpy(dtype: Any) -> np.dtype[Any]:
    """The NumPy dtype of anything that `of` takes.

    Raises BackendUnavailable for bfloat16 and float8 when ml_dtypes is not installed.
    """
    return _native(of(dtype).name)


@lru_cache(maxsize=256)
def _native(name: str) -> np.dtype[Any]:
    """The NumPy dtype of that name. Raises BackendUnavailable as `to_numpy` does."""
    if name == "complex32":
        return _PAIR
    if not (name in _KNOWN and _KNOWN[name].carrier):
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise BackendUnavailable(
            f"{name} on the host needs ml_dtypes: pip install 'ml_dtypes>=0.5'"
        ) from None
    extended: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return extended


def advice(dtype: str) -> str:
    """The end of an error message: how to convert arrays of this type so that ranks can compute."""
    if dtype in _KNOWN:
        return "; convert it, for example to float64" if _KNOWN[dtype].kind in "iub" else ""
    given = np.dtype(dtype)
    swapped = given.newbyteorder()
    if swapped.name in _KNOWN and swapped.isnative:
        return f"; it is not in native byte order: pass x.astype({swapped.name!r})"
    if given.kind in "fc":
        wide = "float64" if given.kind == "f" else "complex128"
        return f"; it is NumPy's {given.name}: convert it, for example to {wide}"
    return ""


def accumulator(dtype: Any) -> DType:
    """The type to sum in: float32 for every float narrower than that, else the type itself."""
    own = of(dtype)
    return _KNOWN[own.sums] if own.sums else own


def inexact(dtype: Any) -> DType:
    """The type itself, or float64 for integers and bool, as NumPy divides them."""
    own = of(dtype)
    return of("float64") if own.kind in "iub" else own


def numbered(number: int) -> DType | None:
    """The type of this number among CUDA's cudaDataType, or None."""
    return next((row for row in _ROWS if row.number == number), None)


def _of_numpy(dtype: np.dtype[Any]) -> DType:
    if dtype == _PAIR:
        return _KNOWN["complex32"]
    if dtype.isnative and dtype.name in _KNOWN:
        return _KNOWN[dtype.name]
    # An extension type that we do not know.
    foreign = dtype.kind == "V" and dtype.type is not np.void
    if dtype.hasobject:
        raise ValueError(
            f"{dtype!r} is not supported: Python objects cannot be read by other processes"
        )
    if dtype.itemsize == 0:
        raise ValueError(f"{dtype!r} is not supported: its elements have no bytes")
    if dtype.names or dtype.subdtype or foreign:
        raise ValueError(
            f"{dtype!r} is not supported; its elements can be moved as plain bytes: pass "
            f"x.view('V{dtype.itemsize}')"
        )
    return DType(dtype.str, dtype.itemsize, "V")
