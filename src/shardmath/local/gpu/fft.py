"""One rank's Fourier transforms on its GPU: cuFFT, on addresses and a stream.

Plans are kept, and share a work area for each stream: calls on one stream follow each other. What
takes memory or time is done by `prepare`; `run` only launches, and can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

from shardmath.arrays.dtypes import of as dtype_of
from shardmath.cuda import stream as streams
from shardmath.cuda.device import Device
from shardmath.cuda.driver import call_for_memory
from shardmath.cuda.kernel import Argument, kernel
from shardmath.errors import BackendUnavailable, CudaError
from shardmath.local.batches import Batches
from shardmath.local.fft import Kind
from shardmath.lru_cache import LRUCache

__all__ = ["Transforms", "scale"]

_KEPT = 256  # plans
_TYPES = {
    ("C2C", False): 0x29,
    ("R2C", False): 0x2A,
    ("C2R", False): 0x2C,
    ("C2C", True): 0x69,
    ("R2C", True): 0x6A,
    ("C2R", True): 0x6C,
}
_DIMS = 8  # kDims of scale.cu
_THREADS = 256

_Key = tuple[Kind, bool, Batches]


class Transforms:
    """The plans of one device. Get them with `Transforms.of`."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._plans = _Plans(device)
        self._areas: dict[int, _Area] = {}
        self._outgrown: list[_Area] = []  # a graph may still work there

    @staticmethod
    def of(device: Device) -> Transforms:
        """The same object every time."""
        return _transforms(device)

    def prepare(self, kind: Kind, *, double: bool, batches: Batches, stream: int) -> None:
        """Make the plan and its work area. Raises BackendUnavailable, CudaError, HeapExhausted."""
        plan = self._plan(kind, double, batches)
        area = self._areas.get(stream)
        if plan.work and (area is None or area.nbytes < plan.work):
            if area is not None:
                self._outgrown.append(area)
            self._areas[stream] = _Area(self.device, plan.work)

    def run(
        self,
        kind: Kind,
        source: int,
        target: int,
        stream: int,
        *,
        double: bool,
        batches: Batches,
        forward: bool,
        area: int | None = None,
    ) -> None:
        """Launch the transforms from `source` to `target`, addresses of the first elements.

        What was prepared, for this stream or for the stream `area`, on which a graph will be
        launched. From complex to real the source is lost.
        """
        self.device.activate()
        plan = self._plan(kind, double, batches)
        plan.captured = plan.captured or streams.capturing(stream)
        work = self._areas.get(stream if area is None else area)
        plan.bind(stream, work.address if plan.work and work is not None else 0)
        for src, dst in batches.offsets:
            plan.execute(source + src, target + dst, forward)

    def _plan(self, kind: Kind, double: bool, batches: Batches) -> _Plan:
        key = (kind, double, batches.plan)
        plan = self._plans.find(key)
        if plan is None:
            self.device.activate()
            plan = self._plans.keep(key, _Plan(_TYPES[kind, double], batches))
        return plan


class _Plans(LRUCache[_Key, "_Plan"]):
    """The plans of one device; those that a graph was captured with stay."""

    def __init__(self, device: Device) -> None:
        super().__init__(_KEPT)
        self._device = device

    def _oldest(self) -> list[_Key]:
        return [key for key in super()._oldest() if not self._entries[key][0].captured]

    def _drop(self, keys: list[_Key]) -> None:
        if keys:
            self._device.synchronize()  # they may still run
        for key in keys:
            self._entries[key][0].destroy()
        super()._drop(keys)


class _Plan:
    """A plan of cuFFT's."""

    def __init__(self, kind: int, batches: Batches) -> None:
        self._cufft = _cufft()
        self._kind = kind
        self._bound = (-1, -1)
        self.captured = False  # a graph needs it
        self._handle = _done("create", self._cufft.create)
        source, target = batches.source, batches.target
        try:
            _done("set_auto_allocation", self._cufft.set_auto_allocation, self._handle, 0)
            self.work: int = _done(
                f"a plan for {batches}",
                self._cufft.make_plan_many64,
                self._handle,
                len(batches.lengths),
                batches.lengths,
                *(source.embed, source.stride, source.distance),
                *(target.embed, target.stride, target.distance),
                kind,
                batches.count,
            )
        except BaseException:
            self.destroy()
            raise
        name = {0x29: "c2c", 0x2A: "r2c", 0x2C: "c2r", 0x69: "z2z", 0x6A: "d2z", 0x6C: "z2d"}[kind]
        self._execute = getattr(self._cufft, f"exec_{name}")

    def bind(self, stream: int, area: int) -> None:
        """Use this stream, and this work area."""
        if self._bound != (stream, area):
            _done("set_stream", self._cufft.set_stream, self._handle, stream)
            if self.work:
                _done("set_work_area", self._cufft.set_work_area, self._handle, area)
            self._bound = (stream, area)

    def execute(self, source: int, target: int, forward: bool) -> None:
        """Launch one call."""
        direction = () if self._kind & 0x0F != 0x09 else (-1 if forward else 1,)
        _done("a transform", self._execute, self._handle, source, target, *direction)

    def destroy(self) -> None:
        """Give it back."""
        self._cufft.destroy(self._handle)


