"""A kernel of the user's own: compiled from source text, launched with arrays and numbers.

It is compiled as ours are, for one device, with the folder of `symm.cuh` on its include path, and
kept on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardmath.arrays import library_of
from shardmath.cuda import stream as streams
from shardmath.cuda.device import Device
from shardmath.cuda.kernel import Argument, Extent, Kernel, kernel_of_source

__all__ = ["SourceKernel"]


class SourceKernel:
    """A kernel from source text: `kernel(blocks, threads, *arguments, stream=None)` launches it.

    `blocks` and `threads` are integers, or up to three along x, y, z. Arguments are what the
    kernel's parameters say: an array of CuPy or torch for a pointer; an int for `long long`, a
    float for `double`; a NumPy scalar or array for its own bytes, structs too. `stream` is None for
    the current stream of the library that was named.

    Raises ValueError for another argument, or an array of another device.
    """

    def __init__(
        self,
        device: Device,
        source: str,
        function: str,
        options: Sequence[str] = (),
        *,
        shared: int = 0,
        library: str = "torch",
    ) -> None:
        self._kernel: Kernel = kernel_of_source(device, source, function, options, shared=shared)
        self._device = device
        self._library = library

    def __call__(
        self, blocks: Extent, threads: Extent, *arguments: Any, stream: Any = None
    ) -> None:
        """Put it on a stream."""
        packed = Argument(*(_packed(value, self._device) for value in arguments))
        where = streams.resolve_stream(stream, self._library, self._device)
        self._kernel.launch(where, blocks, threads, packed)


def _packed(value: Any, device: Device) -> bytes:
    """What the kernel gets for `value`, in its parameter's layout."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tobytes()
    if isinstance(value, bool):
        return np.bool_(value).tobytes()
    if isinstance(value, int):
        return np.int64(value).tobytes()
    if isinstance(value, float):
        return np.float64(value).tobytes()
    library = library_of(value)
    spec = library.spec(value)
    if spec.device != device.name:
        raise ValueError(
            f"an argument of the kernel is on {spec.device}, and the kernel runs on {device.name}"
        )
    return np.uint64(library.pointer(value)).tobytes()
