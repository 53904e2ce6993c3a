"""Pools of torch's caching allocator on the symmetric heap: tensors made within one are symmetric.

torch allocates and frees segments through two C functions. Here they are Python functions, so that
the pool needs no compiler. A segment is one block of the heap.
"""

from __future__ import annotations

import ctypes
from typing import Any

from shardmath.base.log import package_logger
from shardmath.context.context import Context
from shardmath.symmetric.heap import Buffer

_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


class PoolAllocator:
    """The source of memory of torch's allocator for one context: the addresses of `functions`."""

    def __init__(self, context: Context) -> None:
        self._heap = context.heap
        self._segments: dict[int, Buffer] = {}
        calls = _ALLOCATE(self._allocate), _FREE(self._free)
        # They are never freed: torch may call them until the process ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(calls))
        self.functions = [ctypes.cast(call, ctypes.c_void_p).value for call in calls]

    @classmethod
    def of(cls, context: Context) -> PoolAllocator:
        """The allocator of `context`."""
        return context.cache("torch's pool", lambda: cls(context))

    def _allocate(self, nbytes: int, device: int, stream: int | None) -> int | None:
        """The address of a new segment; None, for torch's OutOfMemoryError, where there is none.

        It must not raise into torch's C++.
        """
        try:
            buffer = self._heap.allocate(nbytes)
        except Exception as error:
            package_logger().warning("no segment of %d bytes for torch's pool: %s", nbytes, error)
            return None
        address: int = buffer.block.address
        self._segments[address] = buffer
        return address

    def _free(self, address: int, nbytes: int, device: int, stream: int | None) -> None:
        self._segments.pop(address, None)


def allocator_of(context: Context) -> Any:
    """The allocator of a torch.cuda.MemPool."""
    import torch

    return torch._C._cuda_customAllocator(*PoolAllocator.of(context).functions)


def new_pool(context: Context) -> Any:
    """A torch.cuda.MemPool whose segments are blocks of the heap; one tensor in each."""
    import torch

    return torch.cuda.MemPool(allocator_of(context), use_on_oom=False, no_split=True)
