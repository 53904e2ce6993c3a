"""Memory of a GPU that peers do not reach, and constants in it."""

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
    """`nbytes` at `address` on the device, uninitialised, freed with this object.

    `identity` tells whether it is still the same memory, without keeping that alive. It can be made
    and dropped while a stream is being captured into a CUDA graph. Dropping it waits for kernels
    that may still use it.
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
    """The bytes of an array, written to the device once, at `address`, and freed with this object.

    It can be made and dropped while a stream is being captured into a CUDA graph. Dropping it does
    not wait: kernels that were launched before may still read it.
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
    """A new stream that does not wait for the default one; the block ends when it is done."""
    stream = call("cuStreamCreate", 1)
    try:
        yield stream
        call("cuStreamSynchronize", stream)
    finally:
        call("cuStreamDestroy", stream)


class _Pool:
    """A pool of memory of one device for constants, which are freed behind a fence.

    The driver's own free would wait for all that the device does.
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
