"""Copies by copy engines: strided boxes as rows at a pitch, and layers of rows.

The engines copy beside a product and take no multiprocessor from it. They suit boxes of long rows
that take few copies; for others `engine_copies` returns None, and a kernel has to copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from shardmath.arrays.spec import Dimension, offsets
from shardmath.cuda.driver import bindings, call
from shardmath.redistribution.copies import StridedCopy

_ROW = 512  # the least bytes of a row: shorter rows take longer than their bytes
_MOST = 64  # the most copies: each takes some microseconds to begin


class EngineCopy:
    """One copy of `width` bytes at each place of at most two `dims`: the inner one are rows, the
    outer one layers of rows.
    """

    def __init__(self, width: int, dims: Sequence[Dimension] = ()) -> None:
        self._nbytes = width
        self._what: Any = None
        if not dims:
            return
        driver = bindings()
        flat = len(dims) == 1
        self._what = what = driver.CUDA_MEMCPY2D() if flat else driver.CUDA_MEMCPY3D()
        self._call = "cuMemcpy2DAsync" if flat else "cuMemcpy3DAsync"
        what.srcMemoryType = what.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        rows, what.srcPitch, what.dstPitch = dims[-1]
        what.WidthInBytes, what.Height = width, rows
        if not flat:
            layers, source, target = dims[0]
            what.Depth = layers
            what.srcHeight, what.dstHeight = source // what.srcPitch, target // what.dstPitch

    def put(self, source: int, target: int, stream: Any) -> None:
        """Put it on `stream`, between these addresses."""
        if self._what is None:
            call("cuMemcpyDtoDAsync", target, source, self._nbytes, stream)
            return
        self._what.srcDevice, self._what.dstDevice = source, target
        call(self._call, self._what, stream)


class EngineCopies:
    """Copies from several ranks' memories to one. Addresses are arguments of `launch`."""

    def __init__(self, copies: Sequence[tuple[int, int, int, EngineCopy]]) -> None:
        self._copies = tuple(copies)  # source rank, offsets there and here

    def launch(self, stream: Any, sources: Sequence[int], target: int) -> None:
        """Put them on `stream`, from memories at these addresses, by rank, to one."""
        for rank, source_offset, target_offset, copy in self._copies:
            copy.put(sources[rank] + source_offset, target + target_offset, stream)


def engine_copies(boxes: Sequence[StridedCopy]) -> EngineCopies | None:
    """Copies of boxes into one memory by copy engines; None where these do not suit."""
    copies: list[tuple[int, int, int, EngineCopy]] = []
    for box in boxes:
        if box.unit < _ROW:
            return None
        for piece in _pieces(box):
            if piece is None or len(copies) == _MOST:
                return None
            copies.append((box.src, *piece))
    return EngineCopies(copies)


def _pieces(box: StridedCopy) -> Iterator[tuple[int, int, EngineCopy] | None]:
    """(offset in the source, offset in the destination, the copy) of each; None for no way."""
    dims = list(zip(box.shape, box.src_strides, box.dst_strides, strict=True))
    if any(min(src, dst) < box.unit for _, src, dst in dims):
        yield None
        return
    inner: list[Dimension] = []
    if len(dims) > 1 and _stacks(dims[-2], dims[-1]):
        inner = [dims.pop(-2), dims.pop()]
    elif dims:
        inner = [dims.pop(max(range(len(dims)), key=lambda i: dims[i][0]))]
    what = EngineCopy(box.unit, inner)
    for src, dst in offsets(dims):
        yield box.src_offset + src, box.dst_offset + dst, what


def _stacks(outer: Dimension, inner: Dimension) -> bool:
    """Whether one dimension is layers of whole rows of the other, on both sides."""
    return all(
        outer[side] % inner[side] == 0 and outer[side] // inner[side] >= inner[0] for side in (1, 2)
    )
