"""The few verbs through which everything above speaks to an array library.

A library is one subclass in one file. No verb imports the library for the user: whoever holds an
array of it, or its module, has imported it already.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np

from shardmath.arrays import dtypes
from shardmath.arrays.dtypes import DType
from shardmath.arrays.spec import ArraySpec, Packed

HostArray = np.ndarray[Any, np.dtype[Any]]
Array = TypeVar("Array")  # any library's: what a public function returns is of the kind it is given
Space = Literal["cpu", "cuda"]


class Attributes(NamedTuple):
    """How compiled code reads a library's arrays of the class `kind`, see attributes.h.

    Paths such as "data.ptr", or "data_ptr()" for a method, lead from an array to its facts:
    `address`, an integer; `strides`, a tuple of integers in any unit; `device`, the number of its
    GPU; `on_gpu`, whether it lies on one ("" where all arrays do); and `contiguous`, whether its
    elements lie in C order without gaps. The attributes `shape` and `dtype` are a tuple and an
    object that lives as long as the array. Python looks at an array for which a fact in `special`
    is true.

    `stream(ordinal)` is the calling thread's current stream on that GPU, and `like(x)` makes an
    array of the shape, dtype and device of a contiguous `x`; None where `Library.maker` is as
    quick.
    """

    kind: type
    address: str
    strides: str
    device: str
    on_gpu: str
    contiguous: str
    special: tuple[str, ...]
    stream: Callable[[int], int]
    like: Callable[[Any], Any] | None = None


class Library(ABC):
    """One array library. Instances have no state; `name` is the name of the module users import.

    `spaces` are the kinds of memory that its arrays may lie in. `transforms` says whether it has
    Fourier transforms of its own, which compute on its arrays; they start threads.
    """

    name: ClassVar[str]
    spaces: ClassVar[tuple[Space, ...]]
    transforms: ClassVar[bool] = False

    @abstractmethod
    def owns_type(self, kind: type) -> bool:
        """Whether instances of the class `kind` are arrays of this library."""

    def records(self, x: Any) -> bool:
        """Whether the library would now record operations on `x` in order to differentiate them."""
        return False

    @abstractmethod
    def spec(self, x: Any) -> ArraySpec:
        """The spec of `x`. Raises ValueError where its dtype or layout is unsupported."""

    @abstractmethod
    def pointer(self, x: Any) -> int:
        """The address of the element with index 0 along every axis."""

    @abstractmethod
    def host_view(self, x: Any, *, writable: bool = False, name: str = "out") -> HostArray:
        """A NumPy array on the memory of `x`, with its shape, strides and true dtype.

        What can be read but has no such memory (a torch tensor that is lazily conjugated or
        negated) is resolved into a copy. With `writable=True` the result is never a copy:
        ValueError, naming the argument, where `x` is read-only, lazy, or has several indices for
        one element. Raises ValueError when the memory is not the host's.
        """

    def is_lazy(self, x: Any) -> bool:
        """Whether the values of `x` are those in its memory conjugated or negated."""
        return False

    def is_writable(self, x: Any) -> bool:
        """Whether elements of `x` may be set."""
        return True

    def identity(self, x: Any) -> tuple[ArraySpec, int] | None:
        """The spec and the pointer of `x`, by which repeated calls recognise it. Raises as `spec`.

        None for an array that is lazy, or that the library would record operations on.
        """
        return None if self.is_lazy(x) or self.records(x) else (self.spec(x), self.pointer(x))

    def attributes(self) -> Attributes | None:
        """How compiled code reads arrays of this library, to repeat calls quickly.

        None where only these verbs can, and as long as the library has not been imported.
        """
        return None

    def is_read_by_compiled_code(self) -> bool:
        """Whether compiled code finds the memory of this library's arrays."""
        return self.attributes() is not None

    def on_host(self, x: Any) -> HostArray:
        """The elements of `x` as a NumPy array: on its memory, or copied from the GPU."""
        return self.host_view(x)

    @abstractmethod
    def from_host(self, host: HostArray) -> Any:
        """An array of this library on the memory of `host`, which it keeps alive.

        Raises ValueError where the library cannot express `host`'s strides or dtype.
        """

    def on_device(
        self,
        owner: Any,
        dtype: DType | str,
        shape: Sequence[int],
        strides: Sequence[int],
        *,
        start: int = 0,
    ) -> Any:
        """An array of this library on GPU memory, from byte `start` of `owner` on.

        `owner`, which it keeps alive, has a `__cuda_array_interface__` of bytes and says its
        `device`, such as "cuda:0"; `strides` are in elements. Raises ValueError where the library
        has no arrays on GPUs, or lacks the dtype.
        """
        raise ValueError(f"{self.name} has no arrays on GPUs; pass the module cupy or torch")

    @abstractmethod
    def from_bytes(
        self, raw: HostArray, dtype: DType | str, shape: Sequence[int], strides: Sequence[int]
    ) -> Any:
        """An array of this library on `raw`, contiguous bytes, which it keeps alive.

        `strides`, in elements, must stay within `raw`. Raises ValueError where the library lacks
        the dtype.
        """

    @abstractmethod
    def anchor(self, x: Any) -> int:
        """The start of the memory that `x` is a view of, even where `x` has no elements."""

    def empty(
        self, shape: Sequence[int], dtype: DType | str, order: Packed = "C", device: str = "cpu"
    ) -> Any:
        """A new array with undefined elements; ValueError where there is none on `device`."""
        return self.maker(shape, dtype, order, device)()

    @abstractmethod
    def maker(
        self, shape: Sequence[int], dtype: DType | str, order: Packed, device: str = "cpu"
    ) -> Callable[[], Any]:
        """A function that makes a new array each time, as `empty` does."""

    def viewer(
        self, dtype: DType | str, shape: Sequence[int], strides: Sequence[int], device: str
    ) -> Callable[[Any, int], Any]:
        """A function `view(owner, address)` that makes an array on memory of `device`.

        `owner` is the memory, as `from_bytes` or `on_device` takes it, `address` its address.
        """
        if device == "cpu":
            return lambda owner, _: self.from_bytes(np.asarray(owner), dtype, shape, strides)
        return lambda owner, _: self.on_device(owner, dtype, shape, strides)

    def offers(self, dtype: str) -> bool:
        """Whether users can make arrays of the data type of that name."""
        return dtype != "complex32"

    def matmul(self, a: HostArray, b: HostArray, out: HostArray) -> bool:
        """Set `out` to a @ b, summed in float32 and rounded once, and return True.

        False, with nothing done, where these cores do not do that faster than in float32. All three
        have one dtype, and are not empty.
        """
        return False

    def contiguous(self, x: Any) -> Any:
        """`x` in C order and not lazy: itself, or a copy made on the current stream."""
        return x if self.spec(x).order in ("C", "both") else x.copy("C")

    def cast(self, x: Any, dtype: DType) -> Any:
        """The elements of `x` in another data type, in new memory."""
        return x.astype(dtypes.to_numpy(dtype))

    def resolved(self, x: Any) -> Any:
        """`x`, or a copy with its values in memory where it is lazy."""
        return x

    def transform(
        self, x: HostArray, axes: Sequence[int], function: str, norm: str, s: Sequence[int] | None
    ) -> HostArray:
        """The result of a function of numpy.fft on `x`, in new memory.

        `function` is "fftn", "ifftn", "rfftn" or "irfftn"; the others are its arguments.
        """
        raise NotImplementedError(f"{self.name} has no Fourier transforms")

    def stream(self, ordinal: int) -> int:
        """The calling thread's current stream on that CUDA device; 0 is the default stream.

        Also where the library has not been imported.
        """
        return 0

    def device(self, name: str) -> Any:
        """The library's own object for a device such as "cuda:0" or "cpu"."""
        return name

    def default_dtype(self) -> DType:
        """The data type of an array that is made without naming one."""
        return dtypes.of("float64")


