"""Names of the array API standard (2024.12) that do not compute on parts.

Its elementwise functions are NumPy's, which dispatch a DistributedArray to ours. Types are NumPy's
objects, whatever library the parts are of; functions of types take those of any library.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardmath.arrays import dtypes
from shardmath.context.context import get_context
from shardmath.distributed.creation import from_global
from shardmath.distributed.distributed_array import DistributedArray
from shardmath.geometry import Distribution, Replicated

VERSION = "2024.12"

_NUMPYS = """
abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_invert
bitwise_or bitwise_right_shift bitwise_xor ceil conj copysign cos cosh divide equal exp expm1 floor
floor_divide greater greater_equal hypot imag isfinite isinf isnan less less_equal log log1p log2
log10 logaddexp logical_and logical_not logical_or logical_xor maximum minimum multiply negative
nextafter not_equal positive pow real reciprocal remainder sign signbit sin sinh square sqrt
subtract tan tanh trunc
e inf nan newaxis pi
"""
_TYPES = """
bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64 complex64 complex128
"""

TYPES = {name: np.dtype(name) for name in _TYPES.split()}
NAMES: dict[str, Any] = {name: getattr(np, name) for name in _NUMPYS.split()} | TYPES


def asarray(
    obj: Any,
    dtype: Any = None,
    *,
    device: Any = None,
    copy: bool | None = None,
    distribution: Distribution | None = None,
) -> DistributedArray:
    """The array itself, or one of what all ranks pass alike: numbers, lists, a plain array.

    Split by `distribution`, by default whole on every rank. Collective for boxes.
    """
    if isinstance(obj, DistributedArray):
        made = obj if distribution is None else obj.to(distribution)
        if dtype is not None:
            return made.astype(dtype, copy=bool(copy) and made is obj)
        return made.copy() if copy and made is obj else made
    if not hasattr(obj, "__dlpack__") or isinstance(obj, np.generic):
        obj = np.asarray(obj)
    made = from_global(obj, Replicated() if distribution is None else distribution)
    return made if dtype is None else made.astype(dtype, copy=False)


def from_dlpack(x: Any, *, device: Any = None, copy: bool | None = None) -> DistributedArray:
    """The array that every rank has whole, of one that all ranks pass alike, as `asarray`."""
    return asarray(x, copy=copy)


def astype(x: DistributedArray, dtype: Any, *, copy: bool = True, device: Any = None) -> Any:
    """The elements in another type. Local."""
    return x.astype(dtype, copy)


def can_cast(from_: Any, to: Any) -> bool:
    """Whether one type, or the type of an array, can be cast to another without loss. Local."""
    return np.can_cast(_type_of(from_), _type_of(to))


def result_type(*arrays_and_dtypes: Any) -> np.dtype[Any]:
    """The common type of arrays, types and Python numbers, by NumPy's rules. Local."""
    numbers = bool | int | float | complex
    return np.result_type(
        *(x if isinstance(x, numbers) else _type_of(x) for x in arrays_and_dtypes)
    )


def isdtype(dtype: Any, kind: Any) -> bool:
    """Whether a type is of a kind such as "integral", is a type, or one of several. Local."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    native = dtypes.to_numpy(dtype)
    return np.isdtype(native, tuple(k if isinstance(k, str) else dtypes.to_numpy(k) for k in kinds))


def finfo(type: Any) -> Any:
    """The limits of a floating type, or of an array's type, as numpy.finfo. Local."""
    return np.finfo(_type_of(type))


def iinfo(type: Any) -> Any:
    """The limits of an integer type, or of an array's type, as numpy.iinfo. Local."""
    return np.iinfo(_type_of(type))


def _type_of(x: Any) -> np.dtype[Any]:
    return dtypes.to_numpy(x.dtype if hasattr(x, "shape") and hasattr(x, "dtype") else x)


class Info:
    """What the namespace supports, as the standard's inspection functions report it."""

    def capabilities(self) -> dict[str, Any]:
        """Masks are indices, shapes may depend on elements, and arrays have 64 axes at most."""
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}

    def default_device(self) -> str:
        """The device on which new arrays lie."""
        return self.devices()[0]

    def devices(self) -> list[str]:
        """The device of the current context: "cpu" or "cuda"."""
        context = get_context()
        return ["cpu" if context is None or context.device_id == "cpu" else "cuda"]

    def default_dtypes(self, *, device: Any = None) -> dict[str, Any]:
        """The types that functions use by default."""
        names = {"real floating": "float64", "complex floating": "complex128"}
        return {what: np.dtype(name) for what, name in names.items()} | {
            what: np.dtype("int64") for what in ("integral", "indexing")
        }

    def dtypes(self, *, device: Any = None, kind: Any = None) -> dict[str, Any]:
        """The types by name: all, or those of a kind."""
        return {name: one for name, one in TYPES.items() if kind is None or isdtype(one, kind)}
