"""Which library does this array, module or name belong to?

Each module of `libraries` defines one library, which is found by the module's name. A library is
recognised by the modules that an array's type comes from, so none is imported to find out.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np

from shardmath.arrays import libraries as package
from shardmath.arrays.base import Library
from shardmath.arrays.spec import ArraySpec
from shardmath.base.found import class_in, modules_of


@lru_cache(maxsize=1)
def libraries() -> Mapping[str, Library]:
    """All libraries by name: NumPy, which is always there, and the others."""
    names = [name for name in modules_of(package) if name != "numpy"]
    return {name: _library_in(name) for name in ("numpy", *names)}


@lru_cache(maxsize=64)
def _library_in(name: str) -> Library:
    """The library that the module `name` defines."""
    library: Library = class_in(package, name, Library)()
    return library


def array_of(x: Any) -> Any:
    """`x` itself, or for a number, Python's or NumPy's, a NumPy array of no axes.

    NumPy's functions return numbers in place of arrays of no axes: a sum, for example.
    """
    return np.asarray(x) if isinstance(x, _NUMBERS) else x


_NUMBERS = (np.generic, bool, int, float, complex)


def library_of(x: object, name: str = "") -> Library:
    """The library of the array `x`.

    Raises ValueError, naming the argument, for anything that is not an array of one of them.
    """
    kind: Any = type(x)
    library = _library_of_type(kind)
    if library is None:
        raise ValueError(
            f"{name and name + ': '}expected an array of {_accepted()}, got {_said(kind)}"
            f"{_advice(x)}"
        )
    return library


def library_and_spec(x: object, name: str) -> tuple[Library, ArraySpec]:
    """The library and the spec of `x`, an array that a call computes with.

    Raises ValueError, naming the argument: as `library_of` and `Library.spec`, and for a tensor
    whose gradient would be lost silently.
    """
    library = library_of(x, name)
    if library.records(x):
        raise ValueError(
            f"{name} requires grad or has a tangent, and no derivative passes through this call: "
            "pass x.detach()"
        )
    try:
        return library, library.spec(x)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def knows_type(kind: type) -> bool:
    """Whether instances of the class are arrays of one of the libraries."""
    return _library_of_type(kind) is not None


def library_named(name: str) -> Library:
    """The library that `ArraySpec.library` names. Raises ValueError for an unknown name."""
    library = libraries().get(name)
    if library is None:
        raise ValueError(f"expected an array library, {_accepted()}, got {name!r}")
    return library


def library_of_package(module: ModuleType) -> Library:
    """The library whose module is `module`, as in `allocate_symmetric_memory(shape, numpy)`.

    Raises ValueError for any other object.
    """
    if not isinstance(module, ModuleType):
        raise ValueError(f"package is the module {_accepted()}, not {module!r}")
    return library_named(module.__name__)


@lru_cache(maxsize=128)
def _library_of_type(kind: type) -> Library | None:
    own: Library | None = getattr(kind, "__shardmath_library__", None)
    if own is not None:
        return own
    return next((library for library in libraries().values() if library.owns_type(kind)), None)


def _said(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def _advice(x: object) -> str:
    """How to make an array of `x`, where there is a way."""
    if hasattr(x, "__torch_dispatch__"):  # of a class that is no plain torch.Tensor
        plain = "x.to_local(), this rank's part" if hasattr(x, "to_local") else "a plain tensor"
        return f", a tensor whose elements are not in memory of its own: pass {plain}"
    if hasattr(x, "local") and hasattr(x, "distribution"):
        return ", split over the ranks: pass x.local, this rank's part, and x.distribution"
    if isinstance(x, np.ndarray):
        return ", which holds two arrays: pass x.filled(value), or x.data"
    if isinstance(x, list | tuple | range | memoryview) or hasattr(x, "__array__"):
        return "; pass numpy.asarray(x)"
    return ""


def _accepted() -> str:
    return " or ".join(libraries())
