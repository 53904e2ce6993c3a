"""One rank's arrays in a call on GPUs: used where they lie, or copied from and to host memory.

An operator sees only `Operand`s, memory of this rank's GPU. An operand in host memory is copied to
the GPU when it is read, and its result is copied back by `Result.give`, which waits. So an operator
is written once for CuPy, torch and NumPy, and never asks which it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import prod
from typing import Any

import numpy as np

from shardmath.arrays import Library, dtypes, library_of
from shardmath.arrays.base import HostArray
from shardmath.arrays.spec import ArraySpec, Packed, packed_strides
from shardmath.base.lru_cache import LRUCache
from shardmath.base.recorder import this_process
from shardmath.context.context import Context
from shardmath.cuda import stream as streams
from shardmath.cuda.allocation import Allocation
from shardmath.cuda.driver import call
from shardmath.handles.allocation import block_of, maker_on_heap
from shardmath.handles.operand import Operand
from shardmath.symmetric.heap import Block

_MOST_CARRIED = 32 << 20  # bytes that a GPU copies in the time of a few launches
_LATEST = partial(LRUCache[Any, Any], 256)  # operands of a context, by spec and address


Copy = tuple[int, int, int]  # target, source, bytes
_Form = tuple[tuple[int, ...], tuple[int, ...], str, Block | None]  # shape, strides, dtype, block


class Result:
    """The place where an operator writes a result, and the array that the user then gets."""

    __slots__ = ("_array", "_host", "address", "copy", "user")

    def __init__(
        self,
        address: int,
        array: Operand | _Form,
        user: Any,
        host: HostArray | None = None,
        copy: Copy | None = None,
    ) -> None:
        """`array` is the operand at `address`, or what it is made of when asked for. `copy` brings
        the result to the user's array on this GPU, where that lies elsewhere.
        """
        self.address, self._array, self.user, self._host = address, array, user, host
        self.copy = copy

    @property
    def array(self) -> Operand:
        """The operand at `address`, as the operator sees it."""
        if isinstance(self._array, tuple):
            self._array = Operand(self.address, *self._array)
        return self._array

    @property
    def place(self) -> tuple[Any, ...]:
        """The address, shape, strides and dtype of the operand."""
        if isinstance(self._array, tuple):
            return self.address, *self._array[:3]
        array = self._array
        return array.address, array.shape, array.strides, array.dtype

    def give(self, context: Context, stream: int) -> Any:
        """The user's array. Where that is in host memory, waits for `stream` and copies it back."""
        if self._host is not None:
            context.gpu_team.synchronize(stream)
            _download(self.array, self._host)
        return self.user


def stream_of(context: Context, spec: ArraySpec, stream: Any) -> int:
    """The stream of a call: `stream` if given, else the array library's current one.

    It is the default stream for operands in host memory. Raises as `resolve_stream`.
    """
    team = context.gpu_team
    if spec.device == "cpu":
        return 0
    handle = streams.resolve_stream(stream, spec.library, team.device)
    this_process.on_stream(handle)
    return handle


def require_device(context: Context, spec: ArraySpec, name: str) -> None:
    """Raise ValueError for an array on another GPU than this rank's."""
    own = context.gpu_team.device.name
    if spec.device not in ("cpu", own):
        raise ValueError(
            f"{name} is on {spec.device}, and this rank computes on {own}: copy it there"
        )


def read(
    context: Context, x: Any, name: str = "the operand", *, spec: ArraySpec | None = None
) -> Operand:
    """The operand on this rank's GPU: where it lies, or a copy of one in host memory.

    `spec` is the operand's, where it is known. An array that was read before gives the same object,
    which keeps no memory alive. Local. Raises ValueError for what is no array or lies on another
    GPU, UseAfterFree, HeapExhausted.
    """
    library = library_of(x, name)
    spec = spec or library.spec(x)
    if spec.device == "cpu":
        return _uploaded(context, library.host_view(x))
    if library.is_lazy(x):  # its values are not in its memory
        require_device(context, spec, name)
        x = library.resolved(x)
        return _seen(context, library.spec(x), library.pointer(x), x)
    return _placed(context, library, spec, x, name)