class _Area:
    """Ordinary memory of the device, kept for the life of the process."""

    def __init__(self, device: Device, nbytes: int) -> None:
        device.activate()
        self.nbytes = nbytes
        self.address = int(call_for_memory(nbytes, "cuMemAlloc", nbytes))


def scale(
    device: Device,
    source: int,
    target: int,
    shape: Sequence[int],
    strides: tuple[Sequence[int], Sequence[int]],
    stream: int,
    *,
    dtypes: tuple[str, str],
    factor: float,
) -> None:
    """Launch: the real numbers at `source`, times `factor`, at `target`.

    `strides` are bytes, of source and target; `dtypes` theirs: both float32 or float64, or one of
    them float32 and the other float16 or bfloat16.
    """
    dims = _joined(sorted(zip(shape, *strides, strict=True), key=lambda dim: -abs(dim[2])))
    if 0 in shape:
        return
    if len(dims) > _DIMS:
        (extent, one, two), *rest = dims
        inner = [list(column) for column in zip(*rest, strict=True)]
        for i in range(extent):
            scale(
                device,
                source + i * one,
                target + i * two,
                inner[0],
                (inner[1], inner[2]),
                stream,
                dtypes=dtypes,
                factor=factor,
            )
        return
    vector, dims = _vectors(dims, (source, target), dtypes)
    count = math.prod(extent for extent, _, _ in dims)
    packed = struct.pack("QQdQQ", source, target, factor, count, len(dims))
    packed += b"".join(struct.pack("Qqq", *dim) for dim in dims)
    packed += bytes(24 * (_DIMS - len(dims)))
    defines = (f"SOURCE={dtypes[0]}", f"TARGET={dtypes[1]}", f"VECTOR={vector}")
    blocks = min(8 * device.processors, -(-count // _THREADS))
    kernel(device, "scale", "scale", defines).launch(stream, blocks, _THREADS, Argument(packed))


def _joined(dims: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The same indices in as few dimensions as there can be; the order stays."""
    found: list[tuple[int, int, int]] = []
    for dim in dims:
        if dim[0] == 1:
            continue
        if found and found[-1][1:] == (dim[0] * dim[1], dim[0] * dim[2]):
            found[-1] = (found[-1][0] * dim[0], *dim[1:])
        else:
            found.append(dim)
    return found


def _vectors(
    dims: list[tuple[int, int, int]], addresses: tuple[int, int], dtypes: tuple[str, str]
) -> tuple[int, list[tuple[int, int, int]]]:
    """How many neighbours go at once, and the dimensions with the last one counted in them."""
    sizes = tuple(dtype_of(dtype).itemsize for dtype in dtypes)
    vector = 16 // max(sizes)
    *outer, (extent, *steps) = dims or [(1, 0, 0)]
    if tuple(steps) != sizes or extent % vector:
        return 1, dims
    for side, size in enumerate(sizes):
        starts = (addresses[side], *(dim[1 + side] for dim in outer))
        if any(start % (vector * size) for start in starts):
            return 1, dims
    return vector, [*outer, (extent // vector, vector * sizes[0], vector * sizes[1])]


@cache
def _transforms(device: Device) -> Transforms:
    return Transforms(device)


@cache
def _cufft() -> Any:
    try:
        from nvmath.bindings import cufft

        cufft.get_version()
    except (ImportError, RuntimeError) as error:
        raise BackendUnavailable(
            "transforms on GPUs need cuFFT: pip install 'nvmath-python>=1.0' 'nvidia-cufft>=12' "
            f"({error})"
        ) from None
    return cufft


def _done(what: str, function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    except Exception as error:
        raise CudaError(f"cuFFT: {what}: {error}") from error
