"""Files of NumPy's format .npy: a header, and the elements of one array in C or Fortran order.

Ranks read what NumPy writes, and the reverse. The format has no names for bfloat16, float8 and
complex32: as NumPy does, their elements are written as bytes ("|V2"), and the type is given when
they are loaded.
"""

from __future__ import annotations

import io
import os
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy_format

from shardmath.arrays import DType, dtypes
from shardmath.distributed.distributed_array import DistributedArray
from shardmath.distributed.shared_file import appearing, write_part


class Stored(NamedTuple):
    """An array in a file, from byte `offset` on; with `fortran`, in Fortran order.

    Without an offset its elements are not contiguous, and a library reads it.
    """

    file: str
    shape: tuple[int, ...]
    dtype: str
    fortran: bool
    offset: int | None


def save_array(x: DistributedArray, path: Path, *, fortran: bool) -> None:
    """Save the array, in Fortran order or in C order. Collective.

    Raises OSError on all ranks.
    """
    dtype = x.element_type
    text = io.BytesIO()
    given = {"descr": type_in_file(dtype), "fortran_order": fortran, "shape": x.shape}
    npy_format.write_array_header_1_0(text, given)
    header = text.getvalue()

    def create(file: Path) -> None:
        with file.open("xb") as made:
            made.write(header)
            os.posix_fallocate(made.fileno(), 0, len(header) + x.size * dtype.itemsize)

    with appearing(x.context, path, create) as file:
        write_part(x.transpose() if fortran else x, file, len(header))


def read_stored(path: Path, dtype: Any = None) -> Stored:
    """The array in a file, whose elements are of type `dtype` if the file does not name it. Local.

    Raises OSError where the file cannot be read; ValueError where it is no .npy file, is shorter
    than its header says, holds Python objects or named fields, or is of another type.
    """
    with path.open("rb") as file:
        try:
            version = npy_format.read_magic(file)
            if version not in ((1, 0), (2, 0)):
                raise ValueError(f"format {version}, which is for elements of named fields")
            read = {1: npy_format.read_array_header_1_0, 2: npy_format.read_array_header_2_0}
            shape, fortran, native = read[version[0]](file)
            own = dtypes.of(native)
        except ValueError as error:
            raise ValueError(f"{path} cannot be read as .npy: {error}") from None
        offset = file.tell()
    expected, size = offset + prod(shape) * own.itemsize, path.stat().st_size
    if size < expected:
        raise ValueError(f"{path} is truncated: it has {size} bytes of {expected}")
    given = own if dtype is None else dtypes.of(dtype)
    if given != own and type_in_file(given) != own.name:
        raise ValueError(
            f"{path} has elements of {own}, not of {given}: load them, and convert by astype"
        )
    return Stored(str(path), tuple(shape), given.name, bool(fortran), offset)


def type_in_file(dtype: DType) -> str:
    """The name of the type in the file: bytes, where NumPy lacks the type."""
    return f"|V{dtype.itemsize}" if dtype.carrier else np.dtype(dtype.name).str
