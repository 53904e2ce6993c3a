"""One rank's Fourier transforms on its GPU: cuFFT, on addresses and a stream.

Plans are kept. Those on one stream share a work area, since their calls follow each other.
`prepare` does what takes memory or time; `run` only launches, and can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

from shardmath.arrays.dtypes import of as dtype_of
from shardmath.arrays.spec import Dimension, coalesced
from shardmath.base.lru_cache import LRUCache
from shardmath.cuda import stream as streams
from shardmath.cuda.allocation import Allocation
from shardmath.cuda.device import Device
from shardmath.cuda.kernel import Argument, kernel
from shardmath.cuda.packages import bindings_of
from shardmath.errors import CudaError
from shardmath.local.fft import Kind
from shardmath.local.plan_many import PlanMany

_MAX_PLANS = 256
_CUFFT_TYPES = {  # (kind, double): cufftType
    ("C2C", False): 0x29,
    ("R2C", False): 0x2A,
    ("C2R", False): 0x2C,
    ("C2C", True): 0x69,
    ("R2C", True): 0x6A,
    ("C2R", True): 0x6C,
}
_DIMS = 65  # kDims of strided.cuh
_THREADS = 256

_Key = tuple[Kind, bool, PlanMany]


class CuFFT:
    """The plans of one device, and their work areas. Get it with `CuFFT.of`."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._plans = _Plans(device)
        self._work_areas: dict[int, Allocation] = {}  # by stream
        self._outgrown: list[Allocation] = []  # graphs may still use these

    @staticmethod
    @cache
    def of(device: Device) -> CuFFT:
        """The plans of a device."""
        return CuFFT(device)

    def prepare(self, kind: Kind, *, double: bool, plan: PlanMany, stream: int) -> None:
        """Make the plan and its work area. Raises BackendUnavailable, CudaError, HeapExhausted."""
        nbytes = self._plan(kind, double, plan).work_bytes
        work_area = self._work_areas.get(stream)
        if nbytes and (work_area is None or work_area.nbytes < nbytes):
            if work_area is not None:
                self._outgrown.append(work_area)
            self._work_areas[stream] = Allocation(self.device, nbytes)

    def run(
        self,
        kind: Kind,
        source: int,
        target: int,
        stream: int,
        *,
        double: bool,
        plan: PlanMany,
        forward: bool,
        work_area: int | None = None,
    ) -> None:
        """Launch the transforms from `source` to `target`, addresses of the first elements.

        They have been prepared for this stream, or for the stream `work_area`, on which a graph
        will be launched. C2R overwrites its source.
        """
        self.device.activate()
        held_plan = self._plan(kind, double, plan)
        held_plan.captured = held_plan.captured or streams.capturing(stream)
        area = self._work_areas.get(stream if work_area is None else work_area)
        held_plan.bind(stream, area.address if held_plan.work_bytes and area is not None else 0)
        for src, dst in plan.offsets:
            held_plan.execute(source + src, target + dst, forward)

    def _plan(self, kind: Kind, double: bool, plan: PlanMany) -> _Plan:
        key = (kind, double, plan.without_calls)
        held_plan = self._plans.find(key)
        if held_plan is None:
            self.device.activate()
            held_plan = self._plans.keep(key, _Plan(_CUFFT_TYPES[kind, double], plan))
        return held_plan


