"""What an element is: one name for a data type, whichever library it comes from.

Two arrays hold the same kind of elements exactly when their `DType` are equal. A NumPy type that no
rank computes with (dates, text, bytes, long double, foreign byte order) is opaque: kind "V", named
by its NumPy type string, and may be moved but not multiplied. So may torch's complex32, which only
Fourier transforms know: on the host it is a pair of float16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from shardmath.errors import BackendUnavailable

__all__ = ["NAMES", "DType", "accumulator", "advice", "of", "to_numpy"]

Kind = Literal["f", "c", "i", "u", "b", "V"]


@dataclass(frozen=True)
class DType:
    """A data type: canonical name, bytes per element, and kind.

    `kind` is NumPy's letter: f float (the narrow ones too), c complex, i and u integers, b bool,
    V opaque.
    """

    name: str
    itemsize: int
    kind: Kind

    def __str__(self) -> str:
        return self.name


_KNOWN: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("bool", 1, "b"),
        *(DType(f"int{8 * size}", size, "i") for size in (1, 2, 4, 8)),
        *(DType(f"uint{8 * size}", size, "u") for size in (1, 2, 4, 8)),
        DType("float8_e4m3fn", 1, "f"),
        DType("float8_e5m2", 1, "f"),
        DType("float16", 2, "f"),
        DType("bfloat16", 2, "f"),
        DType("float32", 4, "f"),
        DType("float64", 8, "f"),
        DType("complex32", 4, "V"),
        DType("complex64", 8, "c"),
        DType("complex128", 16, "c"),
    )
}
NAMES = tuple(name for name, known in _KNOWN.items() if known.kind != "V")
# The types that NumPy lacks; ml_dtypes registers them under the same names.
_EXTENDED = frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2"})
_PAIR = np.dtype([("real", np.float16), ("imag", np.float16)])  # of which complex32 consists
_WIDENED = _EXTENDED | {"float16"}


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
    name = of(dtype).name
    if name == "complex32":
        return _PAIR
    if name not in _EXTENDED:
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
    """What makes a type that can be computed with of one that cannot, to end a message with."""
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
    return _KNOWN["float32"] if own.name in _WIDENED else own


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
