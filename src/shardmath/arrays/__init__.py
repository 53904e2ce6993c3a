"""What is this array? One seam to every array library, none of which is imported for the user.

A library is found by the modules that an array's type comes from, so asking costs no import. The
layers above see an `ArraySpec`, a pointer, or a NumPy view on the same memory.
"""

from shardmath.arrays.base import Array, Library, raw_view
from shardmath.arrays.detect import (
    array_of,
    libraries,
    library_and_spec,
    library_named,
    library_of,
    library_of_package,
)
from shardmath.arrays.dtypes import DType
from shardmath.arrays.spec import ArraySpec

__all__ = [
    "Array",
    "ArraySpec",
    "DType",
    "Library",
    "array_of",
    "libraries",
    "library_and_spec",
    "library_named",
    "library_of",
    "library_of_package",
    "raw_view",
]