def _placed(context: Context, library: Library, spec: ArraySpec, x: Any, name: str) -> Operand:
    """The operand of an array on a GPU, where it lies. Raises as `read`."""
    key = spec, library.pointer(x)
    known: LRUCache[tuple[ArraySpec, int], Operand]
    known = context.cache("arrays that were read", _LATEST)
    operand = known.find(key)
    if operand is None or not operand.is_there(context):
        require_device(context, spec, name)
        operand = _seen(context, *key, x)
        if spec.size:  # an empty array has no address
            known.keep(key, operand.without_memory())
    return operand


def _seen(context: Context, spec: ArraySpec, address: int, x: Any) -> Operand:
    """The operand at `address`, with the block of the heap that it lies in. Raises UseAfterFree."""
    strides = tuple(stride * spec.itemsize for stride in spec.strides)
    operand = Operand(address, spec.shape, strides, spec.dtype, None, x)
    place = block_of(context, x)
    if place is None:
        return operand
    context.announce(place[0])
    return replace(operand, block=place[0])


class ResultTemplate:
    """The form of the new results of one call, of the library of `operand`, and like it in host
    memory or on the GPU. It refers to no array.
    """

    def __init__(
        self,
        context: Context,
        operand: Any,
        shape: Sequence[int],
        dtype: str,
        order: Packed,
        *,
        on_heap: bool,
        carries_all: bool = False,
    ) -> None:
        """`on_heap` is for results on the GPU. With `carries_all`, so are those in ordinary memory
        that are copied from a fixed block. Raises ValueError where the library lacks them.
        """
        self._context, self._library = context, library_of(operand)
        self._shape, self._dtype, self._order = tuple(shape), dtype, order
        self._steps, self._strides, self._nbytes = _packed(self._shape, dtype, order)
        self._on_host = self._library.spec(operand).device == "cpu"
        self.on_heap = on_heap and not self._on_host
        self.is_carried = self.on_heap or (carries_all and not self._on_host)
        device = "cpu" if self._on_host else context.gpu_team.device.name
        # Makes a new array, which is not announced to peers; on the heap (array, address). Local.
        # Raises as `make`.
        self.new: Callable[[], Any] = (
            maker_on_heap(context.heap, self._library, self._shape, dtype, self._steps)
            if self.on_heap
            else self._library.maker(self._shape, dtype, order, device)
        )

    def make(self, array: Any = None, address: int | None = None) -> Result:
        """A new result, or the result in `array`, which lies at `address` on the GPU. Local.

        Raises HeapExhausted, or what a library without memory does.
        """
        if self._on_host:
            return _back_to(self._context, self.new(), self._order)
        if array is None:
            array, address = self._new()
        result = self.at(self.place(array) if address is None else address, array)
        if self.on_heap:
            block = result.array.block
            # torch tensors without elements have no address.
            assert block is not None or not self._nbytes, "it was allocated there"
            if block is not None:
                self._context.announce(block)
        return result

    def _new(self) -> tuple[Any, int]:
        """A new array, and its address."""
        made = self.new()
        return made if self.on_heap else (made, self.place(made))

    def at(self, address: int, array: Any = None) -> Result:
        """A result at this address of the GPU, not announced to peers."""
        block = self._context.heap.find(address) if self.on_heap else None
        return Result(address, (self._shape, self._strides, self._dtype, block), array)

    @property
    def carried(self) -> int:
        """The bytes of a result that is better written to a fixed block and copied; 0 for others.

        Peers then write to the same place each time, and the call is the same on all ranks wherever
        its result lies.
        """
        context = self._context
        fits = self.is_carried and 0 < self._nbytes <= _MOST_CARRIED
        return self._nbytes if fits and not context.multi_host else 0

    def through(
        self, block: Block | None, array: Any = None, into: Callable[[int], Any] = lambda _: None
    ) -> Result:
        """A result that is written to `block` and copied from there to `array`, or to a new array.

        As `make` without a block, and as `at` where `into(address)` says that a new array is
        written in place. Local. Raises as `make`.
        """
        address = None
        if array is None and self.is_carried:
            array, address = self._new()
            if into(address):
                return self.at(address, array)
        if block is None:
            return self.make(array, address)
        told = block if self.on_heap else None  # peers write no other result
        form = self._shape, self._strides, self._dtype, told
        return Result(block.address, form, array, copy=self.copy(block, array))

    def place(self, array: Any) -> int:
        """The address of an array of this form."""
        return self._library.pointer(array)

    def copy(self, block: Block, array: Any) -> Copy:
        """The copy that brings a result from `block` to an array of this form."""
        return self.place(array), block.address, self._nbytes


