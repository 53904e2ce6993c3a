"""Kernels: loading and launching them.

Our kernels take one argument, a struct by value, which the host packs once in C's layout for many
launches. Users' kernels take any number of arguments.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from shardmath.cuda.compile import compiled, compiled_source
from shardmath.cuda.device import Device
from shardmath.cuda.driver import bindings, call, status_of

_PORTABLE = 8  # blocks of a cluster that every device with clusters supports

Extent = int | Sequence[int]  # of a grid or a block: along x, or along x, y and z


class Argument:
    """The bytes of each parameter of a kernel, at an address that the driver can read."""

    def __init__(self, *packed: bytes) -> None:
        self._bytes = [array("B", words) for words in packed]
        self._pointers = array("Q", [words.buffer_info()[0] for words in self._bytes])
        self.address = self._pointers.buffer_info()[0]  # what the driver calls kernelParams

    @property
    def first(self) -> bytes:
        """The bytes of the first parameter."""
        return self._bytes[0].tobytes()

    def change(self, packed: bytes) -> None:
        """Replace the first parameter by as many bytes."""
        memoryview(self._bytes[0])[:] = packed


class Kernel:
    """A function of a compiled file, on one device."""

    def __init__(self, device: Device, function: Any, *, shared: int = 0) -> None:
        self.device = device
        self.shared = shared  # bytes of dynamic shared memory
        self._function = function
        self._configs: dict[tuple[int, Extent, Extent, bool, int], Any] = {}
        if shared > 48 << 10:
            limit = bindings().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call("cuFuncSetAttribute", function, limit, shared)

    @property
    def handle(self) -> int:
        """The driver's handle."""
        return int(self._function)

    def load(self) -> None:
        """Load it now: loading at the first launch may wait for all running kernels."""
        self.device.activate()
        call("cuFuncLoad", self._function)

    def launch(
        self,
        stream: int,
        blocks: Extent,
        threads: Extent,
        argument: Argument,
        *,
        early: bool = False,
        cluster: int = 1,
    ) -> None:
        """Put it on `stream`.

        `early` is for a kernel that begins by waiting for the work ahead of it on the stream
        (griddepcontrol.wait): its launch overlaps with that work, where the device can do so. The
        blocks of a `cluster` run at the same time on neighbouring multiprocessors, if there are
        enough (`holds_clusters`); the grid along x is a multiple of it.
        """
        self.device.activate()
        grid, block = _three(blocks), _three(threads)
        early = early and self.device.overlaps_launches
        if early or cluster > 1:
            key = (stream, grid, block, early, cluster)
            if key not in self._configs:
                self._configs[key] = _config(
                    stream, grid, block, self.shared, early=early, cluster=cluster
                )
            call("cuLaunchKernelEx", self._configs[key], self._function, argument.address, 0)
            return
        call(
            "cuLaunchKernel",
            self._function,
            *grid,
            *block,
            self.shared,
            stream,
            argument.address,
            0,
        )

    def holds_clusters(self, count: int, size: int, threads: Extent) -> bool:
        """Whether the device, running nothing else, can run `count` clusters of `size` at once.

        It also allows launches with such clusters.
        """
        if size == 1:
            return True
        if not self.device.overlaps_launches:  # the same devices have clusters
            return False
        if size > _PORTABLE:
            names = bindings().CUfunction_attribute
            allowed = names.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            call("cuFuncSetAttribute", self._function, allowed, 1)
        config = _config(0, (size, 1, 1), _three(threads), self.shared, early=False, cluster=size)
        status, most = status_of("cuOccupancyMaxActiveClusters", self._function, config)
        return not status and int(most) >= count

    def ready(
        self, blocks: Extent, threads: Extent, argument: Argument, *, early: bool = False
    ) -> ReadyLaunch:
        """A launch for repeated use. `early` as for `launch`."""
        grid, block = _three(blocks), _three(threads)
        early = early and self.device.overlaps_launches
        config = _config(0, grid, block, self.shared, early=early)
        return ReadyLaunch(self._function, config, argument, (blocks, threads))


class ReadyLaunch:
    """A kernel with its grid and its argument, ready to be put on any stream, again and again.

    One thread at a time uses it. Made by `Kernel.ready`.
    """

    def __init__(
        self, function: Any, config: Any, argument: Argument, shape: tuple[Extent, Extent]
    ) -> None:
        self._function, self._config, self._argument = function, config, argument
        self._shape = shape
        self._stream = 0

    def change(self, packed: bytes) -> None:
        """Replace its argument from the next time on. See `Argument.change`."""
        self._argument.change(packed)

    @property
    def parts(self) -> tuple[int, Extent, Extent, bytes]:
        """The driver's handle of the kernel, its blocks and threads, and its one argument."""
        return int(self._function), *self._shape, self._argument.first

    def put(self, stream: int) -> None:
        """Put it on `stream`. The device's context must be the calling thread's."""
        if stream != self._stream:
            self._stream = -1  # in case of an exception before the next line
            self._config.hStream = stream
            self._stream = stream
        call("cuLaunchKernelEx", self._config, self._function, self._argument.address, 0)


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

    `features` "a" compiles for this architecture alone, with its own instructions.
    """
    key, arch = (file, *defines), device.arch + features
    return _loaded(device, key, function, shared, lambda: compiled(file, defines, arch))


def kernel_of_source(
    device: Device, source: str, function: str, options: Sequence[str] = (), *, shared: int = 0
) -> Kernel:
    """The kernel `function` of source text, compiled with further `options` of NVRTC.

    Raises CudaError, with the compiler's words, or where it has no such `extern "C"` function.
    """
    key = ("", source, *options)
    return _loaded(
        device, key, function, shared, lambda: compiled_source(source, options, device.arch)
    )


def _loaded(
    device: Device, code: tuple[str, ...], function: str, shared: int, make: Callable[[], bytes]
) -> Kernel:
    library, known = (device.ordinal, code), (device.ordinal, code, function, shared)
    with _lock:
        device.activate()
        if library not in _libraries:
            _libraries[library] = call("cuLibraryLoadData", make(), [], [], 0, [], [], 0)
        if known not in _kernels:
            handle = call("cuLibraryGetKernel", _libraries[library], function.encode())
            _kernels[known] = Kernel(device, call("cuKernelGetFunction", handle), shared=shared)
        return _kernels[known]


def _config(
    stream: int,
    grid: Sequence[int],
    block: Sequence[int],
    shared: int,
    *,
    early: bool,
    cluster: int = 1,
) -> Any:
    """A launch configuration, with clusters of `cluster` blocks.

    `early`: the kernel may start before the one ahead of it has ended.
    """
    driver = bindings()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes = shared
    config.hStream = stream
    names, attributes = driver.CUlaunchAttributeID, []
    if early:
        attribute = driver.CUlaunchAttribute()
        attribute.id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        extents = attribute.value.clusterDim
        extents.x, extents.y, extents.z = cluster, 1, 1
        attributes.append(attribute)
    if attributes:
        config.attrs = attributes
        config.numAttrs = len(attributes)
    return config


def _three(extent: Extent) -> tuple[int, int, int]:
    given = (extent,) if isinstance(extent, int) else tuple(extent)
    if not 1 <= len(given) <= 3:
        raise ValueError(f"a grid or a block has one to three dimensions, not {extent!r}")
    x, y, z = (*given, 1, 1)[:3]
    return x, y, z


_lock = threading.RLock()
_libraries: dict[tuple[int, tuple[str, ...]], Any] = {}
_kernels: dict[tuple[int, tuple[str, ...], str, int], Kernel] = {}
