"""Data that kernels read and nobody changes: written to the GPU once, and kept there."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from shardmath.cuda.device import Device
from shardmath.cuda.driver import bindings, call, call_for_memory
from shardmath.errors import CudaError

__all__ = ["Constant", "beside_captures", "fill"]


class Constant:
    """The bytes of an array at `address` on the device; they go with this object.

    It can be made and dropped while a stream is being captured into a CUDA graph. Dropping it waits
    for the kernels that may still read it.
    """

    def __init__(self, device: Device, array: npt.NDArray[np.generic]) -> None:
        """Raises HeapExhausted where the device has no memory."""
        data = np.ascontiguousarray(array)
        self.address = 0
        if not data.nbytes:
            return
        device.activate()
        with beside_captures():
            self.address = int(call_for_memory(data.nbytes, "cuMemAlloc", data.nbytes))
            weakref.finalize(self, _free, device, self.address).atexit = False
            with _waited_for() as stream:
                call("cuMemcpyHtoDAsync", self.address, data.ctypes.data, data.nbytes, stream)


def fill(device: Device, address: int, byte: int, nbytes: int) -> None:
    """Set all bytes of memory, and wait until they are: now, also while a stream is captured."""
    device.activate()
    with beside_captures(), _waited_for() as stream:
        call("cuMemsetD8Async", address, byte, nbytes, stream)


@contextmanager
def _waited_for() -> Iterator[Any]:
    """A stream of its own, which does not wait for the default stream, and is waited for."""
    stream = call("cuStreamCreate", 1)
    try:
        yield stream
        call("cuStreamSynchronize", stream)
    finally:
        call("cuStreamDestroy", stream)


def _free(device: Device, address: int) -> None:
    with suppress(CudaError):
        device.activate()
        with beside_captures():
            call("cuMemFree", address)


@contextmanager
def beside_captures() -> Iterator[None]:
    """Calls of this thread are no part of what it captures, and do not spoil it."""
    relaxed = bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = call("cuThreadExchangeStreamCaptureMode", relaxed)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)