class _Plans(LRUCache[_Key, "_Plan"]):
    """The plans of one device. Those that captured graphs use are never dropped."""

    def __init__(self, device: Device) -> None:
        super().__init__(_MAX_PLANS)
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
    """One plan of cuFFT: a cufftHandle."""

    def __init__(self, kind: int, plan: PlanMany) -> None:
        self._cufft = _cufft()
        self._kind = kind
        self._bound = (-1, -1)
        self.captured = False  # a graph needs it
        self._handle = _checked("create", self._cufft.create)
        source, target = plan.source, plan.target
        try:
            _checked("set_auto_allocation", self._cufft.set_auto_allocation, self._handle, 0)
            self.work_bytes: int = _checked(
                f"a plan for {plan}",
                self._cufft.make_plan_many64,
                self._handle,
                len(plan.lengths),
                plan.lengths,
                *(source.embed, source.stride, source.distance),
                *(target.embed, target.stride, target.distance),
                kind,
                plan.batch,
            )
        except BaseException:
            self.destroy()
            raise
        name = {0x29: "c2c", 0x2A: "r2c", 0x2C: "c2r", 0x69: "z2z", 0x6A: "d2z", 0x6C: "z2d"}[kind]
        self._execute = getattr(self._cufft, f"exec_{name}")

    def bind(self, stream: int, work_area: int) -> None:
        """Use this stream, and this work area."""
        if self._bound != (stream, work_area):
            self._bound = (-1, -1)  # whatever an exception leaves
            _checked("set_stream", self._cufft.set_stream, self._handle, stream)
            if self.work_bytes:
                _checked("set_work_area", self._cufft.set_work_area, self._handle, work_area)
            self._bound = (stream, work_area)

    def execute(self, source: int, target: int, forward: bool) -> None:
        """Launch one call."""
        direction = () if self._kind & 0x0F != 0x09 else (-1 if forward else 1,)
        _checked("a transform", self._execute, self._handle, source, target, *direction)

    def destroy(self) -> None:
        """Give the plan back."""
        self._cufft.destroy(self._handle)


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
    """Launch: write the real numbers at `source`, times `factor`, to `target`.

    `strides` are bytes, of source and target; `dtypes` theirs: both float32 or float64, or one of
    them float32 and the other float16 or bfloat16.
    """
    dims = coalesced(sorted(zip(shape, *strides, strict=True), key=_speed))[::-1]
    vector, dims = _vectorized(dims, (source, target), dtypes)
    defines = (f"SOURCE={dtypes[0]}", f"TARGET={dtypes[1]}", f"VECTOR={vector}")
    packed = _packed(source, target, dims) + struct.pack("d", factor)
    _launch(device, "scale", defines, dims, packed, stream)


def turn(
    device: Device,
    source: int,
    target: int,
    shape: Sequence[int],
    strides: tuple[Sequence[int], Sequence[int]],
    stream: int,
    *,
    axis: int,
    length: int,
    factors: int,
    dtypes: tuple[str, str],
) -> None:
    """Launch: multiply the numbers at `source` along an axis by complex factors, and write to
    `target`, of this shape, complex numbers if the source is real, and else their real parts.

    The source has `length` numbers along the axis, as have the factors at address `factors`; the
    rest of the target becomes 0. `strides` are bytes. `dtypes` are those of source and target: one
    is complex, the other the type of its parts, or a narrower one for a source.
    """
    dims = list(zip(shape, *strides, strict=True))
    along = dims.pop(axis)
    dims.sort(key=_speed)
    faster = [dim for dim in dims if _speed(dim) < _speed(along)]
    inner, outer = coalesced(faster)[::-1], coalesced(dims[len(faster) :])[::-1]
    dims = [*outer, along, *inner]
    factor = next(dtype for dtype in dtypes if dtype.startswith("complex"))
    defines = (f"SOURCE={dtypes[0]}", f"TARGET={dtypes[1]}", f"FACTOR={factor}")
    packed = _packed(source, target, dims) + struct.pack("QQQ", factors, len(outer), length)
    _launch(device, "turn", defines, dims, packed, stream)


def _speed(dim: Dimension) -> int:
    """The distance of neighbours in the target."""
    return abs(dim[2])


def _packed(source: int, target: int, dims: Sequence[Dimension]) -> bytes:
    """The struct of strided.cuh, packed."""
    count = math.prod(extent for extent, _, _ in dims)
    words = [word for dim in dims for word in dim]
    packed = struct.pack(f"QQQQ{len(words)}q", source, target, count, len(dims), *words)
    return packed + bytes(24 * (_DIMS - len(dims)))


def _launch(
    device: Device,
    name: str,
    defines: tuple[str, ...],
    dims: Sequence[Dimension],
    packed: bytes,
    stream: int,
) -> None:
    """Launch the kernel of that name, one thread for some of the elements."""
    count = math.prod(extent for extent, _, _ in dims)
    blocks = min(8 * device.processors, -(-count // _THREADS))
    if count:
        kernel(device, name, name, defines).launch(stream, blocks, _THREADS, Argument(packed))


def _vectorized(
    dims: list[Dimension], addresses: tuple[int, int], dtypes: tuple[str, str]
) -> tuple[int, list[Dimension]]:
    """The elements in a vector of 16 bytes, or 1; and the dimensions, counted in vectors."""
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
def _cufft() -> Any:
    return bindings_of("nvmath.bindings.cufft", "get_version", "transforms on GPUs need cuFFT")


def _checked(what: str, function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    except Exception as error:
        raise CudaError(f"cuFFT: {what}: {error}") from error