def raw_view(host: HostArray) -> HostArray:
    """The memory of `host`, strides kept, as a type of the same size that NumPy copies fast.

    Copies between two raw views move bits: unsigned integers for elements of 1, 2, 4 and 8 bytes,
    complex128 for 16, void for any other size.
    """
    itemsize = host.dtype.itemsize
    raw = _RAW[itemsize] if itemsize in _RAW else np.dtype(f"V{itemsize}")
    return host.view(raw)


_RAW: dict[int, np.dtype[Any]] = {
    **{size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)},
    16: np.dtype(np.complex128),
}


def described_bytes(address: int, nbytes: int) -> dict[str, Any]:
    """What `__array_interface__`, or `__cuda_array_interface__` on a GPU, says of these bytes."""
    return {
        "shape": (nbytes,),
        "typestr": "|u1",
        "data": (address, False),
        "strides": None,
        "version": 3,
    }


class _HostMemory:
    """An object that NumPy makes an array of. The array keeps it alive, and so its memory."""

    __slots__ = ("__array_interface__", "keep")

    def __init__(self, interface: dict[str, Any], keep: object) -> None:
        self.__array_interface__ = interface
        self.keep = keep


def host_array(
    address: int, shape: Sequence[int], strides: Sequence[int], typestr: str, keep: object
) -> HostArray:
    """A NumPy array on memory of the host, which `keep` keeps alive; strides are in bytes."""
    interface = {
        "shape": tuple(shape),
        "strides": tuple(strides),
        "typestr": typestr,
        "data": (address, False),
        "version": 3,
    }
    return np.asarray(_HostMemory(interface, keep))


def share_memory(one: HostArray, other: HostArray) -> bool:
    """Whether two arrays share an element; True also where that is too hard to tell."""
    if not np.may_share_memory(one, other):
        return False
    try:
        return np.shares_memory(one, other, max_work=10_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def in_elements(
    strides: Sequence[int], shape: Sequence[int], dtype: DType, package: str
) -> tuple[int, ...]:
    """Strides in bytes as strides in elements. Raises ValueError where they are no multiples."""
    size = dtype.itemsize
    if any(stride % size for stride in strides) and math.prod(shape) > 1:
        raise ValueError(
            f"strides of {tuple(strides)} bytes are not multiples of {size}, the bytes per element "
            f"of {dtype}; pass {package}.ascontiguousarray(x)"
        )
    return tuple(stride // size for stride in strides)
