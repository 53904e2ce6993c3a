"""One rank's operand and result in a collective of a context of GPUs.

The ranks agree on specs and plans as on cores. Then kernels move the elements on the user's current
stream, and the call returns. Operands in host memory are copied to the GPU, and their results back
to the host; the call waits for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from shardmath.arrays import DType, array_of, library_and_spec, library_named, library_of
from shardmath.arrays.dtypes import HALVES, to_numpy
from shardmath.arrays.dtypes import of as dtype_of
from shardmath.base.immutable import Immutable
from shardmath.collectives.cells import DeviceCollectives, Parts
from shardmath.collectives.forms import OwnParts
from shardmath.collectives.operand import ON_GPUS, OutputSpec, Shape, bounds, kind_of
from shardmath.context.context import Context
from shardmath.cuda.driver import call
from shardmath.cuda.kernel import ReadyLaunch
from shardmath.cuda.stream import capturing
from shardmath.handles.allocation import allocate_on_all_ranks, array_on, require_live
from shardmath.handles.device_array import require_device, require_separate
from shardmath.local.reduction import Reduction
from shardmath.symmetric.heap import Buffer

# By rank: indices of the operand that go to it, or indices of the result that come from it.
Counts = Sequence[int]
# (address of the operand, address of the result, stream): what was launched, None for nothing.
Launch = Callable[[int, int, int], ReadyLaunch | None]


class DirectLaunch(Immutable):
    """The launch of a call that took only one, and its addresses.

    `launch` works for other addresses; `ready` is what was launched. With `in_place`, the result
    may lie where the operand does.
    """

    source: int
    target: int
    launch: Launch
    in_place: bool
    ready: ReadyLaunch | None


class DeviceOperand:
    """One rank's array in a call of a context of GPUs, and how its result comes back."""

    def __init__(self, context: Context, x: Any, out: Any = None, *, tag: int = 0) -> None:
        """`tag` says which call this is, once all ranks have agreed.

        Raises ValueError if `x` or `out` is no array, or lies on another GPU, or if `out` cannot be
        written; UseAfterFree.
        """
        team = context.gpu_team
        self.context, self.team = context, team
        x = array_of(x)
        self.library, self.spec = library_and_spec(x, "x")
        self._x = x
        require_device(context, self.spec, "an array")
        if self.spec.size:
            block = context.heap.find(self.library.pointer(x))
            if block is not None:
                require_live(block)
        self.out = None if out is None else DeviceOutput(context, out)
        self.direct: DirectLaunch | None = None  # the launch of the call, if there was only one
        self.tag = tag

    @property
    def on_host(self) -> bool:
        """Whether the array is in host memory."""
        return self.spec.device == "cpu"

    @property
    def kind(self) -> str:
        """The library, and where the memory is: equal on all ranks, and for `out`."""
        return kind_of(self.spec)

    @property
    def stream(self) -> int:
        """The stream of the call."""
        return 0 if self.on_host else self.library.stream(self.team.device.ordinal)

    # -- collectives, after agreement --------------------------------------------------------------

    def all_reduce(self, reduction: Reduction, *, new: bool) -> Any:
        """See `reducing.all_reduce`. With `new`, the results of all ranks are new arrays."""
        source, dtype, op = self._widened(reduction)
        tag = self.tag
        collectives = DeviceCollectives.of(self.context)
        count = self.spec.size
        pushes = collectives.reduction_pushes(count * dtype.itemsize, dtype) if new else None
        if pushes is not None:
            flat, addresses = self._shared_result(count, dtype)
            pushes.all_reduce_into(source.pointer, addresses, count, dtype, op, self.stream)
            result = flat.cast_to(reduction.result)
            return self._finish(result, self.spec.shape, reduction.result)
        direct_write = dtype.name == reduction.result
        flat = self._result_memory(
            self.spec.shape, dtype, source, direct_write=direct_write, in_place=True
        )
        self._launch(
            source,
            flat,
            lambda start, to, stream: collectives.all_reduce(
                start, to, count, dtype, op, stream, tag=tag
            ),
            in_place=True,
        )
        return self._finish(flat.cast_to(reduction.result), self.spec.shape, reduction.result)

    def is_pushed(self, reduction: Reduction) -> bool:
        """Whether a new result of an all_reduce is pushed, into memory that all ranks allocate."""
        dtype = _combined_type(reduction)
        nbytes = self.spec.size * dtype.itemsize
        return DeviceCollectives.of(self.context).reduction_pushes(nbytes, dtype) is not None

    def reduce_scatter(self, reduction: Reduction, axis: int, counts: Counts, shape: Shape) -> Any:
        """See `reducing.reduce_scatter`."""
        source, dtype, op = self._widened(reduction, self._ordered_by_rank(axis, counts))
        tag = self.tag
        width = self.spec.size // max(self.spec.shape[axis], 1)
        sizes = [count * width for count in counts]
        flat = self._result_memory(
            shape, dtype, source, direct_write=dtype.name == reduction.result
        )
        collectives = DeviceCollectives.of(self.context)
        self._launch(
            source,
            flat,
            lambda start, to, stream: collectives.reduce_scatter(
                start, to, sizes, dtype, op, stream, tag=tag
            ),
        )
        return self._finish(flat.cast_to(reduction.result), shape, reduction.result)

    def move(
        self,
        table: Sequence[Counts],
        shape: Shape,
        axis: int | None,
        *,
        whole: bool,
        in_place: bool = False,
    ) -> Any:
        """The array of `shape` that all ranks' parts make, one after the other along the axis.

        The part from rank src to rank dst has `table[src][dst]` indices of the axis, or is as many
        whole arrays if the axis is None. With `whole`, each rank sends its whole array to the ranks
        to which it sends anything.
        """
        collectives, tag, rank = DeviceCollectives.of(self.context), self.tag, self.context.rank
        width = self.spec.nbytes if axis is None else self._width(axis)

        def launch(source: int, target: int, stream: int) -> ReadyLaunch | None:
            return collectives.move(source, target, table, width, stream, whole=whole, tag=tag)

        source = self._sent(axis or 0, None if whole else table[rank])
        received = [row[rank] for row in table]
        return self._received(source, axis or 0, received, shape, launch, in_place=in_place)

    def exchange(self, own: OwnParts) -> Any:
        """The result of a call that moves elements. Kernels tell each other how many."""
        collectives, tag, size = DeviceCollectives.of(self.context), self.tag, self.context.size
        assert isinstance(collectives, DeviceCollectives), "ranks of one host"
        axis, width, sent = own.axis, self._width(own.axis), own.sent
        starts = [width * start for start in bounds(sent)[:-1]]
        if own.whole:
            sent, starts = sent * size, [0] * size
        moved = Parts.guessed(width, starts, sent, own.expected, own.shape[axis])

        def launch(source: int, target: int, stream: int) -> ReadyLaunch:
            return collectives.exchange(source, target, moved, stream, tag=tag)

        source = self._sent(axis, None if own.whole else sent)
        received = own.expected or (own.shape[axis],)
        return self._received(source, axis, received, own.shape, launch)

    def _sent(self, axis: int, counts: Counts | None) -> Flat:
        """The memory that is sent: the array, or these counts of the axis in the ranks' order."""
        return self._packed(self._x if counts is None else self._ordered_by_rank(axis, counts))

    def _received(
        self,
        source: Flat,
        axis: int,
        counts: Counts,
        shape: Shape,
        launch: Launch,
        *,
        in_place: bool = False,
    ) -> Any:
        """The result of a launch; its parts have these counts of the axis."""
        dtype, contiguous = dtype_of(self.spec.dtype), prod(shape[:axis]) == 1
        if contiguous:
            flat = self._result_memory(shape, dtype, source, in_place=in_place)
        else:
            flat = self._result_memory((prod(shape),), dtype, source, direct_write=False)
        self._launch(source, flat, launch, in_place=in_place)
        if contiguous:
            return self._finish(flat, shape, self.spec.dtype)
        array, result = _ravel(flat.array()), self._result(shape, self.spec.dtype)
        view = self.library.host_view(result, writable=True) if self.on_host else result
        end = start = 0
        for count in counts:
            part = (*shape[:axis], count, *shape[axis + 1 :])
            place = (slice(None),) * axis + (slice(start, start + count),)
            view[place] = array[end : end + prod(part)].reshape(part)
            end, start = end + prod(part), start + count
        return result

    def _width(self, axis: int) -> int:
        """The bytes of one index of the axis."""
        shape = self.spec.shape
        return prod((*shape[:axis], *shape[axis + 1 :])) * self.spec.itemsize

    def _launch(self, source: Flat, flat: Flat, launch: Launch, *, in_place: bool = False) -> None:
        ready = launch(source.pointer, flat.pointer, self.stream)
        self.direct = DirectLaunch(source.pointer, flat.pointer, launch, in_place, ready)

    # -- memory ------------------------------------------------------------------------------------

    def _ordered_by_rank(self, axis: int, counts: Counts) -> Any:
        """The elements in the order of the ranks that get them, each rank's in C order."""
        x = self.library.host_view(self._x) if self.on_host else self._x
        if prod(self.spec.shape[:axis]) == 1 or self.spec.size == 0:
            return x
        parts = [
            _ravel(x[(slice(None),) * axis + (slice(sum(counts[:r]), sum(counts[: r + 1])),)])
            for r in range(len(counts))
        ]
        if self.on_host:
            return np.concatenate(parts)
        joined = self.library.empty((self.spec.size,), self.spec.dtype, "C", self.spec.device)
        end = 0
        for part in parts:
            joined[end : end + part.shape[0]] = part
            end += part.shape[0]
        return joined

    def _packed(self, x: Any) -> Flat:
        """`x` in C order on the GPU: where it lies if it lies so, else a copy."""
        if not self.on_host:
            spec = self.spec if x is self._x else self.library.spec(x)
            return Flat(self, self.library.contiguous(x), dtype_of(spec.dtype), spec.shape)
        host = x if isinstance(x, np.ndarray) else self.library.host_view(x)
        host = np.ascontiguousarray(host)
        buffer = self.context.heap.allocate(host.nbytes)
        self.team.device.activate()
        if host.nbytes:
            call("cuMemcpyHtoD", buffer.block.address, host.ctypes.data, host.nbytes)
        return Flat(self, buffer, dtype_of(host.dtype), host.shape)

    def _widened(self, reduction: Reduction, x: Any = None) -> tuple[Flat, DType, str]:
        """The operand in the dtype that the kernel combines, that dtype, and the operation."""
        x = self._x if x is None else x
        wide = _combined_type(reduction)
        if wide.name != reduction.dtype:
            x = self.library.host_view(x) if self.on_host and not isinstance(x, np.ndarray) else x
            x = library_of(x).cast(x, wide)
        return self._packed(x), wide, reduction.op

    def _result_memory(
        self,
        shape: Shape,
        dtype: DType,
        source: Flat,
        *,
        direct_write: bool = True,
        in_place: bool = False,
    ) -> Flat:
        """Memory for a result: `out` if kernels can write it there (`direct_write`), else new
        memory.

        With `in_place`, the result may be written over the source, element by element.
        """
        if self.on_host:
            buffer = self.context.heap.allocate(prod(shape) * dtype.itemsize)
            return Flat(self, buffer, dtype, shape)
        out = self.out
        if out is not None and direct_write and out.can_take(source, in_place=in_place):
            return Flat(self, out.array, dtype, shape)
        array = self.library.empty(shape, dtype, "C", self.spec.device)
        return Flat(self, array, dtype, shape)

    def _shared_result(self, count: int, dtype: DType) -> tuple[Flat, list[int]]:
        """Memory on the heap for a result, and its addresses on all ranks. Collective.

        If the stream is being captured, it stays as long as the context: a graph writes to it again
        after its last user has dropped it.
        """
        context = self.context
        memory = allocate_on_all_ranks(
            context,
            "collectives, result",
            lambda: (context.heap.allocate(count * dtype.itemsize), None),
        )
        if capturing(self.stream):
            context.keep_for_kernels(memory.buffer)
        array: Any = memory.buffer
        if not self.on_host:
            array = array_on(array, self.library, dtype, (count,), (1,))
        return Flat(self, array, dtype, (count,)), memory.addresses(context)

    def _finish(self, flat: Flat, shape: Shape, dtype: str) -> Any:
        array = flat.array()
        if self.out is not None and array is self.out.array:
            return array
        if tuple(array.shape) != shape:
            array = array.reshape(shape)
        if self.out is None and not self.on_host:
            return array
        result = self._result(shape, dtype)
        view = self.library.host_view(result, writable=True) if self.on_host else result
        view[...] = array
        return result

    def _result(self, shape: Shape, dtype: str) -> Any:
        if self.out is not None:
            return self.out.array
        return self.library.empty(shape, dtype, "C", self.spec.device)


