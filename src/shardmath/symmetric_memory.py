"""Symmetric memory under torch's names, for arrays of NumPy, CuPy and PyTorch.

    t = symmetric_memory.empty(1024, dtype=np.float32)
    handle = symmetric_memory.rendezvous(t)
    peer = handle.get_buffer(1 - handle.rank, (1024,), np.float32)     # rank 1's memory: no copy
    handle.barrier()

Allocation is local; `rendezvous` is collective. `_SymmetricMemory` offers the same functions as
static methods, so that a program written for torch's class runs after its import line is changed.
Source: torch.distributed._symmetric_memory.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from shardmath.arrays import Library, library_named, library_of, library_of_package
from shardmath.arrays.dtypes import of as dtype_of
from shardmath.base.collective_call import collective_call
from shardmath.base.integers import index
from shardmath.base.untraced import untraced
from shardmath.context.context import DistributedContext, get_context, require_context
from shardmath.context.startup import begun, group_of_torch, initialize
from shardmath.errors import BackendUnavailable
from shardmath.group.store import StoreProcessGroup
from shardmath.handles.allocation import (
    block_of,
    empty_on_heap,
    is_symmetric,
    observed,
    persistent_array,
    strided_on_heap,
)
from shardmath.handles.handle import SymmetricMemory
from shardmath.handles.rendezvous import (
    agreed_rendezvous,
    is_registered,
    names_a_group,
    register_group,
    rendezvous,
)
from shardmath.handles.rendezvous_state import PadSetting, change_pad_setting
from shardmath.transport.choice import transport_named

__all__ = [
    "SymmetricMemory",
    "empty",
    "empty_strided_p2p",
    "enable_symm_mem_for_group",
    "get",
    "get_backend",
    "get_mem_pool",
    "get_mempool_allocator",
    "get_signal_pad_size",
    "get_symm_mem_workspace",
    "has_multicast_support",
    "include_path",
    "is_nvshmem_available",
    "is_symm_mem_enabled_for_group",
    "is_symm_mem_tensor",
    "memset32",
    "put",
    "put_signal",
    "reduce_scatter_offset",
    "register",
    "rendezvous",
    "set_backend",
    "set_group_info",
    "set_signal_pad_size",
    "stream_write_value32",
    "wait_signal",
]


def __dir__() -> list[str]:
    return sorted(__all__)


_BACKENDS = ("HOST", "CUDA", "NVSHMEM", "NCCL", "NIXL")


@untraced
def empty(
    *size: Any, dtype: Any = None, device: Any = None, package: ModuleType | None = None
) -> Any:
    """A new uninitialised array on the symmetric heap, `empty(2, 3)` or `empty((2, 3))`. Local.

    Its library is `package`, else that of `dtype` (an object of torch's or NumPy's), else torch if
    a `device` is given and torch has been imported, else NumPy, which has no arrays on GPUs.
    Without a `dtype` it is the library's default. In a program of torch.distributed the first call
    is collective: it makes the context, of the ranks of torch's group, and serves
    torch.ops.symm_mem.

    Raises HeapExhausted, ValueError for a bad argument, BackendUnavailable for another device than
    the context's, RuntimeError before `initialize` where torch has no group.
    """
    context = _begun(device)
    shape = size[0] if len(size) == 1 and not hasattr(size[0], "__index__") else size
    library = _library(package, dtype, device)
    wanted = library.default_dtype() if dtype is None else dtype_of(dtype)
    return observed(context, empty_on_heap(context, library, _integers("size", shape), wanted))


@untraced
def empty_strided_p2p(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: Any,
    device: Any = None,
    group_name: str | None = None,
    alloc_id: int | None = None,
) -> Any:
    """A new uninitialised array on the symmetric heap with strides in elements. Local.

    Its library is chosen as by `empty`. `group_name` is the group for a `rendezvous` that names
    none; it may also be passed in place of `device`. Memory with an `alloc_id` is kept: once its
    array is gone, the same number gives the same address again.

    Raises as `empty`, and RuntimeError for an `alloc_id` that is in use or had another size.
    """
    known = get_context() is not None
    if known and group_name is None and isinstance(device, str) and is_registered(device):
        device, group_name = None, device
    context = _begun(device)
    library, wanted = _library(None, dtype, device), dtype_of(dtype)
    shape, strides = _integers("size", size), _integers("stride", stride)
    if len(shape) != len(strides):
        raise ValueError(f"size {shape} and stride {strides} must have the same length")
    if alloc_id is not None:
        number = index(alloc_id, "alloc_id")
        array = persistent_array(
            context, library, shape, wanted, strides, number=number, group=group_name
        )
        return observed(context, array)
    array = strided_on_heap(context.heap, library, shape, wanted, strides)
    found = block_of(context, array)
    buffer = None if found is None else found[0].buffer()
    assert buffer is not None, "a new array lies on the heap"
    buffer.group = group_name
    return observed(context, array)


@untraced
def set_group_info(group_name: str, rank: int, world_size: int, store: Any = None) -> None:
    """Name a group for `rendezvous`, of which this process is `rank`.

    The ranks of the group find each other through `store` (torch.distributed's, or any object with
    its `set` and `get`); without one the group has all ranks of the current context. Before
    `initialize` these ranks make the default context, through the store, and the call is
    collective.

    Raises RuntimeError when the name is taken, or without context and store; ValueError when there
    is no store and the ranks are not the context's.
    """
    if not isinstance(group_name, str):
        raise TypeError(f"group_name is a string, not {group_name!r}")
    if store is not None:
        group: Any = StoreProcessGroup(store, group_name, rank, world_size)
        register_group(group_name, initialize("cpu", group) if get_context() is None else group)
        return
    context = require_context()
    if (rank, world_size) != (context.rank, context.size):
        raise ValueError(
            f"rank {rank} of {world_size} is not this context's rank {context.rank} of "
            f"{context.size}; pass the store in which the group's ranks find each other"
        )
    register_group(group_name, context)


def is_symm_mem_tensor(tensor: Any) -> bool:
    """Whether `tensor` lies on the symmetric heap. Local."""
    return is_symmetric(tensor)


@untraced
def get_symm_mem_workspace(group_name: Any, min_size: int) -> SymmetricMemory:
    """The handle on a buffer of at least `min_size` bytes, kept for the group. Collective.

    The buffer grows when more is asked for; earlier handles keep the earlier one. Its views are
    torch tensors if torch has been imported, else NumPy arrays. Raises as `rendezvous`.
    """
    context = require_context()
    if index(min_size, "min_size") < 0:
        raise ValueError(f"rank {context.rank}: min_size is a number of bytes, not {min_size}")
    kept: dict[Any, Any] = context.cache("workspaces", dict)
    present = kept.get(group_name)
    if present is None or library_of(present).spec(present).nbytes < min_size:
        library = library_named("torch" if "torch" in sys.modules else "numpy")
        present = empty_on_heap(context, library, (min_size,), "uint8")
    handle = agreed_rendezvous(present, group_name)
    kept[group_name] = present
    return handle


def enable_symm_mem_for_group(group_name: str) -> None:
    """Begin, as the first `empty` does: in a program of torch.distributed without a context this
    call makes it, and serves torch.ops.symm_mem. Collective then; otherwise it does nothing.

    Deprecated in torch, whose programs still call it before their operators.
    """
    if group_of_torch() is not None:
        _begun(None)


def is_symm_mem_enabled_for_group(group_name: str) -> bool:
    """Whether `rendezvous` finds a group of that name, as all such groups are enabled. Local."""
    return names_a_group(group_name)


def get_signal_pad_size() -> int:
    """The bytes of the signal pad that this rank brings to its next rendezvous; initially 9216."""
    return PadSetting.setting


def set_signal_pad_size(size: int) -> None:
    """Set the bytes of later signal pads, a multiple of 4 that is the same on all ranks.

    A pad has `size // (4 * world_size)` channels. Raises ValueError.
    """
    change_pad_setting(size)


def include_path() -> str:
    """The folder of symm.cuh, which gives kernels of CUDA C++ the verbs put, get, signal, wait,
    barrier.

    A handle on GPUs has the options to compile with (`compile_options`) and the argument that such
    a kernel takes (`kernel_argument`). The same verbs for Triton are in `shardmath.symm_triton`.
    """
    from shardmath.cuda.compile import KERNELS

    return str(KERNELS)


def set_backend(name: str) -> None:
    """Accept "HOST" and torch's names; ValueError for any other.

    It has no effect, since the transport is found by trying; see `get_backend`,
    SHARDMATH_TRANSPORT.
    """
    if str(name).upper() not in _BACKENDS:
        raise ValueError(f"a backend is one of {', '.join(_BACKENDS)}, not {name!r}")


def get_backend(device: Any) -> str | None:
    """How memory of a device is shared: "HOST" for the host; for the GPU of the current context the
    name of its transport, "CUDA" or "NVSHMEM"; None for any other device.
    """
    context = get_context()
    if _kind_of(device) == "cpu":
        return "HOST"
    if context is None or context.team is None or _kind_of(device) != "cuda":
        return None
    return context.transport.upper()


def has_multicast_support(device_type: Any = "cpu", device_idx: int = 0) -> bool:
    """False: no device here reaches several peers with one store."""
    return False


def is_nvshmem_available() -> bool:
    """Whether GPUs of several hosts can be reached: NVSHMEM and its bindings are installed."""
    return not transport_named("cuda", "nvshmem").probe()


def get(dst: Any, hdl: SymmetricMemory, peer: int, offset: int = 0) -> None:
    """Fill `dst` with elements of `peer`'s array. See `SymmetricMemory.get`."""
    hdl.get(dst, peer, offset)


