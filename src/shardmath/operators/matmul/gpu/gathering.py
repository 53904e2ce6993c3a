"""Bringing strided boxes of peers' matrices into memory of this GPU, beside the products.

Rows that are long enough are moved by the copy engines, which take no multiprocessor from a product
that runs; the rest by a kernel. With a stream of its own the gathering runs ahead: a product's
stream waits for the panels that it needs, and a panel's memory is filled again only when the
product that read it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

from shardmath.cuda.driver import bindings, call
from shardmath.geometry import Move
from shardmath.local.gpu import Matrix
from shardmath.local.gpu.epilog import finish
from shardmath.operators.lanes import Lane
from shardmath.redistribution.copies import StridedCopy, lowered

__all__ = ["Gathering"]

_ROW = 512  # bytes of a row that the copy engines move well

Places = Callable[[int], tuple[int, tuple[int, ...]]]  # by rank: address of (0, 0), byte strides


class Gathering:
    """What one execution gathers. Without `beside`, all of it is on the product's stream."""

    def __init__(self, lane: Lane, stream: int) -> None:
        self._lane = lane
        self._stream = stream
        self._side: Any = None

    @contextmanager
    def beside(self, apart: bool) -> Iterator[None]:
        """Let what is fetched run on a stream of its own, if `apart`."""
        if apart:
            self._side = self._lane.side
            self._wait(self._side, self._record("fork", self._stream))
        yield

    def fetch(
        self, number: int, after: int | None, moves: Sequence[Move], places: Places, panel: Matrix
    ) -> None:
        """Fill a packed panel of interval `number`, once interval `after` has left its memory."""
        if self._side is not None and after is not None:
            self._wait(self._side, self._lane.event(f"used {after}"))
        self.copy(moves, places, panel)

    def arrive(self, number: int) -> None:
        """The product of interval `number` comes after its panels."""
        if self._side is not None:
            self._wait(self._stream, self._record(f"come {number}", self._side))

    def used(self, number: int) -> None:
        """The product of interval `number` is on its stream."""
        if self._side is not None:
            self._record(f"used {number}", self._stream)

    def copy(self, moves: Sequence[Move], places: Places, panel: Matrix) -> None:
        """Perform `moves` into a packed matrix; the source of each is where `places` says."""
        steps = panel.row_stride * panel.itemsize, panel.column_stride * panel.itemsize
        for move in moves:
            if move.elements:
                address, strides = places(move.src)
                self._perform(lowered(move, panel.itemsize, strides, steps), address, panel)

    def _perform(self, copy: StridedCopy, source: int, panel: Matrix) -> None:
        """One copy: its last dimension, or its last two, in one piece."""
        stream = self._stream if self._side is None else self._side
        by_engine = copy.unit >= _ROW
        tail = 1 if by_engine else 2
        if not by_engine:
            count = copy.unit // panel.itemsize
            inner = (count,) if count > 1 or not copy.shape else ()
            step = (panel.itemsize,) * len(inner)
        else:
            inner, step = (), ()
        shape = copy.shape + inner
        src_strides, dst_strides = copy.src_strides + step, copy.dst_strides + step
        head = max(0, len(shape) - tail)
        for index in product(*map(range, shape[:head])):
            src = source + copy.src_offset
            dst = panel.address + copy.dst_offset
            src += sum(i * s for i, s in zip(index, src_strides, strict=False))
            dst += sum(i * s for i, s in zip(index, dst_strides, strict=False))
            if by_engine:
                rows = shape[head] if len(shape) > head else 1
                pitch = (src_strides[head], dst_strides[head]) if rows > 1 else (copy.unit,) * 2
                _copy_rows(src, dst, pitch, copy.unit, rows, stream)
            else:
                self._kernel(src, dst, shape[head:], src_strides[head:], dst_strides[head:], panel)

    def _kernel(
        self,
        src: int,
        dst: int,
        shape: Sequence[int],
        src_strides: Sequence[int],
        dst_strides: Sequence[int],
        panel: Matrix,
    ) -> None:
        stream = self._stream if self._side is None else self._side
        size = panel.itemsize
        rows, columns = (*shape, 1)[:2]
        made = []
        for at, strides in ((src, src_strides), (dst, dst_strides)):
            one, two = (step // size for step in (*strides, size, size)[:2])
            made.append(Matrix(at, rows, columns, one, two, panel.dtype))
        finish(self._lane.team.device, stream, made[1], made[:1])

    def _record(self, name: str, stream: Any) -> Any:
        event = self._lane.event(name)
        call("cuEventRecord", event, stream)
        return event

    @staticmethod
    def _wait(stream: Any, event: Any) -> None:
        call("cuStreamWaitEvent", stream, event, 0)


def _copy_rows(
    src: int, dst: int, pitch: tuple[int, int], width: int, rows: int, stream: Any
) -> None:
    """Copy `rows` rows of `width` bytes by a copy engine."""
    if rows == 1 or pitch == (width, width):
        call("cuMemcpyDtoDAsync", dst, src, width * rows, stream)
        return
    if min(pitch) < width or rows == 0:
        for row in range(rows):
            call("cuMemcpyDtoDAsync", dst + row * pitch[1], src + row * pitch[0], width, stream)
        return
    driver = bindings()
    copy = driver.CUDA_MEMCPY2D()
    copy.srcMemoryType = copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcDevice, copy.dstDevice = src, dst
    copy.srcPitch, copy.dstPitch = pitch
    copy.WidthInBytes, copy.Height = width, rows
    call("cuMemcpy2DAsync", copy, stream)
