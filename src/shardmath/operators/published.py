"""What the ranks of an operation on GPUs publish: matrices by name, read in place by peers.

What travels are a few numbers each, in the one exchange that an execution begins with; then every
rank knows the addresses, and a barrier on the stream says when elements may be read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from shardmath.handles.operand import Exposed, Operand
from shardmath.local.gpu import Matrix

__all__ = ["AddressTable", "Place", "matrix_of", "pack_exposed", "unpack_exposed"]

Place = tuple[int, tuple[int, ...]]  # the address of element (0, 0), strides in bytes
AddressTable = Callable[[int], Place]  # by rank


def matrix_of(array: Operand) -> Matrix:
    """An array of two axes, or a vector as a column."""
    one, two = (stride // array.itemsize for stride in (*array.strides, array.itemsize)[:2])
    rows, columns = (*array.shape, 1)[:2]
    return Matrix(array.address, rows, columns, one, two, array.dtype)


def pack_exposed(exposed: Mapping[str, Exposed], names: Sequence[str]) -> bytes:
    """What to tell the peers of matrices of some of these names."""
    told = b""
    for number, name in enumerate(names):
        if name in exposed:
            text = exposed[name].pack()
            told += bytes([number, len(text)]) + text
    return told


def unpack_exposed(text: bytes, names: Sequence[str]) -> dict[str, Exposed]:
    """What a rank has told."""
    found, at = {}, 0
    while at < len(text):
        number, length = text[at], text[at + 1]
        at += 2 + length
        found[names[number]] = Exposed.unpack(text[at - length : at])
    return found
