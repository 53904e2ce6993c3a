"""Pools of torch's caching allocator on the symmetric heap: tensors made within one are symmetric.

torch asks for segments, and gives them back, through two C functions; here they are Python's, so
the pool needs no compiler. A segment is one block of the heap.
"""

from __future__ import annotations

import ctypes
from typing import Any

from shardmath.base.log import LOGGER
from shardmath.context.context import Context
from shardmath.symmetric.heap import Buffer

_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


class PoolAllocator:
    """What torch's allocator of one context of GPUs asks for memory: `functions`, by address."""

    def __init__(self, context: Context) -> None:
        self._heap = context.heap
        self._segments: dict[int, Buffer] = {}
        calls = _ALLOCATE(self._allocate), _FREE(self._free)
        # They are never freed: torch may call them when a pool ends, as late as the process.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(calls))
        self.functions = [ctypes.cast(call, ctypes.c_void_p).value for call in calls]

    @classmethod
    def of(cls, context: Context) -> PoolAllocator:
        """The one of `context`."""
        return context.cache("torch's pool", lambda: cls(context))

    def _allocate(self, nbytes: int, device: int, stream: int | None) -> int | None:
        """Where a new segment lies; None, of which torch makes its OutOfMemoryError, for none.

        No exception can leave it, to torch's C++.
        """
        try:
            buffer = self._heap.allocate(nbytes)
        except Exception as error:
            LOGGER.warning("no segment of %d bytes for torch's pool: %s", nbytes, error)
            return None
        address: int = buffer.block.address
        self._segments[address] = buffer
        return address

    def _free(self, address: int, nbytes: int, device: int, stream: int | None) -> None:
        self._segments.pop(address, None)


def allocator_of(context: Context) -> Any:
    """What a torch.cuda.MemPool takes for its allocator."""
    import torch

    return torch._C._cuda_customAllocator(*PoolAllocator.of(context).functions)


def new_pool(context: Context) -> Any:
    """A torch.cuda.MemPool whose segments are blocks of the heap; one tensor in each."""
    import torch

    return torch.cuda.MemPool(allocator_of(context), use_on_oom=False, no_split=True)
