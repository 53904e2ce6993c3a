"""NumPy arrays: the library that is always there, and with which cores compute."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, ClassVar

import numpy as np

from shardmath.arrays import dtypes
from shardmath.arrays.base import HostArray, Library, Space, in_elements
from shardmath.arrays.dtypes import DType
from shardmath.arrays.spec import ArraySpec, Packed, byte_span, overlaps


class NumPy(Library):
    """`numpy.ndarray` and its subclasses, masked arrays excepted: they hold a second array."""

    name: ClassVar[str] = "numpy"
    spaces: ClassVar[tuple[Space, ...]] = ("cpu",)
    _new: ClassVar[Callable[..., HostArray]] = staticmethod(np.empty)  # of shape, dtype and order

    def owns_type(self, kind: type) -> bool:
        return issubclass(kind, np.ndarray) and not any(
            base.__module__.startswith("numpy.ma") for base in kind.__mro__
        )

    def spec(self, x: HostArray) -> ArraySpec:
        """The spec; ValueError also for strides that are no multiple of the itemsize."""
        return _spec(x.dtype, x.shape, x.strides)

    def pointer(self, x: HostArray) -> int:
        return int(x.__array_interface__["data"][0])

    def is_writable(self, x: HostArray) -> bool:
        return x.flags.writeable

    def identity(self, x: HostArray) -> tuple[ArraySpec, int]:
        return _spec(x.dtype, x.shape, x.strides), x.__array_interface__["data"][0]

    def host_view(self, x: HostArray, *, writable: bool = False, name: str = "out") -> HostArray:
        if writable and not x.flags.writeable:
            raise ValueError(
                f"{name} is read-only, and the call writes into it: pass a writable array"
            )
        if writable and overlaps(x.shape, x.strides):
            raise ValueError(
                f"{name} is a broadcast view, and the call writes into it: pass an ordinary array"
            )
        return np.asarray(x)

    def is_read_by_compiled_code(self) -> bool:
        """True: compiled code knows how NumPy's arrays are laid out."""
        return True

    def from_host(self, host: HostArray) -> HostArray:
        return host

    def from_bytes(
        self, raw: HostArray, dtype: DType | str, shape: Sequence[int], strides: Sequence[int]
    ) -> HostArray:
        native = dtypes.to_numpy(dtype)
        in_bytes = tuple([stride * native.itemsize for stride in strides])
        return np.ndarray(tuple(shape), native, raw, 0, in_bytes)

    def viewer(
        self, dtype: DType | str, shape: Sequence[int], strides: Sequence[int], device: str
    ) -> Callable[[Any, int], Any]:
        if device != "cpu" or 0 in shape:
            return super().viewer(dtype, shape, strides, device)
        native, extents = dtypes.to_numpy(dtype), tuple(shape)
        in_bytes = tuple([stride * native.itemsize for stride in strides])
        _, nbytes = byte_span(extents, in_bytes, native.itemsize)
        memory_at = (ctypes.c_char * nbytes).from_address

        def view(owner: Any, address: int) -> HostArray:
            memory: Any = memory_at(address)
            memory.owner = owner
            return np.ndarray(extents, native, memory, 0, in_bytes)

        return view

    def anchor(self, x: HostArray) -> int:
        """Where the array starts that `x` is a view of, directly or through other views."""
        while isinstance(x.base, np.ndarray):
            x = x.base
        return int(x.__array_interface__["data"][0])

    def maker(
        self, shape: Sequence[int], dtype: DType | str, order: Packed, device: str = "cpu"
    ) -> Callable[[], HostArray]:
        if device != "cpu":
            raise ValueError(f"numpy has no arrays on {device}: pass the module cupy or torch")
        return partial(self._new, tuple(shape), dtypes.to_numpy(dtype), order)


@lru_cache(maxsize=1024)
def _spec(of: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...]) -> ArraySpec:
    """A spec, kept since a program passes arrays of the same few kinds again and again."""
    dtype = dtypes.of(of)
    steps = in_elements(strides, shape, dtype, "numpy")
    return ArraySpec(NumPy.name, dtype.name, shape, steps, "cpu", dtype.itemsize)
