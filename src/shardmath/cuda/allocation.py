"""Memory of a GPU that no peer reaches, and data in it that nobody changes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from shardmath.cuda.device import Device
from shardmath.cuda.driver import beside_captures, bindings, call, call_for_memory
from shardmath.cuda.fence import DeferredReuse
from shardmath.errors import CudaError

_KEPT_BYTES = 64 << 20  # of memory that is free, from the driver


class Allocation:
    """`nbytes` at `address` on the device, uninitialised; they go with this object.

    Whoever only has to know whether they are still the same ones keeps `identity`.
    It can be made and dropped while a stream is being captured into a CUDA graph. Dropping it waits
    for the kernels that may still use it.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        """Raises HeapExhausted where the device has no memory."""
        self.nbytes = nbytes
        self.identity = object()
        self.address = 0
        if not nbytes:
            return
        device.activate()
        with beside_captures():
            self.address = int(call_for_memory(nbytes, "cuMemAlloc", nbytes))
        weakref.finalize(self, _free, device, self.address).atexit = False


class Constant:
    """The bytes of an array, written to the device once, at `address`; they go with this object.

    It can be made and dropped while a stream is being captured into a CUDA graph. Dropping it waits
    for nothing: kernels that were launched before may still read it.
    """

    def __init__(self, device: Device, array: npt.NDArray[np.generic]) -> None:
        """Raises HeapExhausted where the device has no memory."""
        data = np.ascontiguousarray(array)
        self.address = 0
        if not data.nbytes:
            return
        device.activate()
        with beside_captures(), _waited_for() as stream:
            pool = _pool(device)
            self.address = pool.take(data.nbytes, stream)
            weakref.finalize(self, pool.left.leave, self.address).atexit = False
            call("cuMemcpyHtoDAsync", self.address, data.ctypes.data, data.nbytes, stream)


def _free(device: Device, address: int) -> None:
    with suppress(CudaError):
        device.activate()
        with beside_captures():
            call("cuMemFree", address)


@contextmanager
def _waited_for() -> Iterator[Any]:
    """A stream of its own, which does not wait for the default stream, and is waited for."""
    stream = call("cuStreamCreate", 1)
    try:
        yield stream
        call("cuStreamSynchronize", stream)
    finally:
        call("cuStreamDestroy", stream)


class _Pool:
    """Memory of one device for constants. What is dropped returns here behind a fence.

    The driver's own free waits for all that the device does.
    """

    def __init__(self, device: Device) -> None:
        driver = bindings()
        props = driver.CUmemPoolProps()
        props.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        props.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        props.location.id = device.ordinal
        self._pool = call("cuMemPoolCreate", props)
        threshold = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        call("cuMemPoolSetAttribute", self._pool, threshold, driver.cuuint64_t(_KEPT_BYTES))
        self.left: DeferredReuse[int] = DeferredReuse(device)

    def take(self, nbytes: int, stream: Any) -> int:
        """The address of `nbytes` that `stream` can use from here on. Raises HeapExhausted."""
        for address in self.left.free():
            call("cuMemFreeAsync", address, stream)
        name = "cuMemAllocFromPoolAsync"
        return int(call_for_memory(nbytes, name, nbytes, self._pool, stream))


@cache
def _pool(device: Device) -> _Pool:
    return _Pool(device)