class Flat:
    """Elements in C order on the GPU, as an array of the operand's library or as a buffer."""

    def __init__(self, operand: DeviceOperand, memory: Any, dtype: DType, shape: Shape) -> None:
        self._operand = operand
        self._memory = memory
        self._dtype = dtype
        self._shape = shape
        self.pointer: int = (
            memory.block.address if isinstance(memory, Buffer) else operand.library.pointer(memory)
        )

    @property
    def end(self) -> int:
        """The address after the last element."""
        return self.pointer + prod(self._shape) * self._dtype.itemsize

    def array(self) -> Any:
        """An array of these elements: of the library, or of NumPy, after waiting, for operands in
        host memory.
        """
        if not self._operand.on_host:
            return self._memory
        host = np.empty(self._shape, to_numpy(self._dtype))
        self._operand.team.synchronize(0)
        if host.nbytes:
            call("cuMemcpyDtoH", host.ctypes.data, self.pointer, host.nbytes)
        return host

    def cast_to(self, dtype: str) -> Flat:
        """These elements, which become this dtype when they are read."""
        known = dtype_of(dtype)
        if known == self._dtype:
            return self
        return _Cast(self, known)


class _Cast(Flat):
    def __init__(self, flat: Flat, dtype: DType) -> None:
        self._wide, self._as = flat, dtype

    def array(self) -> Any:
        array = self._wide.array()
        return library_of(array).cast(array, self._as)