def put(src: Any, hdl: SymmetricMemory, peer: int, offset: int = 0) -> None:
    """Write `src` over elements of `peer`'s array. See `SymmetricMemory.put`."""
    hdl.put(src, peer, offset)


def put_signal(src: Any, hdl: SymmetricMemory, peer: int) -> None:
    """Write `src` over the start of `peer`'s array, then signal it on channel 0."""
    hdl.put(src, peer)
    hdl.put_signal(peer)


def wait_signal(hdl: SymmetricMemory, peer: int) -> None:
    """Wait for a signal of `peer` on channel 0: then this rank sees what the peer has put."""
    hdl.wait_signal(peer)


@untraced
def memset32(tensor: Any, offset: int, val: int, count: int = 1) -> Any:
    """Write `val` to `count` elements of a contiguous 1-D uint32 array from `offset` on; return it.

    On a GPU it is put on the library's current stream, and can be captured in CUDA graphs.

    Raises ValueError for another array or another rank's GPU, a range that the array does not have,
    or a value beyond 32 bits.
    """
    library = library_of(tensor, "tensor")
    spec = library.spec(tensor)
    if spec.ndim != 1 or spec.dtype != "uint32" or spec.order == "strided":
        raise ValueError(f"expected a contiguous 1-D uint32 array, got {spec}")
    offset, val, count = index(offset, "offset"), index(val, "val"), index(count, "count")
    if offset < 0 or count < 1 or offset + count > spec.size or not 0 <= val < 1 << 32:
        raise ValueError(
            f"cannot write {val} to elements {offset} to {offset + count} of {spec.size} uint32"
        )
    if spec.device == "cpu":
        library.host_view(tensor, writable=True, name="tensor")[offset : offset + count] = val
    else:
        _fill_on_gpu(library, tensor, offset, val, count)
    return tensor


