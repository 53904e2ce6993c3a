"""The handle on memory of GPUs: the host's table of names, with signals that are kernels.

Signals are put on the current stream of the handle's array library, can be captured in CUDA graphs,
and return at once. The next call, or `synchronize`, reports a wait that expired; the handle and the
CUDA context stay usable.

Users' kernels have the same through `kernels/symm.cuh`: its struct SymmetricMemory is this handle,
by value or in memory of the device, and its channels are the handle's.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardmath.arrays import Library, library_of
from shardmath.base.collective_call import collective_call
from shardmath.base.untraced import untraced_methods
from shardmath.cuda import stream as streams
from shardmath.cuda.compile import KERNELS
from shardmath.cuda.device import Device
from shardmath.cuda.kernel import Argument, Extent, kernel_of_source
from shardmath.handles.allocation import Owner
from shardmath.handles.handle import SymmetricMemory
from shardmath.handles.rendezvous_state import SLOT_BYTES, DeviceTables
from shardmath.transport.base import DeviceBytes, Memory

if TYPE_CHECKING:
    from shardmath.symmetric.team import Team


@untraced_methods
class HandleKernel:
    """A kernel of the user's for one handle: `kernel(blocks, threads, *arguments, stream=None)`.

    `blocks` and `threads` are integers, or up to three along x, y, z. Arguments match the kernel's
    parameters: the handle itself for the struct SymmetricMemory by value; an array of CuPy or torch
    for a pointer; an int for `long long`, a float for `double`; a NumPy scalar or array, also of
    structs, for its own bytes. `stream` None is the current stream of the handle's library.

    Raises ValueError for another argument, or an array of another device.
    """

    def __init__(
        self,
        handle: DeviceSymmetricMemory,
        source: str,
        function: str,
        options: Sequence[str] = (),
        *,
        shared: int = 0,
    ) -> None:
        device = handle._team.device
        self._handle = handle
        self._kernel = kernel_of_source(device, source, function, options, shared=shared)

    def __call__(
        self, blocks: Extent, threads: Extent, *arguments: Any, stream: Any = None
    ) -> None:
        """Put it on a stream. Also raises what the wait of an earlier kernel has found."""
        self._handle.check()
        device = self._kernel.device
        packed = Argument(*(_packed(value, device) for value in arguments))
        where = streams.resolve_stream(stream, self._handle._library.name, device)
        self._kernel.launch(where, blocks, threads, packed)


def _packed(value: Any, device: Device) -> bytes:
    """The bytes that a kernel gets for `value`, in its parameter's layout."""
    if isinstance(value, DeviceSymmetricMemory):
        value = value.kernel_argument()
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


