"""Files of NumPy's format .npy: a header, and the elements of one array in C or Fortran order.

What NumPy reads, ranks read, and the other way round. The format has no name for bfloat16, float8
and complex32: their elements are written as NumPy writes them, as bytes ("|V2"), and who loads
them says of which type they are.
"""

from __future__ import annotations

import io
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy_format

from shardmath.arrays import DType, dtypes
from shardmath.base.immutable import Immutable


class Header(Immutable):
    """The header of a file: the array that it describes, and the bytes before the elements.

    `dtype` is a name; `fortran`: the elements are in Fortran order.
    """

    shape: tuple[int, ...]
    dtype: str
    fortran: bool
    offset: int


def header_bytes(shape: tuple[int, ...], dtype: DType, *, fortran: bool) -> bytes:
    """The header of a file of such an array, as it is written."""
    text = io.BytesIO()
    given = {"descr": _descr(dtype), "fortran_order": fortran, "shape": shape}
    npy_format.write_array_header_1_0(text, given)
    return text.getvalue()


def read_header(path: Path) -> Header:
    """The header of a file. Local.

    Raises OSError where it cannot be read, ValueError where it is no .npy file, is shorter than its
    header says, or has elements of Python objects or of named fields.
    """
    with path.open("rb") as file:
        try:
            version = npy_format.read_magic(file)
            if version not in ((1, 0), (2, 0)):
                raise ValueError(f"format {version}, which is for elements of named fields")
            read = {1: npy_format.read_array_header_1_0, 2: npy_format.read_array_header_2_0}
            shape, fortran, native = read[version[0]](file)
            dtype = dtypes.of(native)
        except ValueError as error:
            raise ValueError(f"{path} cannot be read as .npy: {error}") from None
        offset = file.tell()
    expected, size = offset + prod(shape) * dtype.itemsize, path.stat().st_size
    if size < expected:
        raise ValueError(f"{path} is truncated: it has {size} bytes of {expected}")
    return Header(tuple(shape), dtype.name, bool(fortran), offset)


def named(header: Header, dtype: Any) -> DType:
    """The type of a file's elements, which `dtype` names where the file does not.

    Raises ValueError where that is another than the file's.
    """
    own = dtypes.of(header.dtype)
    given = own if dtype is None else dtypes.of(dtype)
    if given != own and _descr(given) != header.dtype:
        raise ValueError(
            f"the file has elements of {own}, not of {given}: load them, and convert by astype"
        )
    return given


def _descr(dtype: DType) -> str:
    """The type as the format names it."""
    return f"|V{dtype.itemsize}" if dtype.carrier else np.dtype(dtype.name).str
