"""Which library does this array, module or name belong to? The one list of libraries.

The answer comes from the type's own modules: no library is imported to be asked.
"""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType
from typing import Any

from shardmath.arrays.base import Library
from shardmath.arrays.cupy import CuPy
from shardmath.arrays.numpy import NumPy
from shardmath.arrays.torch import Torch

__all__ = ["LIBRARIES", "library_named", "library_of", "library_of_package"]

LIBRARIES: tuple[Library, ...] = (NumPy(), Torch(), CuPy())


def library_of(x: object, name: str = "") -> Library:
    """The library of the array `x`.

    Raises ValueError, naming the argument, for anything that is no array of ours.
    """
    kind: Any = type(x)
    library = _library_of_type(kind)
    if library is None:
        raise ValueError(
            f"{name and name + ': '}an array was expected, of {_accepted()}; given was "
            f"{kind.__module__}.{kind.__qualname__}"
        )
    return library


def library_named(name: str) -> Library:
    """The library that `ArraySpec.library` names. Raises ValueError for an unknown name."""
    for library in LIBRARIES:
        if library.name == name:
            return library
    raise ValueError(f"an array library was expected, {_accepted()}; given was {name!r}")


def library_of_package(package: ModuleType) -> Library:
    """The library whose module is `package`, as in `allocate_symmetric_memory(shape, numpy)`.

    Raises ValueError for any other object.
    """
    if not isinstance(package, ModuleType):
        raise ValueError(f"the module {_accepted()} was expected; given was {package!r}")
    return library_named(package.__name__)


@lru_cache(maxsize=128)
def _library_of_type(kind: type) -> Library | None:
    return next((library for library in LIBRARIES if library.owns_type(kind)), None)


def _accepted() -> str:
    return " or ".join(library.name for library in LIBRARIES)