@untraced_methods
class DeviceSymmetricMemory(SymmetricMemory):
    """A handle whose memory is on GPUs. See SymmetricMemory.

    Where they are on several hosts, kernels cannot take it, since there are no addresses. Signals
    do not use the pads then, so `get_signal_pad` does not show them.
    """

    @property
    def device(self) -> Any:
        """Where the memory is: a torch.device for torch tensors, else a word such as "cuda:0"."""
        return self._library.device(self._team.device.name)

    @property
    def buffer_ptrs_dev(self) -> int:
        """The device address of an array of the `buffer_ptrs`, for kernels; the handle's own."""
        return self._tables.buffers

    @property
    def signal_pad_ptrs_dev(self) -> int:
        """The device address of an array of the `signal_pad_ptrs`, for kernels."""
        return self._tables.pads

    @property
    def _team(self) -> Team:
        team = self._state.team
        assert team is not None, "made for GPUs"
        return team

    @property
    def _tables(self) -> DeviceTables:
        state = self._state
        if state.tables is None:
            state.tables = DeviceTables(
                self._context.heap, self._team, state.buffer_table, state.pad_table
            )
        return state.tables

    # -- the user's own kernels --------------------------------------------------------------------

    @property
    def compile_options(self) -> tuple[str, ...]:
        """Options with which NVRTC or nvcc compiles a kernel that includes symm.cuh."""
        return (f"-I{KERNELS}", *(f"-D{text}" for text in self._team.defines))

    @property
    def channels(self) -> int:
        """How many channels there are; see set_signal_pad_size."""
        return self._team.channels

    def kernel_argument(self, timeout_ms: int = 0) -> npt.NDArray[np.void]:
        """The struct SymmetricMemory of symm.cuh, to be passed by value: one NumPy record.

        It is good for as long as this handle lives. Its waits end after `timeout_ms`, or after
        SHARDMATH_TIMEOUT when that is 0. Raises UseAfterFree when this rank's array was freed.
        """
        packed = self._packed(timeout_ms)
        return np.frombuffer(packed, np.dtype([("words", "<u8", (len(packed) // 8,))])).copy()

    def device_argument(self, timeout_ms: int = 0) -> Any:
        """The struct SymmetricMemory in memory of the device: int64, of the handle's library.

        For kernels that take `const SymmetricMemory*`, and for Triton. It keeps the handle alive.
        Raises as `kernel_argument`.
        """
        packed = self._packed(timeout_ms)
        address = self._tables.argument(self._context.heap, self._team, packed, timeout_ms)
        memory = DeviceBytes(address, len(packed), self._team.device.name)
        return self._library.on_device(Owner(memory, self), "int64", [len(packed) // 8], [1])

    def kernel(
        self, source: str, function: str, options: Sequence[str] = (), *, shared: int = 0
    ) -> HandleKernel:
        """The `extern "C"` kernel `function` of CUDA C++ text that includes symm.cuh. Local.

        It is compiled when first asked for, with further `options` of NVRTC, and kept on disk;
        `shared` is its dynamic shared memory in bytes. Raises CudaError with the compiler's words.
        """
        options = (*(f"-D{text}" for text in self._team.defines), *options)
        return HandleKernel(self, source, function, options, shared=shared)

    def _packed(self, timeout_ms: int) -> bytes:
        """The struct SymmetricMemory. Raises as `kernel_argument`."""
        self._context.require_open()
        self._require_array()
        timeout = self._seconds(timeout_ms)
        if 0 in self._team.pads:
            raise NotImplementedError(
                "some ranks are on other hosts, where a kernel of this GPU cannot write: use put, "
                "get and the signals of the handle, or a handle of the ranks of one host"
            )
        sizes = [location.nbytes - location.array_offset for location in self._state.peers]
        words = (*self.array_ptrs, *sizes)
        return self._team.packed(timeout) + struct.pack(f"{len(words)}Q", *words)

    # -- signals on streams ------------------------------------------------------------------------

    @collective_call
    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Put a barrier of all ranks on the current stream. Collective.

        What a rank wrote on its stream before, every rank sees on its own after. Barriers of one
        channel are ordered, whichever streams they are put on, also within a CUDA graph. It uses no
        slot of the pads. After OpTimeout the next call waits for the same barrier again.
        """
        timeout = self._begun("barrier of a handle", channel, timeout_ms)
        self._team.ordered_barrier(self._stream(), channel=channel, timeout=timeout)

    def _flip_slot(self, peer: int, value: int, channel: int, timeout_ms: int) -> None:
        """See SymmetricMemory. The current stream waits, and sets the slot."""
        operation = "put_signal" if value else "wait_signal"
        function = "raise_flag" if value else "lower_flag"
        src, dst = (self.rank, peer) if value else (peer, self.rank)
        timeout = self._begun(operation, channel, timeout_ms)
        place = int(self._state.pad_table[dst]) + SLOT_BYTES * (channel * self.world_size + src)
        stream = self._stream()
        self._team.flag(function, peer, stream, slot=place, channel=channel, timeout=timeout)

    def _own_bytes(self, library: Library, array: Any, *, writable: bool) -> tuple[Memory, int]:
        """See SymmetricMemory: the array is on this rank's GPU; the stream is the current one."""
        spec, device = library.spec(array), self._team.device
        if spec.device != device.name:
            raise ValueError(f"expected an array on {device.name}, got {spec}")
        memory = DeviceBytes(library.pointer(array), spec.nbytes, device.name)
        return memory, library.stream(device.ordinal)

    def synchronize(self) -> None:
        """Wait for the current stream. As every call, raises what a wait on it has found."""
        self._team.synchronize(self._stream())

    def check(self) -> None:
        """Raise what a kernel's wait has found so far: OpTimeout, which names the ranks.

        RankFailure for a rank that has ended, ValueError for a channel or rank that a kernel named
        and that does not exist. Costs one load where nothing has gone wrong.
        """
        self._context.require_open()
        self._team.check()

    def _stream(self) -> int:
        return self._library.stream(self._team.device.ordinal)