def stream_write_value32(tensor: Any, offset: int, val: int) -> Any:
    """Write `val` to one element, as `memset32`, and return the array."""
    return memset32(tensor, offset, val)


def _fill_on_gpu(library: Library, tensor: Any, offset: int, val: int, count: int) -> None:
    from shardmath.cuda.driver import call

    spec, team = library.spec(tensor), require_context().team
    if team is None or spec.device != team.device.name:
        where = "cores" if team is None else team.device.name
        raise ValueError(f"tensor is on {spec.device}, and this rank computes on {where}")
    team.device.activate()
    stream = library.stream(team.device.ordinal)
    call("cuMemsetD32Async", library.pointer(tensor) + 4 * offset, val, count, stream)


def get_mempool_allocator(device: Any) -> Any:
    """The allocator of `get_mem_pool`, for a torch.cuda.MemPool with other options. Local."""
    from shardmath.handles.torch_pool import allocator_of

    return allocator_of(_context_of_gpu(device))


def get_mem_pool(device: Any) -> Any:
    """The torch.cuda.MemPool on the symmetric heap of this rank's GPU, always the same one. Local.

        with torch.cuda.use_mem_pool(symmetric_memory.get_mem_pool("cuda")):
            x = torch.randn(1000, device="cuda")  # can be passed to a rendezvous

    All ranks must create and drop the same tensors within it in the same order. Raises
    BackendUnavailable for another device than the context's.
    """
    from shardmath.handles.torch_pool import new_pool

    context = _context_of_gpu(device)
    return context.cache("torch.cuda.MemPool", lambda: new_pool(context))


def _context_of_gpu(device: Any) -> DistributedContext:
    """The current context, which must compute on that GPU."""
    context, (kind, _, number) = _begun(device), str(device).partition(":")
    if context.team is None:
        raise BackendUnavailable("this context computes on cores, where torch has no memory pools")
    if kind != "cuda" or number not in ("", str(context.device_id)):
        raise BackendUnavailable(
            f"this context's pool is on cuda:{context.device_id}, not {device}"
        )
    return context


