"""CuPy arrays: memory of one GPU.

CuPy is imported only inside verbs, and whoever calls them has imported it already.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, ClassVar

from shardmath.arrays import dtypes
from shardmath.arrays.base import Attributes, HostArray, Library, Space, in_elements
from shardmath.arrays.dtypes import DType
from shardmath.arrays.spec import ArraySpec, Packed


class CuPy(Library):
    """`cupy.ndarray` and its subclasses."""

    name: ClassVar[str] = "cupy"
    spaces: ClassVar[tuple[Space, ...]] = ("cuda",)

    def owns_type(self, kind: type) -> bool:
        # Judged by name, without an import.
        return any(
            base.__name__ == "ndarray" and base.__module__.split(".")[0] == "cupy"
            for base in kind.__mro__
        )

    def spec(self, x: Any) -> ArraySpec:
        """The spec; ValueError also for strides that are no multiple of the itemsize."""
        return _spec(x.dtype, x.shape, x.strides, x.device.id)

    def pointer(self, x: Any) -> int:
        return int(x.data.ptr)

    def host_view(self, x: Any, *, writable: bool = False, name: str = "out") -> HostArray:
        """ValueError: the memory is the GPU's."""
        raise ValueError(
            f"this cupy array is on cuda:{x.device.id}, and the call needs host memory; "
            "pass x.get()"
        )

    def attributes(self) -> Attributes | None:
        cupy: Any = sys.modules.get("cupy")
        if cupy is None:
            return None
        return Attributes(
            cupy.ndarray,
            address="data.ptr",
            strides="strides",
            device="data.device_id",
            on_gpu="",
            contiguous="flags.c_contiguous",
            special=(),
            stream=self.stream,
        )

    def on_host(self, x: Any) -> HostArray:
        host: HostArray = x.get()
        return host

    def from_host(self, host: HostArray) -> Any:
        """ValueError: CuPy's arrays are never in host memory."""
        raise ValueError("cupy has no arrays in host memory; initialize with a CUDA device")

    def from_bytes(
        self, raw: HostArray, dtype: DType | str, shape: Sequence[int], strides: Sequence[int]
    ) -> Any:
        return self.from_host(raw)

    def anchor(self, x: Any) -> int:
        """Where the allocation starts."""
        return int(x.data.mem.ptr)

    def on_device(
        self,
        owner: Any,
        dtype: DType | str,
        shape: Sequence[int],
        strides: Sequence[int],
        *,
        start: int = 0,
    ) -> Any:
        address = owner.__cuda_array_interface__["data"][0]
        place = address if 0 in shape else address + start  # an empty array may start at the end
        return self.viewer(dtype, shape, strides, owner.device)(owner, place)

    def viewer(
        self, dtype: DType | str, shape: Sequence[int], strides: Sequence[int], device: str
    ) -> Callable[[Any, int], Any]:
        import cupy

        native, extents = dtypes.to_numpy(dtype), tuple(shape)
        steps = tuple([stride * native.itemsize for stride in strides])
        ends = [(extent - 1) * step for extent, step in zip(extents, steps, strict=True)]
        nbytes = 0 if 0 in extents else sum(ends) + native.itemsize
        # The pointer of a peer's memory belongs to the peer's device: the array is to be on ours.
        ordinal = int(device.removeprefix("cuda:"))
        memory, pointer, array = cupy.cuda.UnownedMemory, cupy.cuda.MemoryPointer, cupy.ndarray

        def view(owner: Any, address: int) -> Any:
            place = pointer(memory(address, nbytes, owner, ordinal), 0)
            return array(extents, native, place, steps)  # names cost more than the rest

        return view

    def stream(self, ordinal: int) -> int:
        cupy: Any = sys.modules.get("cupy")
        return 0 if cupy is None else int(cupy.cuda.get_current_stream(ordinal).ptr)

    def maker(
        self, shape: Sequence[int], dtype: DType | str, order: Packed, device: str = "cpu"
    ) -> Callable[[], Any]:
        import cupy

        if not device.startswith("cuda:"):
            raise ValueError(f"cupy has no arrays on {device}")
        extents, native = tuple(shape), dtypes.to_numpy(dtype)
        ordinal = int(device.removeprefix("cuda:"))

        def make() -> Any:
            with cupy.cuda.Device(ordinal):
                return cupy.ndarray(extents, native, None, None, order)  # see `viewer`

        return make


@lru_cache(maxsize=1024)
def _spec(of: Any, shape: tuple[int, ...], strides: tuple[int, ...], ordinal: int) -> ArraySpec:
    """A spec, kept since a program passes arrays of the same few kinds again and again."""
    dtype = dtypes.of(of)
    steps = in_elements(strides, shape, dtype, "cupy")
    return ArraySpec(CuPy.name, dtype.name, shape, steps, f"cuda:{ordinal}", dtype.itemsize)
