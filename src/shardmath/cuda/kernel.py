"""Kernels that are loaded, and how they are launched.

A kernel takes one argument, a struct by value: the host packs it once, in the layout that C gives
it, and can launch it many times.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardmath.cuda.compile import compiled
from shardmath.cuda.device import Device
from shardmath.cuda.driver import bindings, call

__all__ = ["Argument", "Kernel", "kernel"]


class Argument:
    """The bytes of the struct that a kernel takes, at an address that the driver can read."""

    def __init__(self, packed: bytes) -> None:
        self.bytes = np.frombuffer(bytearray(packed), np.uint8)
        self._pointers = np.array([self.bytes.ctypes.data], np.uint64)
        self.address = int(self._pointers.ctypes.data)  # what the driver calls kernelParams


class Kernel:
    """A function of a compiled file, on one device."""

    def __init__(self, device: Device, function: Any, *, shared: int = 0) -> None:
        self.device = device
        self.shared = shared  # bytes of dynamic shared memory
        self._function = function
        if shared > 48 << 10:
            limit = bindings().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call("cuFuncSetAttribute", function, limit, shared)

    def launch(self, stream: int, blocks: int, threads: int, argument: Argument) -> None:
        """Put it on `stream`; blocks and threads are counted along one axis."""
        self.device.activate()
        call(
            "cuLaunchKernel",
            self._function,
            *(blocks, 1, 1),
            *(threads, 1, 1),
            self.shared,
            stream,
            argument.address,
            0,
        )


def kernel(
    device: Device,
    file: str,
    function: str,
    defines: Sequence[str] = (),
    *,
    shared: int = 0,
    features: str = "",
) -> Kernel:
    """The kernel `function` of `kernels/<file>.cu`, compiled and loaded when first asked for.

    `features` "a" compiles for exactly this architecture, with what later ones do not have.
    """
    key = (device.ordinal, file, tuple(defines))
    with _lock:
        if key not in _libraries:
            device.activate()
            code = compiled(file, defines, device.arch + features)
            _libraries[key] = call("cuLibraryLoadData", code, [], [], 0, [], [], 0)
        if (key, function) not in _kernels:
            device.activate()
            handle = call("cuLibraryGetKernel", _libraries[key], function.encode())
            loaded = Kernel(device, call("cuKernelGetFunction", handle), shared=shared)
            _kernels[key, function] = loaded
        return _kernels[key, function]


_lock = threading.Lock()
_libraries: dict[tuple[int, str, tuple[str, ...]], Any] = {}
_kernels: dict[tuple[tuple[int, str, tuple[str, ...]], str], Kernel] = {}
