"""Strided boxes as the copy engines take them: rows at a pitch, and layers of rows.

The engines copy beside a product and take no multiprocessor from it, where rows are long enough and
few copies suffice. What they cannot, or not well, is `None`: a kernel's work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from shardmath.cuda.driver import bindings, call
from shardmath.redistribution.copies import StridedCopy

__all__ = ["EngineCopies", "engine_copies"]

_ROW = 512  # bytes: shorter rows take longer than their bytes
_MOST = 64  # copies: each takes some microseconds to begin

_Dim = tuple[int, int, int]  # extent, stride in the source, stride in the destination


class EngineCopies:
    """Copies whose geometry is described; addresses are arguments of `launch`."""

    def __init__(self, copies: Sequence[tuple[int, int, int, Any]]) -> None:
        self._copies = tuple(copies)  # source rank, offsets there and here, bytes or a description

    def launch(self, stream: Any, sources: Sequence[int], target: int) -> None:
        """Put them on `stream`, from memories at these addresses, by rank, to one."""
        for rank, source_offset, target_offset, what in self._copies:
            source, to = sources[rank] + source_offset, target + target_offset
            if isinstance(what, int):
                call("cuMemcpyDtoDAsync", to, source, what, stream)
                continue
            what.srcDevice, what.dstDevice = source, to
            flat = type(what).__name__ == "CUDA_MEMCPY2D"
            call("cuMemcpy2DAsync" if flat else "cuMemcpy3DAsync", what, stream)


def engine_copies(copies: Sequence[StridedCopy]) -> EngineCopies | None:
    """The same by copy engines, None where they do not suit."""
    found: list[tuple[int, int, int, Any]] = []
    for copy in copies:
        if copy.unit < _ROW:
            return None
        for each in _pieces(copy):
            if each is None or len(found) == _MOST:
                return None
            found.append((copy.src, *each))
    return EngineCopies(found)


def _pieces(copy: StridedCopy) -> Iterator[tuple[int, int, Any] | None]:
    """(offset in the source, in the destination, bytes or description) of each; None: no way."""
    dims = list(zip(copy.shape, copy.src_strides, copy.dst_strides, strict=True))
    if any(min(src, dst) < copy.unit for _, src, dst in dims):
        yield None
        return
    inner: list[_Dim] = []
    if len(dims) > 1 and _stacks(dims[-2], dims[-1]):
        inner = [dims.pop(-2), dims.pop()]
    elif dims:
        inner = [dims.pop(max(range(len(dims)), key=lambda i: dims[i][0]))]
    what = _described(copy.unit, inner)
    for index in product(*(range(extent) for extent, _, _ in dims)):
        src = copy.src_offset + sum(i * dim[1] for i, dim in zip(index, dims, strict=True))
        dst = copy.dst_offset + sum(i * dim[2] for i, dim in zip(index, dims, strict=True))
        yield src, dst, what


def _stacks(outer: _Dim, inner: _Dim) -> bool:
    """Whether one dimension is layers of whole rows of the other, on both sides."""
    return all(
        outer[side] % inner[side] == 0 and outer[side] // inner[side] >= inner[0] for side in (1, 2)
    )


def _described(width: int, inner: Sequence[_Dim]) -> Any:
    if not inner:
        return width
    driver = bindings()
    what = driver.CUDA_MEMCPY2D() if len(inner) == 1 else driver.CUDA_MEMCPY3D()
    what.srcMemoryType = what.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    rows, what.srcPitch, what.dstPitch = inner[-1]
    what.WidthInBytes, what.Height = width, rows
    if len(inner) > 1:
        what.Depth = inner[0][0]
        what.srcHeight, what.dstHeight = inner[0][1] // inner[1][1], inner[0][2] // inner[1][2]
    return what
