"""Ordinary memory of a GPU, which no peer reaches."""

from __future__ import annotations

import weakref
from contextlib import suppress

from shardmath.cuda.device import Device
from shardmath.cuda.driver import beside_captures, call, call_for_memory
from shardmath.errors import CudaError


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


def _free(device: Device, address: int) -> None:
    with suppress(CudaError):
        device.activate()
        with beside_captures():
            call("cuMemFree", address)