def register() -> None:
    """Serve torch.ops.symm_mem by this package, in this process. Local.

    Operators are served on CPU tensors and, if the current context computes on GPUs, there too, in
    place of torch's kernels; docs/from-symmetric-memory.md lists them. Call it after torch has been
    imported, any number of times. A `group_name` is looked up as by `rendezvous`. In a program of
    torch.distributed without a context, the first operator makes one on cores, as `empty` does, and
    all ranks must call it. Raises
    BackendUnavailable without torch, NotImplementedError where this version of torch does not
    define one of them.
    """
    operators = _operators_of_torch()
    operators.serve(memset32)
    context = get_context()
    if context is not None and context.team is not None:
        operators.serve_gpus(memset32)


@collective_call
def reduce_scatter_offset(
    input: Any,
    out: Sequence[Any],
    group: Any,
    *,
    dim: int,
    offsets: Sequence[int] | None = None,
    dst_ranks: Sequence[int] | None = None,
    red_op: str = "sum",
) -> None:
    """The sums of blocks of all ranks' matrices, torch tensors, each sent to a chosen rank.
    Collective.

    Block i of `input` ends before index `offsets[i]` of axis `dim`, where the next begins; without
    `offsets` there is one block for each rank, as even as possible. Block i goes to rank
    `dst_ranks[i]`, by default to the ranks in turn. A rank's `out` are its blocks in order; it may
    have any number, of any sizes. `red_op` is "sum", "avg", "min", "max" or "product".

    Raises on all ranks: ValueError for blocks that are not within the axis, ranks that do not
    exist, and an `out` of other shapes or types; CollectiveMismatch where ranks name other blocks.
    Source: torch.distributed._symmetric_memory.reduce_scatter_offset.
    """
    sums = _operators_of_torch().sums
    sums.reduce_scatter_offset(input, out, group, dim, offsets, dst_ranks, red_op)


def _operators_of_torch() -> Any:
    try:
        from shardmath import symmetric_operators
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise BackendUnavailable(
            "torch.ops.symm_mem needs torch: pip install 'shardmath[torch]'"
        ) from error
    return symmetric_operators


def _begun(device: Any) -> DistributedContext:
    """The current context. In a program of torch.distributed the first call makes it, and serves
    the operators.
    """
    known = get_context()
    context = begun(device)
    if known is None:
        register()
    return context


class _SymmetricMemory(SymmetricMemory):
    """The functions of this module as static methods, where torch's programs look for them."""

    empty_strided_p2p = staticmethod(empty_strided_p2p)
    get_backend = staticmethod(get_backend)
    get_mempool_allocator = staticmethod(get_mempool_allocator)
    has_multicast_support = staticmethod(has_multicast_support)
    is_symm_mem_tensor = staticmethod(is_symm_mem_tensor)
    memset32 = staticmethod(memset32)
    rendezvous = staticmethod(rendezvous)
    set_backend = staticmethod(set_backend)
    set_group_info = staticmethod(set_group_info)
    stream_write_value32 = staticmethod(stream_write_value32)


def _integers(what: str, values: Any) -> tuple[int, ...]:
    try:
        integers = tuple(operator.index(value) for value in values)
    except TypeError:
        raise TypeError(f"{what} is a sequence of integers, not {values!r}") from None
    if any(value < 0 for value in integers):
        raise ValueError(f"{what} must not be negative: {integers}")
    return integers


def _library(package: ModuleType | None, dtype: Any, device: Any) -> Library:
    context = get_context()
    kind = "cpu" if context is None or context.team is None else "cuda"
    if device is not None and _kind_of(device) != kind:
        raise BackendUnavailable(
            f"this context's memory is on {kind!r}, not on {device}; see shardmath.initialize"
        )
    if package is not None:
        return library_of_package(package)
    if kind == "cpu" and _is_numpys(dtype):
        return library_named("numpy")
    named = "torch" in (type(dtype).__module__, type(device).__module__)
    wanted = device is not None and (kind == "cuda" or "torch" in sys.modules)
    return library_named("torch" if named or wanted else "numpy")


def _is_numpys(dtype: Any) -> bool:
    """Whether `dtype` is an object of NumPy's, rather than a name that other libraries know too."""
    return isinstance(dtype, np.dtype) or (
        isinstance(dtype, type) and issubclass(dtype, np.generic)
    )


def _kind_of(device: Any) -> str:
    return str(getattr(device, "type", device)).partition(":")[0]