class DeviceOutput:
    """The array that receives a rank's result."""

    def __init__(self, context: Context, out: Any) -> None:
        """Raises ValueError if `out` is no array, or cannot be written here; UseAfterFree."""
        operand = DeviceOperand(context, out)
        if operand.on_host:
            operand.library.host_view(out, writable=True)  # raises where it cannot be written
        else:
            require_separate(operand.spec, "out")
        self.array, self._operand = out, operand

    @property
    def spec(self) -> OutputSpec:
        """The spec of the array, which all ranks check."""
        spec = self._operand.spec
        return self._operand.kind, spec.dtype, spec.shape

    def can_take(self, source: Flat, *, in_place: bool) -> bool:
        """Whether a result can be written straight to it: it is packed, and not over the source."""
        spec, library = self._operand.spec, self._operand.library
        target = library.pointer(self.array)
        apart = target + spec.nbytes <= source.pointer or source.end <= target
        apart = apart or (in_place and target == source.pointer)
        return apart and spec.order in ("C", "both") and not library.is_lazy(self.array)


def _combined_type(reduction: Reduction) -> DType:
    """The dtype that kernels combine; they widen elements of half precision themselves."""
    own = dtype_of(reduction.dtype)
    inside = own.name in HALVES or reduction.accumulator == own.name
    return own if inside else dtype_of(reduction.accumulator)


def placeholder(context: Context, kind: str, dtype: str, shape: Shape, out: Any) -> DeviceOperand:
    """An operand for a rank that gives none, or only `out`: nobody reads its elements."""
    if out is not None:
        return DeviceOperand(context, out, out)
    library = library_named(kind.removesuffix(ON_GPUS))
    device = f"cuda:{context.device_id}" if kind.endswith(ON_GPUS) else "cpu"
    return DeviceOperand(context, library.empty(shape, dtype, "C", device))


def _ravel(x: Any) -> Any:
    return x.reshape(-1)