@lru_cache(maxsize=1024)
def _packed(
    shape: tuple[int, ...], dtype: str, order: Packed
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """The strides of a packed array in elements and in bytes, and its size in bytes."""
    itemsize = dtypes.of(dtype).itemsize
    strides = packed_strides(shape, itemsize, order)
    return packed_strides(shape, 1, order), strides, prod(shape) * itemsize


def result_in(context: Context, out: Any, name: str = "out") -> Result:
    """The user's array `out`, an argument of this name, as the place for a result. Local.

    Raises ValueError when it cannot be written to, or lies on another GPU; UseAfterFree.
    """
    library = library_of(out, name)
    spec = library.spec(out)
    require_device(context, spec, name)
    if spec.device == "cpu":
        return _back_to(context, out, "F" if spec.order == "F" else "C", name)
    if library.is_lazy(out):
        raise ValueError(
            f"{name} is a lazy conjugate, and the call writes into it: pass an ordinary tensor"
        )
    require_separate(spec, name)
    array = _placed(context, library, spec, out, name)
    return Result(array.address, array, out)


def require_separate(spec: ArraySpec, name: str) -> None:
    """Raise ValueError for an array to be written in which several indices are one element."""
    if spec.overlaps:
        raise ValueError(
            f"{name} is an expanded view, and the call writes into it: pass an ordinary array"
        )


def laid_out_alike(context: Context, array: Operand) -> Operand:
    """Other memory of this rank's GPU with the strides of `array`. Local. Raises HeapExhausted."""
    low, high = array.span
    buffer = context.heap.allocate(high - low)
    return replace(array, address=buffer.block.address - low, block=None, keep=buffer)


def _back_to(context: Context, user: Any, order: Packed, name: str = "out") -> Result:
    host = library_of(user).host_view(user, writable=True, name=name)
    dtype = dtypes.of(host.dtype)
    array = _carried(context, host.shape, dtype.name, order)
    return Result(array.address, array, user, host)


def _carried(context: Context, shape: tuple[int, ...], dtype: str, order: Packed) -> Operand:
    """Packed memory on the GPU for an array of `shape` in host memory. Local. Raises HeapExhausted.

    It is on the heap, unless the heap cannot grow and there are several hosts: operators then pack
    what peers read.
    """
    _, strides, nbytes = _packed(shape, dtype, order)
    if context.multi_host and not context.heap.transport.grows:
        held = Allocation(context.gpu_team.device, nbytes)
        return Operand(held.address, shape, strides, dtype, None, held)
    buffer = context.allocate_shared(nbytes)
    address = buffer.block.address
    return Operand(address, shape, strides, dtype, buffer.block, buffer)


def _uploaded(context: Context, host: HostArray) -> Operand:
    order: Packed = "F" if host.flags.f_contiguous else "C"
    array = _carried(context, host.shape, dtypes.of(host.dtype).name, order)
    if host.size:
        packed = np.asarray(host, order=order)
        context.gpu_team.device.activate()
        call("cuMemcpyHtoD", array.address, packed.ctypes.data, packed.nbytes)
    return array


def _download(array: Operand, host: HostArray) -> None:
    """Copy packed memory of the GPU to `host`. What writes it must have ended."""
    if not host.size:
        return
    order: Packed = "F" if array.order == "F" else "C"
    is_packed = host.flags.f_contiguous if order == "F" else host.flags.c_contiguous
    packed = host if is_packed else np.empty(host.shape, host.dtype, order)
    call("cuMemcpyDtoH", packed.ctypes.data, array.address, packed.nbytes)
    if packed is not host:
        host[...] = packed
